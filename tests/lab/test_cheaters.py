"""Faults planted to look fast: each must be called ``invalid``, or lose its figure.

Those of the eleven that other files hold are named here and stay there:

* cached output: ``test_hostile_records.py`` (``WRONG["cached"]``); a copy of a kept result: here
* work elsewhere: here, in a thread; in a CUDA stream where there is a GPU
* mutated input: ``evidence/test_gates.py`` (null check) for the baseline; of the candidate: here
* skipped backward: here for the benchmark; ``test_align_train.py`` for a wrong gradient
* lowered precision: here; ``cli/test_bench.py`` for an arm that calls itself fp32
* patched timer: ``evidence/test_timing.py`` (the clock patched in ``time``); one clock of the two: here
* parity failure with a great time: here, end to end; ``evidence/test_rows.py``, ``test_bench_engine.py``,
  ``cli/test_bench.py`` and ``test_tune.py`` for rows and tuned blocks
* tampered receipt: ``evidence/test_receipt.py`` (every field, every byte), ``test_experiment.py`` (every file)
* a row above the peak: ``evidence/test_rows.py``, ``test_bench_ops.py`` and ``test_roofline.py``
* an arm that fell back: ``structures/test_contract.py`` for the ledger; its row in the benchmark: here
* a peer in a worse form than its best: ``cli/test_bench.py`` for the form that is timed; a track's score: here
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_hostile_records import add, canonical_json, gate, new, row_fields, wrapped

from microllm.evidence import timing
from microllm.evidence.environment import capture_environment
from microllm.evidence.rows import Row, environment_fields, write_row
from microllm.evidence.timing import QUICK, time_pairs
from microllm.lab import bench_attach, bench_train, replicate
from microllm.lab.bench_train import measure_train
from microllm.lab.bench_train_config import BenchTrainConfig
from microllm.lab.contract import read_contract
from microllm.lab.experiment import RunConfig, run_experiment
from microllm.lab.judgement import judge_experiment, judge_sessions
from microllm.lab.record import RawRow, Records

pytestmark = pytest.mark.slow

TRAIN = BenchTrainConfig(rows=2, row_tokens=16, device="cpu", rounds=2, round_s=0.01, forms=("eager",))
CACHED = "kept.append(inner()) if not kept else None\n        return kept[0].clone()"
LATER = (
    "import threading, time, torch\n        out = torch.zeros(2, 64)\n        kept.append(out)\n"
    "        def work():\n            time.sleep(0.01)\n            out.copy_(inner())\n"
    "        threading.Thread(target=work).start()\n        return out"
)
LOWERED = {
    "values": "return inner().bfloat16().float()",
    "dtype": "return inner().bfloat16()",
}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "lab"


# ---- what the gate sees before anything is timed


def test_a_copy_of_a_kept_result(root):
    report = gate(root, CACHED)
    assert not report["passed"]
    assert "same on other inputs" in " ".join(report["reasons"])


def test_a_result_that_comes_after_the_call(root):
    report = gate(root, LATER)
    assert not report["passed"]
    assert "changed after the call" in " ".join(report["reasons"])


@pytest.mark.parametrize("form", LOWERED)
def test_a_lower_precision_than_the_tracks(form, root):
    report = gate(root, LOWERED[form])
    assert not report["passed"]
    assert ("relative_l2" if form == "values" else "torch.bfloat16") in " ".join(report["reasons"])


@pytest.mark.parametrize("body", ["return inner()", "kept[:] = [inner()]\n        return kept[0]"])
def test_honest_forms_pass(body, root):
    assert gate(root, body)["passed"]


# ---- what is seen once it was timed


def test_an_input_that_wears_away(root):
    """A norm does not see its input halved: two calls are right, a thousand are not."""
    directory = new(root, candidate="hostile.py:build", num_threads=None)
    wrapped(directory, "inner.__closure__[1].cell_contents.mul_(0.5)\n        return inner()")
    task = replicate.Task(phase="time", directory=str(directory), seeds=(1,), quick=True)
    (row,) = replicate.measure(task, read_contract(directory))["rows"]
    assert row["parity"] != "pass"
    add(directory, [canonical_json({**row_fields(2.0, process=p), "parity": row["parity"]}) for p in range(6)])
    assert judge_experiment(directory).verdict.status == "invalid"


def test_work_in_a_thread_is_seen_when_the_calls_are_over():
    x, short = torch.randn(128, 128), replace(QUICK, pairs=2, control_pairs=0, warmup_s=0.0)

    def work():
        return x @ x

    with ThreadPoolExecutor(1) as pool:
        timed = time_pairs(work, lambda: pool.submit(work), config=short)
        pool.shutdown(cancel_futures=True)
    assert any("work was not timed" in problem for problem in timed.problems)
    honest = time_pairs(work, work, config=short)
    assert not any("work was not timed" in problem for problem in honest.problems)


@pytest.mark.gpu
def test_work_in_another_stream_keeps_no_pair():
    x, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()

    def hidden():
        with torch.cuda.stream(side):
            return x @ x

    timed = time_pairs(lambda: x @ x, hidden, device="cuda", config=QUICK)
    assert timed.problems, "events on the current stream do not see what the host waits for"
    assert not timed.pairs


@pytest.mark.parametrize("name", ["_host_ns", "clock_gettime_ns"])
def test_a_clock_that_runs_slow_keeps_no_pair(name, monkeypatch):
    owner = timing if name == "_host_ns" else timing.time
    real, patched = getattr(owner, name), []

    def candidate():
        if not patched:
            patched.append(True)
            monkeypatch.setattr(owner, name, lambda *which: real(*which) // 2)
        return sum(range(1000))

    timed = time_pairs(lambda: sum(range(1000)), candidate, config=replace(QUICK, pairs=2, warmup_s=0.0))
    monkeypatch.undo()
    assert not timed.pairs
    assert "clocks apart" in " ".join(timed.problems)


def test_a_great_time_of_a_wrong_result(root):
    directory = new(root)
    lines = [canonical_json(row_fields(2.0, process=p)) for p in range(6)]
    add(directory, lines, gates_pass=False)
    found = judge_experiment(directory).verdict
    assert found.status == "invalid"
    assert "correctness gate" in found.reasons[0]


def test_a_timing_that_left_work_behind_is_invalid(root):
    directory = new(root)
    fields = row_fields(2.0)
    fields["timing"]["trailing_cpus"] = 0.9
    add(directory, [canonical_json(row_fields(2.0, process=p)) for p in range(6)])
    (session,) = Records(directory).sessions()
    session.rows[0] = RawRow.model_validate_json(json.dumps(fields))
    assert judge_sessions(read_contract(directory), [session]).verdict.status == "invalid"


# ---- benchmarks


def test_a_step_that_skips_its_backward_pass(monkeypatch):
    real = bench_train.ours

    def forward_only(*given):
        arm = real(*given)
        loss = arm.step()
        arm.step = lambda: loss
        return arm

    monkeypatch.setattr(bench_train, "ours", forward_only)
    (row,) = measure_train(TRAIN)
    assert (row.ours, row.status) == (None, "precision_mismatch")
    assert "trains nothing" in row.parity


def test_an_attached_arm_that_fell_back_has_no_speed():
    def plan(fallbacks) -> Any:
        ledger = SimpleNamespace(calls=9, replays=0, by_band=0, fallbacks=fallbacks, restored=0)
        seats = [SimpleNamespace(structure=name, ledger=ledger) for name in bench_attach.REQUIRED]
        return SimpleNamespace(seats=seats)

    assert bench_attach._why_not(plan(0), 1.0, "bf16_structural") == ""
    why = bench_attach._why_not(plan(1), 1.0, "bf16_structural")
    assert why == "4 calls fell back to the host"
    step: Any = SimpleNamespace(token_ids=torch.zeros(1, 1))
    arm = bench_attach._Arm("seats", None, step, torch.zeros(1), why)
    timed = time_pairs(
        lambda: time.sleep(0.002), lambda: time.sleep(0.001), config=replace(QUICK, pairs=2, warmup_s=0.0)
    )
    fields = environment_fields(capture_environment("cpu")) | {"dtype": "float32"}
    row = bench_attach._row("A1", "decode", arm, "nothing attached", timed, fields)
    assert (row.ours, row.parity, row.status) == (None, why, "precision_mismatch")


def test_an_attached_prompt_of_other_logits_has_no_speed():
    logits = [torch.ones(4)]
    site = SimpleNamespace(install=lambda: logits[0].fill_(-1), remove=lambda: logits[0].fill_(1))
    ledger = SimpleNamespace(calls=9, replays=0, by_band=0, fallbacks=0, restored=0)
    plan: Any = SimpleNamespace(
        seats=[SimpleNamespace(structure=name, ledger=ledger) for name in bench_attach.REQUIRED],
        build=SimpleNamespace(attachment=SimpleNamespace(sites=[site])), activate=int, detach=int,
    )  # fmt: skip
    model: Any = lambda ids: SimpleNamespace(logits=logits[0].clone())  # noqa: E731
    fields = environment_fields(capture_environment("cpu")) | {"dtype": "float32"}
    (row,) = bench_attach._prefill(model, {"none seats": plan}, torch.zeros(8), fields, bench_attach.AttachBench())
    assert (row.ours, row.status) == (None, "precision_mismatch")
    assert "logits of cosine" in row.parity


def test_a_tracks_score_is_beside_the_quickest_form_of_a_peer(root):
    environment = environment_fields(capture_environment("cpu"))
    for form, rate in (("eager", 10.0), ("compiled", 80.0)):
        write_row(root / "rows" / "T1.jsonl", Row.model_validate({
            **environment, "target": "T1", "workload": "train", "dtype": "float32", "ours": 100.0, "peer": rate,
            "peer_name": f"transformers {form}", "unit": "tok/s", "parity": "pass",
        }))  # fmt: skip
    directory = new(root, kind="baseline", baseline=None, candidate=None, score_targets=("T1",))
    run_experiment(RunConfig(id="001", root=root))
    (receipt,) = Records(directory).receipts("baseline")
    assert list(receipt.body["ratios"].values()) == [pytest.approx(1.25)]
