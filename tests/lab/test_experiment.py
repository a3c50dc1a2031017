"""The lab from contract to picture. Sessions are made up where the rule is tested; one is run for real."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from microllm.cli import main
from microllm.errors import EvidenceError, MissingExtraError
from microllm.evidence.calibration import Calibration, process_sd, read_calibration, write_calibration
from microllm.evidence.environment import capture_environment
from microllm.evidence.journal import read_lines
from microllm.evidence.preflight import check_machine
from microllm.evidence.rows import Row, environment_fields, write_row
from microllm.evidence.timing import PairedTiming, Round, TimingConfig, draw_order
from microllm.lab import replicate, staircase
from microllm.lab.contract import load_entry, read_contract
from microllm.lab.experiment import NewConfig, RunConfig, find_experiment, new_experiment, run_experiment
from microllm.lab.judgement import judge_experiment, judge_sessions, measured
from microllm.lab.record import RawRow, Records, SessionBody
from microllm.lab.staircase import RenderConfig, read_tracks, render
from microllm.lab.validate import ValidateConfig, VerifyConfig, validate, verify

REPOSITORY = Path(__file__).parents[2]
FORMS = REPOSITORY / "lab" / "experiments" / "001-rms-norm-forms" / "forms.py"
GOOD = (0.050, 0.052, 0.049, 0.051, 0.048, 0.051)
WAVERING = (0.010, 0.001, 0.008, -0.002, 0.006, 0.001)
GOOD_EFFECT = 0.05  # its Hodges-Lehmann estimate
NOTHING = (0.0001, -0.0001, 0.0002, -0.0002, 0.0, 0.0001)

CONFIG = NewConfig(
    name="RMS norm forms",
    hypothesis="One call to torch's rms_norm is faster on one row than five written-out operators",
    refuted_if="the lower bound of the effect on one row is not above zero",
    mechanism="one dispatch instead of five; no tensors in between",
    predicted_effect=0.1,
    baseline="forms.py:written_out",
    candidate="forms.py:one_call",
    workloads=('one-row={"rows": 1, "width": 896}', 'prompt={"rows": 64, "width": 896}'),
    num_threads=1,
)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "lab"


def new(root, **changes):
    directory = new_experiment(replace(CONFIG, root=root, **changes))
    shutil.copy(FORMS, directory / "forms.py")
    return directory


def make_timing(d, control=0.0):
    def rounds(value, pairs):
        return tuple(
            Round(arm=arm, repetitions=10, host_s=s, second_s=s)
            for arm in draw_order(pairs, 0)
            for s in [math.exp(value) if arm == "A" else 1.0]
        )

    return PairedTiming(
        device="cpu", config=TimingConfig(), rounds=rounds(d, 8), control_rounds=rounds(control, 4), foreign_cpus=0.0
    )


@pytest.fixture(scope="module")
def environment():
    return capture_environment("cpu", command=("microllm", "lab", "run"))


def add_session(directory, environment, medians, *, number=1, first=0, after_minutes=1.0, guard=0.0, row=None, **body):
    """Append a session of one process for each median, begun ``after_minutes`` after the contract."""
    contract, records = read_contract(directory), Records(directory)
    started = datetime.fromisoformat(contract.created) + timedelta(minutes=after_minutes)
    digests = []
    for process, median in enumerate(medians, first):
        for workload in contract.workloads:
            target = workload is contract.workloads[0]
            fields = {
                "session": number, "process": process, "workload": workload.name, "seed": process, "pid": 1,
                "started": (started + timedelta(seconds=20 * process)).isoformat(), "parity": "pass",
                "timing": make_timing(median if target else guard), "preflight": check_machine("cpu", watch_s=0.0),
                "baseline_peak_bytes": 1000, "candidate_peak_bytes": 1000,
            }  # fmt: skip
            made = RawRow.model_validate(fields | (row or {}))
            quiet = made.preflight and made.preflight.__class__(**{**_fields(made.preflight), "problems": ()})
            digests.append(records.append_row(made.model_copy(update={"preflight": quiet})))
    fields = {"session": number, "quick": False, "gate": {}, "gates_pass": True, "process_sd": 0.001} | body
    records.append_session(SessionBody(rows=tuple(digests), **fields), environment)


def _fields(preflight):
    return {name: getattr(preflight, name) for name in preflight.__dataclass_fields__}


# ---- the contract


def test_new_writes_a_contract_before_any_number(root):
    directory = new(root)
    assert directory.name == "001-rms-norm-forms"
    contract = read_contract(directory)
    assert contract.track.workloads == ("one-row", "prompt")
    assert contract.workloads[0].arguments == {"rows": 1, "width": 896}
    assert contract.rule.min_effect == 0.003
    assert new(root, name="Second!").name == "002-second"
    assert not (directory / "rows.jsonl").exists()
    for name in ("001", "rms-norm-forms", "001-rms-norm-forms"):
        assert find_experiment(root, name) == directory
    with pytest.raises(EvidenceError, match="need one of: 001-rms-norm-forms, 002-second"):
        find_experiment(root, "third")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hypothesis": "faster"}, "hypothesis"),
        ({"refuted_if": ""}, "refuted_if"),
        ({"mechanism": " "}, "mechanism"),
        ({"baseline": None}, "need baseline and candidate"),
        ({"candidate": "forms.py"}, "candidate"),
        ({"workloads": ()}, "workloads"),
        ({"workloads": ("a", "a")}, "distinct names"),
        ({"workloads": ("a={",)}, "name={json}"),
        ({"min_effect": 0.002}, "min_effect"),
        ({"floors": ("cosine",)}, "name=value"),
        ({"predicted_effect": "much"}, "predicted_effect"),
    ],
)
def test_new_refuses_a_contract_that_promises_too_little(changes, expected, root):
    with pytest.raises(EvidenceError, match=expected):
        new_experiment(replace(CONFIG, root=root, **changes))
    assert not list(root.rglob("contract.json"))


def test_policy_that_adds_code_must_gain_a_percent_and_memory_may_be_traded(root):
    assert read_contract(new(root, adds_policy_code=True)).rule.min_effect == 0.01
    traded = read_contract(new(root, memory_limit=1.2, memory_trade="a table of sines"))
    assert traded.rule.memory_limit == 1.2
    with pytest.raises(EvidenceError, match="say what it buys"):
        new_experiment(replace(CONFIG, root=root, memory_limit=1.2))


def test_entries(root):
    directory = new(root)
    assert load_entry(directory, "forms.py:one_call").__name__ == "one_call"
    assert load_entry(directory, "microllm.config:preset").__name__ == "preset"
    for entry in ("forms.py:absent", "absent.py:x", "microllm.config:absent", "absent.module:x"):
        with pytest.raises(EvidenceError, match="does not lead to"):
            load_entry(directory, entry)


# ---- correctness first, in this process


def gate(directory):
    task = replicate.Task(phase="gate", directory=str(directory), seeds=(1, 2))
    return replicate.check(task, read_contract(directory))["reports"]


def test_gate_passes_equal_forms_and_refuses_a_wrong_one(root):
    reports = gate(new(root))
    assert [len(found) for found in reports.values()] == [2, 2]
    assert all(each["passed"] for found in reports.values() for each in found)
    wrong = new(root, candidate="wrong.py:build")
    (wrong / "wrong.py").write_text(
        "import runpy\ndef build(case):\n"
        f"    inner = runpy.run_path({str(wrong / 'forms.py')!r})['one_call'](case)\n"
        "    return lambda: inner() - 0.1\n"
    )
    assert not any(each["passed"] for found in gate(wrong).values() for each in found)


def test_gate_refuses_a_computation_that_ignores_its_input(root):
    directory = new(root, baseline="blind.py:build", candidate="blind.py:build")
    (directory / "blind.py").write_text("import torch\ndef build(case):\n    return lambda: torch.ones(3)\n")
    found = gate(directory)["one-row"][0]
    assert not found["passed"]
    assert "negative control" in found["reasons"][0]


def test_peak_memory_of_each_arm(root, monkeypatch):
    directory = new(root, candidate="wasteful.py:build", workloads=('w={"rows": 64, "width": 896}',))
    (directory / "wasteful.py").write_text(
        "import runpy, torch\ndef build(case):\n"
        f"    inner = runpy.run_path({str(directory / 'forms.py')!r})['written_out'](case)\n"
        "    def run():\n        waste = torch.zeros(1 << 20)\n        return inner()\n    return run\n"
    )
    monkeypatch.setattr(replicate, "time_pairs", lambda *args, **kwargs: make_timing(0.0))
    task = replicate.Task(phase="time", directory=str(directory), seeds=(3,))
    (row,) = replicate.measure(task, read_contract(directory))["rows"]
    assert row["parity"] == "pass"
    assert row["candidate_peak_bytes"] - row["baseline_peak_bytes"] == pytest.approx(4 << 20, rel=0.02)
    assert row["baseline_peak_bytes"] > 2 * 64 * 896 * 4


# ---- the verdict over sessions


def test_keep_waits_for_another_time_and_then_counts(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD)
    once = judge_experiment(directory)
    assert (once.verdict.status, once.verdict.confirmed, once.final) == ("keep", False, False)
    assert "not confirmed yet" in once.verdict.reasons[0]
    add_session(directory, environment, GOOD, number=2, after_minutes=20)
    assert not judge_experiment(directory).verdict.confirmed, "20 minutes later is not another time"
    add_session(directory, environment, GOOD, number=3, after_minutes=40)
    twice = judge_experiment(directory)
    assert (twice.verdict.status, twice.verdict.confirmed, twice.final) == ("keep", True, True)
    assert verify(VerifyConfig(root=root)) == []
    with pytest.raises(EvidenceError, match="verdict is final"):
        run_experiment(RunConfig(id="001", root=root))


def test_keep_that_is_not_kept_again_is_a_discard(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD)
    add_session(directory, environment, NOTHING, number=2, after_minutes=40)
    found = judge_experiment(directory)
    assert (found.verdict.status, found.verdict.confirmed, found.final) == ("discard", False, True)
    assert "kept once, not kept again" in found.verdict.reasons[0]


def test_confirmation_is_not_started_too_early(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD)
    with pytest.raises(EvidenceError, match="run again in 3"):
        run_experiment(RunConfig(id="001", root=root))


def test_extension_is_one_session_of_twelve(root, environment):
    directory = new(root)
    add_session(directory, environment, WAVERING)
    assert judge_experiment(directory).sessions[-1].extend
    add_session(directory, environment, WAVERING, first=6, after_minutes=5)
    found = judge_experiment(directory)
    assert len(found.sessions) == 1
    assert (found.verdict.status, found.verdict.num_processes, found.final) == ("discard", 12, True)


def test_sessions_that_decide_nothing_leave_the_question_open(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD, process_sd=0.0045)
    assert judge_experiment(directory).verdict.status == "inconclusive"
    add_session(directory, environment, GOOD, number=2, process_sd=None)
    add_session(directory, environment, GOOD[:1], number=3, quick=True)
    quick = judge_experiment(directory)
    assert (quick.verdict.status, quick.final) == ("inconclusive", False)
    assert quick.verdict.effect == pytest.approx(GOOD[0])
    assert "quick mode" in quick.verdict.reasons[0]
    add_session(directory, environment, GOOD, number=4)
    assert judge_experiment(directory).verdict.status == "keep"


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ({"gates_pass": False}, "invalid", "correctness gate"),
        ({"crash": "exit code -9"}, "crash", "exit code -9"),
        ({"row": {"status": "crash", "timing": None, "error": "CUDA error"}}, "crash", "CUDA error"),
        ({"row": {"parity": "cosine is 0.9"}}, "invalid", "after the timing: cosine is 0.9"),
        ({"row": {"candidate_peak_bytes": 1011}}, "inconclusive", "1.011"),
        ({"row": {"candidate_peak_bytes": None}}, "inconclusive", "peak memory was not measured"),
        ({"row": {"baseline_peak_bytes": 0}}, "inconclusive", "peak memory is inf"),
        ({"row": {"candidate_peak_bytes": 1010}}, "keep", "effect"),
        ({"guard": -0.01}, "discard", "guard prompt"),
        ({"guard": -0.004}, "keep", "effect"),
    ],
)
def test_rows_are_reduced_to_what_the_rule_reads(arguments, status, reason, root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD, **arguments)
    found = judge_experiment(directory).verdict
    assert found.status == status
    assert any(reason in text for text in found.reasons), found.reasons


def test_preflight_problems_and_dropped_pairs_make_it_invalid(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD)
    contract, (session,) = read_contract(directory), Records(directory).sessions()
    row = session.rows[0]
    busy = replace(row.preflight, problems=("other processes keep 1.20 cores busy",))
    session.rows[0] = row.model_copy(update={"preflight": busy})
    assert judge_sessions(contract, [session]).verdict.status == "invalid"
    rounds = tuple(replace(r, second_s=2 * r.host_s) for r in row.timing.rounds[:4]) + row.timing.rounds[4:]
    session.rows[0] = row.model_copy(update={"timing": replace(row.timing, rounds=rounds)})
    found = judge_sessions(contract, [session]).verdict
    assert found.status == "invalid"
    assert "2 of 8 pairs dropped" in found.reasons[0]
    assert len(measured(session, contract).medians) == 6


def test_judging_again_adds_no_receipt(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD)
    judge_experiment(directory)
    before = (directory / "receipts.jsonl").read_bytes()
    judge_experiment(directory)
    assert (directory / "receipts.jsonl").read_bytes() == before


# ---- whole records


def test_verify_and_validate_pass_untouched_records(root, environment):
    directory = new(root)
    assert verify(VerifyConfig(root=root)) == []
    add_session(directory, environment, GOOD)
    assert "no verdict.json" in verify(VerifyConfig(root=root))[0]
    judge_experiment(directory)
    assert verify(VerifyConfig(root=root)) == []
    assert validate(ValidateConfig(root=root)) == []


@pytest.mark.parametrize("name", ["contract.json", "rows.jsonl", "receipts.jsonl", "verdict.json"])
def test_one_byte_changed_anywhere_is_caught(name, root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD[:2])
    judge_experiment(directory)
    path = directory / name
    original = path.read_bytes()
    for position in range(0, len(original), max(1, len(original) // 60)):
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert verify(VerifyConfig(root=root)), f"{name}, byte {position}: {original[position - 30 : position + 30]!r}"
    path.write_bytes(original)
    assert verify(VerifyConfig(root=root)) == []


def test_rows_added_or_taken_away_are_caught(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD)
    judge_experiment(directory)
    path = directory / "rows.jsonl"
    lines = read_lines(path)
    for changed in (lines[1:], lines[:-1], [lines[1], lines[0], *lines[2:]], [*lines, lines[-1]]):
        path.write_text("\n".join(changed) + "\n")
        assert verify(VerifyConfig(root=root))


def test_a_rule_that_was_moved_is_caught(root, environment):
    directory = new(root)
    add_session(directory, environment, (0.0029, 0.0029, 0.0029, 0.0029, 0.0029, 0.00291))
    assert judge_experiment(directory).verdict.status == "discard"
    verdict = json.loads((directory / "verdict.json").read_bytes())
    verdict["verdict"]["status"] = "keep"
    (directory / "verdict.json").write_text(json.dumps(verdict, sort_keys=True, separators=(",", ":")) + "\n")
    assert any("not what the rows give" in text for text in verify(VerifyConfig(root=root)))


def test_code_changed_after_the_last_session_is_caught(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD, sources=Records(directory).sources())
    judge_experiment(directory)
    assert verify(VerifyConfig(root=root)) == []
    (directory / "forms.py").write_text((directory / "forms.py").read_text() + "# changed\n")
    assert "Python files" in verify(VerifyConfig(root=root))[0]


def test_rows_of_a_killed_run_are_kept_and_count_for_nothing(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD)
    records = Records(directory)
    row = records.sessions()[0].rows[0]
    records.append_row(row)
    with records.rows_path.open("a") as file:
        file.write('{"session":1,"torn')
    assert "1 rows are in no receipt" in " ".join([*verify(VerifyConfig(root=root))])
    records.append_session(SessionBody.interruption(tuple(records.uncovered())), environment)
    add_session(directory, environment, GOOD, number=2)
    assert [len(session.rows) for session in records.sessions()] == [12, 12]
    judge_experiment(directory)
    assert verify(VerifyConfig(root=root)) == []


def test_environment_drift_is_listed(root, environment):
    directory = new(root)
    add_session(directory, replace(environment, torch="1.0", driver="99"), GOOD)
    judge_experiment(directory)
    assert verify(VerifyConfig(root=root)) == []
    drift = verify(VerifyConfig(root=root, env=True))
    assert [text.split(": ")[2] for text in drift] == ["driver", "torch"]


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("experiments/001-rms-norm-forms/rows.jsonl", "{}\n", "no raw row"),
        ("experiments/001-rms-norm-forms/rows.jsonl", '{"a"', "torn"),
        ("experiments/001-rms-norm-forms/receipts.jsonl", "{}\n", "no receipt"),
        ("experiments/001-rms-norm-forms/contract.json", "{}", "contract.json"),
        ("experiments/001-second/x.txt", "", "no contract.json"),
        ("experiments/001-second/x.txt", "", "its number is also that of 001-rms-norm-forms"),
        ("rows/D1.jsonl", "{}\n", "no benchmark row"),
        ("calibrations.jsonl", "{}\n", "no calibration"),
    ],
    ids=range(8),
)
def test_validate_names_what_does_not_fit(path, text, expected, root):
    new(root)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    assert any(expected in problem and str(root) in problem for problem in validate(ValidateConfig(root=root)))


def test_validate_relations(root, environment):
    directory = new(root)
    add_session(directory, environment, GOOD, after_minutes=-5)
    assert any("from before the contract" in text for text in validate(ValidateConfig(root=root)))
    directory.rename(directory.with_name("007-moved"))
    assert any("contract is that of '001-rms-norm-forms'" in text for text in validate(ValidateConfig(root=root)))
    (root / "experiments" / "007-moved" / "forms.py").unlink()
    assert any("does not lead to" in text for text in validate(ValidateConfig(root=root)))


# ---- calibration


def test_process_sd_is_pooled_within_sessions():
    assert process_sd([(1.0, 3.0), (11.0, 13.0)]) == pytest.approx(math.sqrt(2))
    with pytest.raises(EvidenceError, match="two processes"):
        process_sd([(1.0,)])


def test_latest_calibration_of_this_device_is_read(tmp_path, environment):
    path = tmp_path / "calibrations.jsonl"
    assert read_calibration(path, environment) is None
    made = Calibration(
        device_name=environment.device_name, process_sd=process_sd([(0.0, 0.002)]), num_kept=0, num_planted=5,
        num_found=5, medians=((0.0, 0.002),), planted_medians=(), pairs=8, round_s=0.5, num_disturbed=0,
        environment={"torch": "2"}, date="x",
    )  # fmt: skip
    write_calibration(path, made)
    write_calibration(path, replace(made, medians=((0.0, 0.004),), process_sd=process_sd([(0.0, 0.004)])))
    write_calibration(path, replace(made, device_name="another"))
    assert read_calibration(path, environment).process_sd == pytest.approx(0.004 / math.sqrt(2))
    for was, becomes in (
        ('"process_sd":0.00282', '"process_sd":0.00182'),
        ('"num_found":5', '"num_found":4'),
        ("{", "{ "),
    ):
        text = path.read_text()
        assert was in text
        path.write_text(text.replace(was, becomes))
        with pytest.raises(EvidenceError, match="no calibration"):
            read_calibration(path, environment)
        path.write_text(text)
    sealed = Calibration(**{**asdict(made), "process_sd": 0.001})
    path.unlink()
    write_calibration(path, sealed)
    with pytest.raises(EvidenceError, match="as its medians"):
        read_calibration(path, environment)


# ---- staircase and tables


@pytest.fixture
def history(root, environment):
    """Seven experiments on one track and one on another."""
    for number, (medians, kind) in enumerate(
        ((GOOD, "keep"), (NOTHING, "discard"), (GOOD, "once"), (WAVERING, "open"), (GOOD, "gate"), (GOOD, "keep")), 1
    ):
        directory = new(root, name=f"step {number}")
        add_session(directory, environment, medians, gates_pass=kind != "gate")
        if kind == "keep":
            add_session(directory, environment, medians, number=2, after_minutes=40)
        judge_experiment(directory)
    add_session(new(root, name="other", dtype="bfloat16"), environment, GOOD)
    judge_experiment(root / "experiments" / "007-other")
    return root


def test_running_best_moves_by_confirmed_keeps_only(history):
    tracks = read_tracks(history)
    assert len(tracks) == 2, "tracks never mix"
    _, points = next(found for found in tracks.values() if found[0].dtype == "float32")
    gain = math.exp(GOOD_EFFECT)
    assert [point.best for point in points] == pytest.approx([gain**n for n in (1, 1, 1, 1, 1, 2)])
    assert [point.counts for point in points] == [True, False, False, False, False, True]
    assert points[2].speed == pytest.approx(gain**2), "drawn above the best it was measured against"
    assert points[4].speed is None
    first, last = points[0], points[-1]
    assert math.log(last.best_high / last.best) == pytest.approx(math.sqrt(2) * math.log(first.best_high / first.best))


def test_pictures_and_tables_are_rendered_checked_and_stay_equal(history):
    document = history.parent / "README.md"
    document.write_text("# T\n<!-- table:experiments -->\n<!-- /table -->\n")
    config = RenderConfig(root=history)
    assert len(render(replace(config, check=True))) == 3
    assert document.read_text().count("\n") == 3, "a check changes nothing"
    written = render(config)
    assert sorted(path.suffix for path in written) == [".md", ".png", ".png"]
    assert render(replace(config, check=True)) == []
    text = document.read_text()
    assert "| 001-step-1 |" in text
    assert "keep | +5.00% | " in text
    assert text.count("| invalid | — | — |") == 1
    picture = next(path for path in written if path.suffix == ".png")
    before = picture.read_bytes()
    picture.unlink()
    render(config)
    assert picture.read_bytes() == before, "the same records draw the same picture"
    document.write_text(text.replace("+5.00%", "+9.03%"))
    assert render(replace(config, check=True)) == [document]


def test_picture_has_size_and_more_than_one_colour(history):
    (path,) = [path for path in render(RenderConfig(root=history)) if "float32" in path.name]
    image = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert image[1:4].tolist() == list(b"PNG")
    width, height = (int.from_bytes(bytes(image[i : i + 4].tolist()), "big") for i in (16, 20))
    assert width > 800
    assert height > 500
    assert len(image) > 20_000


def test_a_track_may_start_from_its_peer_ratios(root, environment):
    for target, ours in (("D1", 200.0), ("D2", 800.0)):
        write_row(root / "rows" / f"{target}.jsonl", Row.model_validate({
            **environment_fields(environment), "target": target, "workload": "decode", "dtype": "float32",
            "ours": ours, "peer": 100.0, "peer_name": "p", "unit": "tok/s", "parity": "pass",
        }))  # fmt: skip
    start = new(root, name="start", kind="baseline", baseline=None, candidate=None, score_targets=("D1", "D2"))
    judgement = run_experiment(RunConfig(id="001", root=root))
    assert (judgement.verdict.status, judgement.final) == ("baseline", True)
    add_session(new(root), environment, GOOD)
    judge_experiment(root / "experiments" / "002-rms-norm-forms")
    ((_, points),) = read_tracks(root).values()
    assert points[0].speed == pytest.approx(4.0), "the geometric mean of 2 and 8"
    assert points[1].speed == pytest.approx(4.0 * math.exp(GOOD_EFFECT))
    assert verify(VerifyConfig(root=root)) == []
    assert "D1" in staircase.make_tables(root)
    (start / "contract.json").write_text((start / "contract.json").read_text().replace("D2", "D3"))
    assert verify(VerifyConfig(root=root))
    new(root, name="lacking", kind="baseline", baseline=None, candidate=None, score_targets=("D9",))
    with pytest.raises(EvidenceError, match=r"no passing row against a peer for \['D9'\]"):
        run_experiment(RunConfig(id="lacking", root=root))


def test_without_matplotlib_the_extra_is_named(history, monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(staircase.importlib, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"microllm\[plot\]"):
        render(RenderConfig(root=history))


# ---- for real: docs/lab.md, its screening run


@pytest.mark.slow
def test_the_documented_experiment_runs_from_contract_to_picture(tmp_path, monkeypatch, capsys, environment):
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "lab.md").read_text()
    commands = [shlex.split(block.replace("\\\n", "")) for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)]
    made, screened, ran, confirmed = [each[1:] for each in commands if each[:2] == ["microllm", "lab"]][:4]
    assert main(made) == 0
    directory = Path(capsys.readouterr().out.strip())
    (directory / "forms.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    assert screened == [*ran, "--quick"]
    assert ran == confirmed
    assert main([*screened, "--wait-s", "0"]) == 0
    assert "inconclusive so far: quick mode screens; it decides nothing" in capsys.readouterr().out
    (session,) = Records(directory).sessions()
    assert [row.workload for row in session.rows] == ["one-row", "prompt"]
    assert all(row.parity == "pass" and row.timing and row.timing.config.quick for row in session.rows)
    assert session.bodies[0].gates_pass
    (receipt,) = Records(directory).receipts("session")
    assert receipt.environment.device_name == environment.device_name
    assert receipt.environment.num_threads == 1
    for command in ("render", "validate", "verify --env"):
        assert main(["lab", *command.split()]) == 0
    assert len(list(Path("lab").glob("staircase-*.png"))) == 1


def test_another_machine_starts_another_track(root, monkeypatch):
    directory = new(root)
    path = directory / "contract.json"
    path.write_text(path.read_text().replace('"device_name": "', '"device_name": "not '))
    result = {"reports": {}, "environment": {**_environment_json(), "device_name": "here"}}
    done = replicate_result(result)
    monkeypatch.setattr("microllm.lab.experiment.run_replicate", lambda arguments: done)
    with pytest.raises(EvidenceError, match="curves of different tracks never mix"):
        run_experiment(RunConfig(id="001", root=root))


def _environment_json():
    made = capture_environment("cpu")
    return {name: getattr(made, name) for name in made.__dataclass_fields__}


def replicate_result(result):
    from microllm.evidence.replicates import Replicate

    return Replicate(command=(), seconds=0.0, result=result)
