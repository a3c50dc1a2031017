"""The verdict's rule: each clause alone, and its operating characteristics by simulation.

Noise model of the simulation (per round, in logarithms): process effect, AR(1) drift (SD 0.4 %, ρ 0.9), white noise
0.25 %, spikes of 2 % in 4 % of rounds; 8 ABBA pairs a process.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from microllm.errors import EvidenceError
from microllm.evidence.statistics import geometric_mean, sign_flip_p, summarise, t_quantile
from microllm.evidence.verdict import DISCARD, KEEP, OPEN, Measured, Rule, confirm, decide, judge

GOOD = (0.0100, 0.0104, 0.0098, 0.0101, 0.0097, 0.0102)
SD = 0.001


def session(medians=GOOD, **changes):
    return Measured(**({"medians": medians, "process_sd": SD} | changes))


# ---- statistics


@pytest.mark.parametrize(
    ("degrees", "published"),
    [(1, 12.7062), (2, 4.3027), (5, 2.5706), (7, 2.3646), (11, 2.2010), (13, 2.1604), (30, 2.0423), (60, 2.0003)],
)
def test_t_quantile_agrees_with_the_printed_table(degrees, published):
    assert t_quantile(degrees) == pytest.approx(published, abs=1.2e-4)


def test_summary_by_hand():
    found = summarise([1.0, 2.0, 4.0])
    assert float(found.effect) == pytest.approx(2.25)  # Walsh averages 1, 1.5, 2, 2.5, 3, 4
    half = 4.30265 * 1.5275252 / math.sqrt(3)
    assert float(found.lower) == pytest.approx(7 / 3 - half, rel=1e-5)
    assert float(found.upper) == pytest.approx(7 / 3 + half, rel=1e-5)
    assert int(found.num_positive) == 3


def test_sign_flips_by_hand():
    assert sign_flip_p(GOOD) == 1 / 64
    assert sign_flip_p([0.5, 1.0, -0.1]) == 2 / 8
    assert sign_flip_p([-1.0, -1.0]) == 1.0
    with pytest.raises(ValueError, match="1 to 16"):
        sign_flip_p([0.1] * 17)


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


# ---- each clause of the rule


def test_keep():
    found = judge(session())
    assert found.status == "keep"
    assert not found.confirmed
    assert (found.num_processes, found.num_positive) == (6, 6)
    assert found.sign_flip_p == 1 / 64


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"crash": "exit code 1"}, "crash", "exit code 1"),
        ({"invalid": ("busy",)}, "invalid", "busy"),
        ({"gates_pass": False}, "invalid", "correctness gate"),
        ({"medians": (*GOOD[:5], math.nan)}, "invalid", "no finite median"),
        ({"guards": {"g": (0.0, math.nan)}}, "invalid", "no finite median"),
        ({"control": [0.006, 0.0061, 0.0059, 0.006, 0.006, 0.006]}, "invalid", "A/A control"),
        ({"control": [-0.006, -0.0061, -0.0059, -0.006, -0.006, -0.006]}, "invalid", "A/A control"),
        ({"medians": GOOD[:5]}, "inconclusive", "need 6"),
        ({"medians": GOOD[:1]}, "inconclusive", "need 6"),
        ({"medians": ()}, "inconclusive", "need 6"),
        ({"quick": True}, "inconclusive", "quick mode"),
        ({"process_sd": None}, "inconclusive", "no recorded A/A calibration"),
        ({"process_sd": 0.0041}, "inconclusive", "0.41%"),
        ({"process_sd": math.nan}, "inconclusive", "nan%"),
        ({"peak_ratio": 1.0101}, "inconclusive", "peak memory"),
        ({"peak_ratio": None}, "inconclusive", "not measured"),
        ({"guards": {"g": [-0.006] * 5 + [-0.0061]}}, "discard", "allowed -0.5%"),
        ({"guards": {"g": (-0.02, 0.02, -0.01, 0.01, 0.0, -0.002)}}, "inconclusive", "guard g: +"),
        ({"guards": {"g": (0.0,)}}, "inconclusive", "by 1 processes"),
        ({"medians": [-x for x in GOOD]}, "discard", "effect -1.00%"),
        ({"medians": [0.0001, -0.0001, 0.0002, -0.0002, 0.0, 0.0001]}, "discard", "effect"),
        ({"medians": (*GOOD[:4], -0.001, -0.001)}, "inconclusive", "4 of 6"),
    ],
)
def test_each_clause_alone_prevents_a_keep(changes, status, reason):
    found = judge(session(**changes))
    assert found.status == status
    assert any(reason in text for text in found.reasons), found.reasons


@pytest.mark.parametrize(
    "changes",
    [
        {"control": [0.001, -0.001, 0.002, 0.0, -0.002, 0.001]},
        {"control": [0.0020, 0.0021, 0.0019, 0.0020, 0.0020, 0.0020]},  # differs, but by less than δ
        {"guards": {"g": [-0.0049] * 5 + [-0.00489], "h": GOOD}},
        {"peak_ratio": 1.01},
        {"process_sd": 0.004},
        {"medians": (*GOOD[:5], -0.0001)},  # P - 1 of P
    ],
)
def test_what_the_rule_lets_pass(changes):
    assert judge(session(**changes)).status == "keep"


def test_effect_below_delta_is_not_kept_however_certain():
    medians = [0.00290, 0.00291, 0.00289, 0.00290, 0.00290, 0.00290]
    assert judge(session(medians)).status == "discard"  # upper bound below δ
    assert judge(session(medians), Rule(min_effect=0.0025)).status == "keep"
    assert judge(session(GOOD), Rule(min_effect=0.0101)).status == "inconclusive"


def test_declared_memory_trade():
    assert judge(session(peak_ratio=1.2)).status == "inconclusive"
    assert judge(session(peak_ratio=1.2), Rule(memory_limit=1.25)).status == "keep"


def test_one_extension_to_twelve_then_discard():
    wavering = (0.010, 0.001, 0.008, -0.002, 0.006, 0.001)
    first = judge(session(wavering))
    assert (first.status, first.extend) == ("inconclusive", True)
    for count in (7, 11):  # the rule looks at 6 and at 12 only
        assert judge(session((GOOD * 2)[:count])).extend
        assert judge(session([-x for x in (GOOD * 2)[:count]])).extend
    last = judge(session(wavering * 2))
    assert (last.status, last.extend) == ("discard", False)
    assert judge(session(GOOD * 2)).status == "keep"


def test_a_noisy_machine_is_not_asked_for_more():
    assert not judge(session((0.010, 0.001, 0.008, -0.002, 0.006, 0.001), process_sd=0.005)).extend


def test_sign_flips_that_disagree_are_said():
    # All positive, so p = 1/64, but one far outlier pulls the t bound under 0.
    found = judge(session((0.001, 0.001, 0.001, 0.001, 0.001, 0.08)))
    assert found.lower is not None
    assert found.lower < 0
    assert "sign-flip test (p = 0.016) does not side" in found.reasons[-1]


def test_confirmation():
    keep, discard = judge(session()), judge(session([0.0] * 5 + [1e-6]))
    assert confirm(keep, keep, 3600).confirmed
    refused = confirm(keep, discard, 3600)
    assert (refused.status, refused.confirmed) == ("discard", False)
    with pytest.raises(EvidenceError, match="only that is confirmed"):
        confirm(discard, keep, 3600)
    with pytest.raises(EvidenceError, match="need 1800 s"):
        confirm(keep, keep, 1799)


def test_decision_over_many_sessions_is_that_of_each():
    medians = np.random.default_rng(0).normal(0.003, 0.003, (500, 6))
    codes = decide(summarise(medians), Rule())
    names = {KEEP: "keep", DISCARD: "discard", OPEN: "inconclusive"}
    assert {names[int(code)] for code in codes} == {"keep", "discard", "inconclusive"}
    for row, code in zip(medians, codes, strict=True):
        assert judge(session(row)).status == names[int(code)]


# ---- operating characteristics

TRIALS = 6000
EFFECTS = (0.0, -0.005, 0.003, 0.005, 0.0075, 0.01)


def simulate_medians(rng, trials, processes, effect, sd_of_d, pairs=8):
    """Per-process medians of d; ``sd_of_d`` is the SD that processes add to d."""
    rounds = 2 * pairs
    shape = (trials, processes, rounds)
    drift = np.empty(shape)
    drift[..., 0] = rng.normal(0, 0.004, shape[:2])
    for i in range(1, rounds):
        drift[..., i] = 0.9 * drift[..., i - 1] + rng.normal(0, 0.004 * math.sqrt(1 - 0.81), shape[:2])
    spikes = (rng.random(shape) < 0.04) * rng.exponential(0.02, shape)
    noise = drift + spikes + rng.normal(0, 0.0025, shape)
    flipped = rng.random((trials, processes, pairs // 2)) < 0.5
    first_is_a = np.stack([~flipped, flipped], -1).reshape(trials, processes, pairs)
    difference = noise[..., 0::2] - noise[..., 1::2]
    d = np.where(first_is_a, difference, -difference) + effect
    return np.median(d, -1) + rng.normal(0, sd_of_d, shape[:2])


def run_sessions(medians, process_sd, rule):
    """Return the codes of whole sessions: 6 processes, and 12 where 6 leave it open."""
    if process_sd > rule.max_process_sd:
        return np.full(len(medians), OPEN)
    six, twelve = decide(summarise(medians[:, :6]), rule), decide(summarise(medians), rule)
    return np.where(six == OPEN, twelve, six)


@pytest.fixture(scope="module")
def characteristics():
    """Keep and discard shares of one session, and keeps after confirmation, by SD and effect."""
    rng, rule, table = np.random.default_rng(11), Rule(), {}
    for sd in (0.001, 0.002, 0.003, 0.005):
        # The machine's calibration as the lab defines it: the SD of per-process medians of d under A/A.
        calibration = float(simulate_medians(rng, 20_000, 1, 0.0, sd).std())
        for effect in EFFECTS:
            codes = [run_sessions(simulate_medians(rng, TRIALS, 12, effect, sd), calibration, rule) for _ in range(2)]
            kept = codes[0] == KEEP
            table[sd, effect] = {
                "calibration": calibration,
                "keep": kept.mean(),
                "discard": (codes[0] == DISCARD).mean(),
                "open": (codes[0] == OPEN).mean(),
                "confirmed": (kept & (codes[1] == KEEP)).mean(),
            }
    return table


def test_operating_characteristics(characteristics, capsys):
    lines = ["", "  process SD  calibration  effect     keep  discard  after confirmation (%)"]
    for (sd, effect), row in characteristics.items():
        lines.append(
            f"  {sd:10.1%}  {row['calibration']:11.2%}  {effect:+6.2%}  {100 * row['keep']:7.2f}"
            f"  {100 * row['discard']:7.2f}  {100 * row['confirmed']:7.2f}"
        )
    with capsys.disabled():
        sys.stdout.write("\n".join(lines) + "\n")
    for sd in (0.001, 0.002, 0.003):
        assert characteristics[sd, 0.0]["calibration"] < 0.004
        assert characteristics[sd, 0.0]["keep"] <= 0.015
        assert characteristics[sd, 0.0]["confirmed"] <= 0.001
        assert characteristics[sd, -0.005]["keep"] == 0
        assert characteristics[sd, 0.01]["keep"] >= 0.99
        assert characteristics[sd, 0.01]["confirmed"] >= 0.98
        assert characteristics[sd, 0.0]["open"] == 0, "after the extension every session is decided"


def test_a_machine_of_half_a_percent_decides_nothing(characteristics):
    assert all(characteristics[0.005, effect]["open"] == 1 for effect in EFFECTS)
    assert judge(session(process_sd=0.005)).status == "inconclusive"
    assert judge(replace(session(), process_sd=0.005), Rule(max_process_sd=0.006)).status == "keep"
