"""Timing: the order, the two clocks, what is dropped, what d means. Rounds are made up where arithmetic is judged."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from pydantic import TypeAdapter

from microllm.errors import EvidenceError
from microllm.evidence import timing
from microllm.evidence.replicates import run_replicate
from microllm.evidence.timing import (
    QUICK,
    PairedTiming,
    Round,
    RoundClock,
    TimingConfig,
    draw_order,
    time_pairs,
)


def make_round(arm, seconds, repetitions=10, **changes):
    fields = {"host_s": seconds, "second_s": seconds} | changes
    return Round(arm=arm, repetitions=repetitions, **fields)


def make_timing(rounds, config=None, control=(), **changes):
    config = config or TimingConfig(pairs=2, control_pairs=0)
    fields = {"device": "cpu", "foreign_cpus": 0.0} | changes
    return PairedTiming(config=config, rounds=tuple(rounds), control_rounds=tuple(control), **fields)


def test_d_is_positive_when_the_candidate_is_faster():
    timed = make_timing([make_round("A", 1.10), make_round("B", 1.0), make_round("B", 1.0), make_round("A", 1.10)])
    assert timed.pairs == pytest.approx([math.log(1.1)] * 2)
    assert timed.median == pytest.approx(math.log(1.1))
    assert timed.ratio == pytest.approx(1.1)
    assert timed.seconds("A") == pytest.approx(0.11)
    assert not timed.problems


def test_d_counts_repetitions():
    timed = make_timing([make_round("A", 1.0, repetitions=10), make_round("B", 1.0, repetitions=20)])
    assert timed.pairs == pytest.approx([math.log(2)])


def test_lower_ratio_is_the_t_bound_over_pairs():
    values = [0.01, 0.02, 0.03, 0.02]
    rounds = [r for d in values for r in (make_round("A", math.exp(d)), make_round("B", 1.0))]
    mean, half = 0.02, 3.18245 * 0.00816497 / 2
    assert math.log(make_timing(rounds).lower_ratio) == pytest.approx(mean - half, rel=1e-4)


@pytest.mark.parametrize(
    "spoiled",
    [{"second_s": 1.0051}, {"second_s": 0.9949}, {"throttle": ("hw_thermal",)}, {"host_s": 0.49, "second_s": 0.49}],
)
def test_a_spoiled_round_drops_its_pair_whole(spoiled):
    good = [make_round(arm, 1.0) for arm in "ABBA" * 3]
    timed = make_timing([make_round("A", 1.0), make_round("B", **({"seconds": 1.0} | spoiled)), *good])
    assert len(timed.pairs) == 6
    assert not timed.problems, "one pair of seven is within the allowance"
    timed = make_timing([make_round("A", 1.0), make_round("B", **({"seconds": 1.0} | spoiled)), *good[:4]])
    assert "1 of 3 pairs dropped" in timed.problems[0]


def test_allowed_throttle_reasons_and_close_clocks_keep_the_pair():
    timed = make_timing([make_round("A", 1.0, second_s=1.0049, throttle=("sw_power_cap",)), make_round("B", 1.0)])
    assert len(timed.pairs) == 1


def test_nothing_kept_is_a_problem_and_never_a_number():
    timed = make_timing([make_round("A", 1.0, second_s=2.0), make_round("B", 1.0)])
    assert math.isnan(timed.median)
    assert math.isnan(timed.lower_ratio)
    assert timed.problems


def test_foreign_work_spoils_a_cpu_timing_but_not_a_gpu_one():
    rounds = [make_round("A", 1.0), make_round("B", 1.0)]
    assert "cores busy" in make_timing(rounds, foreign_cpus=99.0).problems[0]
    assert not make_timing(rounds, foreign_cpus=99.0, device="cuda").problems


def test_order_is_abba_or_baab_from_the_seed():
    orders = {draw_order(8, seed) for seed in range(40)}
    assert len(orders) > 8
    for order in orders:
        assert {order[i : i + 4] for i in range(0, 16, 4)} <= {"ABBA", "BAAB"}
    assert draw_order(8, 3) == draw_order(8, 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pairs": 3}, "need even numbers"),
        ({"pairs": 0}, "need even numbers"),
        ({"control_pairs": 1}, "need even numbers"),
        ({"round_s": 0.1}, "1.0 s of each arm"),
        ({"round_s": 0.019, "quick": True}, "at least 0.02"),
        ({"round_s": math.nan}, "at least 0.02"),
    ],
)
def test_config_refuses(changes, expected):
    with pytest.raises(EvidenceError, match=expected):
        TimingConfig(**changes)


@pytest.fixture(scope="module")
def quick_timing():
    matrix = torch.randn(96, 96)
    calls = {"A": 0, "B": 0}

    def work(arm, count):
        calls[arm] += 1
        for _ in range(count):
            torch.mm(matrix, matrix)

    timed = time_pairs(lambda: work("A", 30), lambda: work("B", 10), config=replace(QUICK, pairs=4, seed=7))
    return timed, calls


def test_real_timing_sees_a_third_of_the_work(quick_timing):
    timed, _ = quick_timing
    assert timed.config.quick
    assert 1.5 < timed.ratio < 6
    assert "".join(r.arm for r in timed.rounds) == draw_order(4, 7)
    assert "".join(r.arm for r in timed.control_rounds) == draw_order(2, 8)
    assert all(r.host_s > 0 and r.second_s > 0 for r in timed.rounds)


def test_a_pair_too_short_is_timed_again_whole():
    """A machine that speeds up while it is timed: both rounds of a pair still do equal counts of calls."""
    clock, speed = RoundClock("cpu"), iter([1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0])

    def time_faked(action, repetitions, arm="A"):
        took = 0.01 * repetitions * next(speed)
        return Round(arm=arm, repetitions=repetitions, host_s=took, second_s=took)

    clock.time = time_faked
    rounds = clock.run({"A": list, "B": list}, "ABBAAB", 4, 0.02)
    assert "".join(r.arm for r in rounds) == "ABBAAB"
    for first, second in zip(rounds[::2], rounds[1::2], strict=True):
        assert first.repetitions == second.repetitions
    assert [r.repetitions for r in rounds] == [4, 4, 24, 24, 24, 24]


def test_both_arms_are_called_as_often_as_the_rounds_say(quick_timing):
    timed, calls = quick_timing
    assert calls["B"] > sum(r.repetitions for r in timed.rounds if r.arm == "B")
    assert calls["A"] > sum(r.repetitions for r in (*timed.rounds, *timed.control_rounds) if r.arm == "A")


def test_timing_survives_json_and_computes_the_same(quick_timing):
    timed, _ = quick_timing
    again = TypeAdapter(PairedTiming).validate_json(json.dumps(asdict(timed)))
    assert again == timed
    assert again.median == timed.median


def test_rounds_that_turn_out_too_short_are_run_again(monkeypatch):
    clock = RoundClock("cpu")
    monkeypatch.setattr(clock, "time", lambda action, calls, arm="A": make_round(arm, 0.001 * calls, calls))
    rounds = clock.run({"A": int, "B": int}, "ABBA", 5, 0.02)
    assert [r.arm for r in rounds] == list("ABBA")
    assert {r.repetitions for r in rounds} == {24}, "5 calls take 5 ms; 24 would take 20 ms and a fifth more"


def test_a_candidate_that_patches_the_timer_changes_nothing(monkeypatch):
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: 0)
    taken = RoundClock("cpu").time(lambda: sum(range(1000)), 200)
    assert taken.host_s > 0
    assert taken.usable(0.0, 0.05)


def test_replicates_are_processes_and_failures_are_kept():
    good, crash, noise, silent = (
        run_replicate(("-c", code))
        for code in (
            "import json, os; print('noise'); print(json.dumps({'pid': os.getpid()}))",
            "raise SystemExit('broken')",
            "print('not json')",
            "pass",
        )
    )
    assert good.result is not None
    assert good.result["pid"] > 0
    assert crash.result is None
    assert "broken" in crash.error
    assert noise.result is None
    assert "not JSON" in noise.error
    assert silent.result is None


def test_a_replicate_that_hangs_is_ended():
    done = run_replicate(("-c", "import time; time.sleep(60)"), timeout_s=0.5)
    assert done.result is None
    assert "no answer after 0.5 s" in done.error


@pytest.mark.gpu
def test_cuda_events_agree_with_the_host_clock():
    left = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    timed = time_pairs(lambda: left @ left, lambda: left @ left, device="cuda", config=QUICK)
    assert len(timed.pairs) == 8, [(r.host_s, r.second_s) for r in timed.rounds]
    assert abs(timed.median) < 0.02
    assert len(timed.control) == 2
