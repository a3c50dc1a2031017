"""Records, contracts and experiments as nobody should write them: refused by a sentence, never believed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from microllm.cli import main
from microllm.errors import EvidenceError, UnavailableError
from microllm.evidence.environment import capture_environment
from microllm.evidence.journal import canonical_json, read_lines, sha256_hex
from microllm.evidence.replicates import Replicate, run_replicate
from microllm.lab import experiment, replicate
from microllm.lab.contract import load_entry, read_contract
from microllm.lab.experiment import NewConfig, RunConfig, new_experiment, run_experiment
from microllm.lab.judgement import judge_experiment
from microllm.lab.record import Records, SessionBody
from microllm.lab.staircase import RenderConfig, read_tracks, render
from microllm.lab.validate import ValidateConfig, VerifyConfig, validate, verify

FORMS = Path(__file__).parents[2] / "lab" / "experiments" / "001-rms-norm-forms" / "forms.py"
CONFIG = NewConfig(
    name="forms", hypothesis="One call is faster on one row than five", predicted_effect=0.1,
    refuted_if="the lower bound is not above zero", mechanism="one dispatch instead of five",
    baseline="forms.py:written_out", candidate="forms.py:one_call", workloads=('w={"rows": 2, "width": 64}',),
    num_threads=1,
)  # fmt: skip


@pytest.fixture
def root(tmp_path):
    return tmp_path / "lab"


def new(root, **changes):
    directory = new_experiment(replace(CONFIG, root=root, **changes))
    shutil.copy(FORMS, directory / "forms.py")
    return directory


def row_fields(d=0.05, workload="w", process=0, started="2100-01-01T00:00:00+00:00"):
    rounds = [
        {"arm": arm, "repetitions": 1, "host_s": s, "second_s": s, "sm_mhz": None, "throttle": []}
        for arm, s in [("A", 1.0 + d), ("B", 1.0), ("B", 1.0), ("A", 1.0 + d)]
    ]
    config = {"pairs": 2, "control_pairs": 0, "round_s": 0.5, "warmup_s": 1.0, "seed": 0, "clock_tolerance": 0.005}
    timing = {"device": "cpu", "config": config | {"quick": False}, "rounds": rounds, "control_rounds": [],
              "foreign_cpus": 0.0, "notes": []}  # fmt: skip
    return {"session": 1, "process": process, "workload": workload, "seed": 0, "started": started, "pid": 1,
            "timing": timing, "baseline_peak_bytes": 1, "candidate_peak_bytes": 1, "parity": "pass"}  # fmt: skip


def add(directory, lines, number=1, **body):
    """Seal a session over lines that need not be rows."""
    records = Records(directory)
    with records.rows_path.open("a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
    fields = {"session": number, "quick": False, "gate": {}, "gates_pass": True, "process_sd": 0.001} | body
    made = SessionBody(rows=tuple(map(sha256_hex, lines)), **fields)
    return records.append_session(made, capture_environment("cpu", command=()))


def good(number=1, hour=0):
    started = f"2100-01-01T{hour:02d}:00:00+00:00"
    return [canonical_json({**row_fields(0.05, process=p, started=started), "session": number}) for p in range(6)]


# ---- records


@pytest.mark.parametrize(
    "change",
    [
        {"workload": "another"},
        {"started": "yesterday"},
        {"started": "2100-01-01T00:00:00"},
        {"rounds": [{"arm": "A", "repetitions": 0, "host_s": 1.0, "second_s": 1.0}] * 2},
        {"rounds": [{"arm": "A", "repetitions": 1, "host_s": 1.0, "second_s": 1.0}] * 2},
        {"rounds": [{"arm": "A", "repetitions": 1, "host_s": 1.0, "second_s": 1.0}]},
        {"rounds": [{"arm": "AB"[n % 2], "repetitions": 1, "host_s": "nan", "second_s": 1.0} for n in range(2)]},
    ],
    ids=range(7),
)
def test_sealed_rows_that_make_no_sense_are_a_sentence_or_no_verdict(change, root):
    directory = new(root)
    rounds = change.pop("rounds", None)
    lines = []
    for process in range(6):
        fields = row_fields(process=process) | change
        if rounds is not None:
            fields["timing"]["rounds"] = rounds
        lines.append(canonical_json(fields))
    add(directory, lines)
    try:
        assert judge_experiment(directory).verdict.status == "invalid"
    except EvidenceError:
        assert verify(VerifyConfig(root=root))
        assert validate(ValidateConfig(root=root))


@pytest.mark.parametrize(
    "line",
    ["[]", "1", '{"unit":[]}', '{"unit":"ms","ours":0.0,"peer":1.0}', '{"unit":"ms","ours":"x","peer":1.0}',
     "[" * 5000, '{"n":' + "9" * 5000 + "}", '{"a":"\\ud800"}', "\u2028", ""],
)  # fmt: skip
def test_no_line_of_any_file_makes_the_checks_fall_over(line, root):
    directory = new(root)
    add(directory, good())
    judge_experiment(directory)
    clean = verify(VerifyConfig(root=root)), validate(ValidateConfig(root=root))
    assert clean == ([], [])
    for name in ("rows.jsonl", "receipts.jsonl", "../../rows/D1.jsonl", "../../calibrations.jsonl"):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        assert verify(VerifyConfig(root=root)), name
        assert validate(ValidateConfig(root=root)), name
        path.unlink() if before is None else path.write_bytes(before)
    assert verify(VerifyConfig(root=root)) == []


@pytest.mark.parametrize("text", ["[]", "{}", '{"verdict":1}', "[" * 100_000, "NaN", "\ud800"])
def test_a_verdict_file_is_never_believed(text, root):
    directory = new(root)
    add(directory, good())
    judge_experiment(directory)
    drawn = read_tracks(root)
    (directory / "verdict.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    assert any("verdict.json" in problem for problem in verify(VerifyConfig(root=root)))
    assert read_tracks(root) == drawn, "drawn from the rows"


@pytest.mark.parametrize("name", ["rows.jsonl", "receipts.jsonl", "verdict.json", "contract.json"])
@pytest.mark.parametrize("bit", [0x80, 0x20])
def test_a_high_bit_or_a_lost_end_is_caught(name, bit, root):
    directory = new(root)
    add(directory, good()[:1])
    judge_experiment(directory)
    path = directory / name
    original = path.read_bytes()
    for position in (0, len(original) // 3, len(original) - 2, len(original) - 1):
        changed = bytearray(original)
        changed[position] ^= bit
        path.write_bytes(changed)
        assert verify(VerifyConfig(root=root)), position
    path.write_bytes(original[:-1])
    assert verify(VerifyConfig(root=root))


def test_a_benchmark_row_that_lost_its_line_break_is_caught(root):
    (root / "rows").mkdir(parents=True)
    (root / "rows" / "D1.jsonl").write_text('{"a":1}')
    assert any("torn" in text for text in verify(VerifyConfig(root=root)))


def test_text_with_foreign_line_breaks_does_not_break_the_chain(root):
    directory = new(root)
    add(directory, [], crash="line\u2028paragraph\u2029next\x85form\x0cünïcode")
    judge_experiment(directory)
    assert add(directory, good(2), number=2).previous
    judge_experiment(directory)
    assert verify(VerifyConfig(root=root)) == []


def test_a_place_without_records_is_no_clean_record(root, capsys):
    for action in ("validate", "verify", "render"):
        assert main(["lab", action, "--root", str(root)]) == 2
        assert "microllm lab new" in capsys.readouterr().err


def test_a_folder_called_drift_hides_no_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    new(Path("drift"))
    (Path("drift") / "experiments" / "001-forms" / "receipts.jsonl").write_text("x\n")
    assert main(["lab", "verify", "--root", "drift"]) == 1


# ---- contracts


@pytest.mark.parametrize(
    "changes",
    [
        {"hypothesis": " " * 20},
        {"predicted_effect": float("nan")},
        {"min_effect": float("nan")},
        {"min_effect": float("inf")},
        {"memory_limit": float("inf"), "memory_trade": "a table of sines"},
        {"floors": ("cosine=nan",)},
        {"floors": ("cosinus=0.9",)},
        {"floors": ("max_abs=much",)},
        {"num_threads": 0},
        {"candidate": "../002-other/forms.py:one_call"},
        {"candidate": "/srv/forms.py:one_call"},
        {"candidate": "parts/forms.py:one_call"},
        {"name": "日本"},
        {"workloads": ("../w",)},
    ],
)
def test_strange_promises_are_refused(changes, root):
    with pytest.raises(EvidenceError):
        new_experiment(replace(CONFIG, root=root, **changes))
    assert not list(root.rglob("contract.json"))


@pytest.mark.parametrize("change", [{"pairs": 7}, {"pairs": 0}, {"round_s": 0.01}, {"kind": "both"}])
def test_a_contract_written_by_hand_is_held_to_the_same(change, root):
    directory = new(root)
    path = directory / "contract.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EvidenceError):
        read_contract(directory)


def test_a_stray_folder_does_not_stop_the_next_number(root):
    new(root)
    (root / "experiments" / "old-notes").mkdir()
    (root / "experiments" / "old-notes" / "contract.json").write_text("{}")
    assert new(root).name == "002-forms"


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_here_is_named(device, root):
    with pytest.raises(UnavailableError, match=device):
        new_experiment(replace(CONFIG, root=root, device=device))


# ---- code


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(0)", "def build(:", "import absent_module", "build = 1"])
def test_code_that_cannot_be_loaded_is_a_sentence(body, root):
    directory = new(root, candidate="bad.py:build")
    (directory / "bad.py").write_text(body + "\n")
    with pytest.raises(EvidenceError, match=r"bad\.py:build"):
        load_entry(directory, "bad.py:build")
    assert any("bad.py:build" in text for text in validate(ValidateConfig(root=root)))


WRONG = {
    "nan": "return inner() * float('nan')",
    "cached": "kept.append(inner()) if not kept else None\n        return kept[0]",
    "mutates": "return inner().mul_(1 + 0.2 * len(calls.append(1) or calls[1:]))",
    "scaled": "return 1.1 * inner()",
}


def wrapped(directory, body):
    (directory / "hostile.py").write_text(
        "import runpy, sys\nfrom pathlib import Path\n"
        "forms = runpy.run_path(str(Path(__file__).with_name('forms.py')))\n"
        "def build(case):\n    inner, kept, calls = forms['written_out'](case), [], []\n"
        f"    def run():\n        {body}\n    return run\n"
    )


def gate(root, body):
    directory = new(root, candidate="hostile.py:build")
    wrapped(directory, body)
    task = replicate.Task(phase="gate", directory=str(directory), seeds=(1,))
    (report,) = replicate.check(task, read_contract(directory))["reports"]["w"]
    return report


@pytest.mark.parametrize("name", WRONG)
def test_no_wrong_candidate_passes_the_gate(name, root):
    report = gate(root, WRONG[name])
    assert not report["passed"], report


@pytest.mark.parametrize("body", ["raise RuntimeError('broken on purpose')", "return None", "return ()"])
def test_no_result_ends_the_gates_process(body, root):
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        gate(root, body)


def test_an_honest_candidate_that_reuses_its_output_passes(root):
    report = gate(root, "kept.append(inner()) if not kept else kept[0].copy_(inner())\n        return kept[0]")
    assert report["passed"], report


def test_garbage_on_both_outputs_does_not_spoil_the_result(root):
    directory = new(root, candidate="hostile.py:build")
    wrapped(
        directory,
        "print('{\"reports\": {}}', end='')\n        sys.stderr.buffer.write(b'\\xff\\xfe')\n"
        "        import os, atexit\n        os.write(1, b'\\xff')\n        atexit.register(print, 'bye')\n"
        "        return inner()",
    )
    done = run_replicate(replicate.Task(phase="gate", directory=str(directory), seeds=(1,)).arguments())
    assert done.result is not None, done.error
    assert done.result["reports"]["w"][0]["passed"]


def test_a_failure_with_bytes_that_are_no_text_keeps_its_exit_code():
    done = run_replicate(("-c", "import os; os.write(2, b'\\xff why'); os._exit(7)"))
    assert "exit code 7" in done.error
    assert "why" in done.error


# ---- runs


def made_up(monkeypatch, d=0.05, started="2100-01-01T00:00:00+00:00"):
    """Let processes answer at once: a gate that passes, and rows of effect ``d``."""
    asked = []

    def answer(arguments, *, timeout_s=0.0):
        task = json.loads(arguments[-1])
        asked.append((task["phase"], timeout_s))
        if task["phase"] == "gate":
            result = {"reports": {"w": [{"passed": True}]}, "environment": asdict(capture_environment("cpu"))}
        else:
            fields = row_fields(d, started=started)
            result = {"rows": [{name: fields[name] for name in fields if name not in ("session", "process")}]}
        return Replicate(command=(), seconds=0.0, result=result)

    monkeypatch.setattr(experiment, "run_replicate", answer)
    monkeypatch.setattr(experiment, "read_calibration", lambda path, environment: _Sd)
    return asked


class _Sd:
    process_sd = 0.001


def test_two_runs_at_once_are_refused_and_a_killed_one_is_not_in_the_way(root, monkeypatch):
    directory = new(root)
    made_up(monkeypatch)
    code = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code + "; time.sleep(60)", str(directory / "contract.json")], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(EvidenceError, match="is being run"):
        run_experiment(RunConfig(id="001", root=root))
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert run_experiment(RunConfig(id="001", root=root)).verdict.status == "keep"


@pytest.mark.slow
def test_kill_minus_nine_in_the_middle_of_a_run(root, tmp_path):
    """The run of a subprocess is killed once its first row is on disk; a second run finishes and everything holds."""
    directory = new(root)
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time\nsys.path.insert(0, sys.argv[2])\n"
        "import pytest\nimport test_hostile_records as t\nfrom pathlib import Path\n"
        "patch = pytest.MonkeyPatch()\nasked = t.made_up(patch)\ninner = t.experiment.run_replicate\n"
        "def slow(arguments, *, timeout_s=0.0):\n"
        "    if sys.argv[3] == 'slow' and len(asked) == 3:\n        time.sleep(60)\n"
        "    return inner(arguments, timeout_s=timeout_s)\n"
        "t.experiment.run_replicate = slow\n"
        "t.run_experiment(t.RunConfig(id='001', root=Path(sys.argv[1])))\n"
    )
    command = [sys.executable, str(script), str(root), str(Path(__file__).parent)]
    process = subprocess.Popen([*command, "slow"])
    deadline = time.monotonic() + 60
    while len(read_lines(directory / "rows.jsonl")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert any("in no receipt" in text for text in verify(VerifyConfig(root=root)))
    subprocess.run([*command, "fast"], check=True)
    assert verify(VerifyConfig(root=root)) == []
    assert judge_experiment(directory).verdict.num_processes == 6
    assert len(read_lines(directory / "rows.jsonl")) == 8, "what the killed run measured stays"


def test_a_full_disk_stops_the_run_and_the_next_one_heals(root, monkeypatch):
    new(root)
    made_up(monkeypatch)
    write, left = os.write, [3]

    def full(descriptor, data):
        left[0] -= 1
        if left[0] < 0:
            write(descriptor, data[:40])
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        run_experiment(RunConfig(id="001", root=root))
    monkeypatch.setattr(os, "write", write)
    assert run_experiment(RunConfig(id="001", root=root)).verdict.status == "keep"
    assert verify(VerifyConfig(root=root)) == []
    assert validate(ValidateConfig(root=root)) == []


def test_other_code_neither_extends_nor_confirms_a_session(root, monkeypatch):
    directory = new(root)
    first = Records(directory).sources()
    add(directory, good(), sources=first)
    assert judge_experiment(directory).verdict.status == "keep"
    (directory / "forms.py").write_text(FORMS.read_text() + "# another candidate\n")
    made_up(monkeypatch, started="2100-01-01T05:00:00+00:00")
    monkeypatch.setattr(experiment, "now_utc", lambda: "2100-01-01T05:00:00+00:00")
    with pytest.raises(EvidenceError, match="Python files"):
        run_experiment(RunConfig(id="001", root=root))
    add(directory, good(2, hour=5), number=2, sources=Records(directory).sources())
    found = judge_experiment(directory)
    assert not found.verdict.confirmed, "kept by one candidate, confirmed by another"
    assert not found.final


def test_a_session_of_two_codes_is_invalid(root):
    directory = new(root)
    add(directory, good(), sources={"forms.py": "a"})
    add(directory, good(), sources={"forms.py": "b"})
    found = judge_experiment(directory).verdict
    assert found.status == "invalid"
    assert any("Python files" in reason for reason in found.reasons)


def test_a_process_may_wait_for_each_workload(root, monkeypatch):
    new(root, workloads=("w", "x", "y", "z"), num_threads=None)
    asked = made_up(monkeypatch)
    run_experiment(RunConfig(id="001", root=root, wait_s=1000.0, quick=True))
    assert asked[-1][0] == "time"
    assert asked[-1][1] >= 4 * 1000.0 + 900.0


# ---- documents


def test_a_document_behind_a_link_stays_behind_it(root):
    new(root)
    target = root.parent / "pages" / "real.md"
    target.parent.mkdir()
    target.write_text("<!-- table:experiments -->\n<!-- /table -->\n")
    link = root.parent / "README.md"
    link.symlink_to(target)
    assert render(RenderConfig(root=root)) == [link]
    assert link.is_symlink()
    assert "| experiment |" in target.read_text()


def test_the_lock_is_let_go(root, monkeypatch):
    directory = new(root)
    made_up(monkeypatch)
    run_experiment(RunConfig(id="001", root=root, quick=True))
    with (directory / "contract.json").open() as file:
        assert fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) is None, "a lock still held raises BlockingIOError"
