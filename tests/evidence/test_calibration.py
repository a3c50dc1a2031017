"""The calibration tool: what a process measures, and what the sessions of made-up processes amount to."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from microllm.evidence.calibration import parse_calibration, process_sd
from microllm.evidence.journal import read_lines
from microllm.evidence.replicates import Replicate

TOOL = Path(__file__).parents[2] / "tools" / "calibrate_timing.py"


@pytest.fixture(scope="module")
def tool():
    specification = importlib.util.spec_from_file_location("calibrate_timing", TOOL)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_process_times_equal_arms_and_planted_work(tool, monkeypatch, capsys):
    calls = []
    arm = tool.build("cpu")
    monkeypatch.setattr(tool, "build", lambda device: lambda units: calls.append(units) or arm(units))
    threads = torch.get_num_threads()
    worker = json.dumps([["aa", 1], ["planted", 2]])
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--quick", "--wait-s", "0", "--worker", worker])
    assert tool.main() == 0
    torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert calls == [100, 100, 100, 101]
    assert [type(each["median"]) for each in found["found"]] == [float, float]
    assert found["environment"]["num_threads"] == 1


def run(tool, monkeypatch, tmp_path, sd, *arguments, effect=-0.00995):
    """Run the tool with processes that answer from a random generator; return its exit code and its record."""
    draw, asked = random.Random(5), []

    def answer(command, *, timeout_s):
        kinds = [kind for kind, _ in json.loads(command[-1])]
        asked.append(kinds)
        medians = [draw.gauss(effect if kind == "planted" else 0.0, sd) for kind in kinds]
        found = [{"median": median, "problems": []} for median in medians]
        result = {"found": found, "environment": {"device_name": "here", "torch": "2"}}
        return Replicate(command=tuple(command), seconds=1.0, result=result)

    out = tmp_path / "calibrations.jsonl"
    monkeypatch.setattr(tool, "run_replicate", answer)
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--out", str(out), *arguments])
    code = tool.main()
    return code, [parse_calibration(line) for line in read_lines(out)], asked


def test_a_quiet_machine_keeps_nothing_and_finds_all(tool, monkeypatch, tmp_path):
    code, (record,), asked = run(tool, monkeypatch, tmp_path, 0.001)
    assert code == 0
    assert (record.num_kept, record.num_found, record.num_planted) == (0, 5, 5)
    assert record.device_name == "here"
    assert record.process_sd == process_sd(record.medians)
    assert 0.0006 < record.process_sd < 0.0014
    assert (len(record.medians), len(record.planted_medians)) == (10, 5)
    assert {len(session) for session in (*record.medians, *record.planted_medians)} <= {6, 12}
    assert {len(kinds) for kinds in asked} == {1}, "a process serves one session"


def test_a_noisy_machine_finds_nothing_and_says_so(tool, monkeypatch, tmp_path):
    code, (record,), _ = run(tool, monkeypatch, tmp_path, 0.006)
    assert code == 1
    assert (record.num_kept, record.num_found) == (0, 0)
    assert record.process_sd > 0.004


def test_shared_processes_serve_all_sessions(tool, monkeypatch, tmp_path):
    arguments = ("--runs", "3", "--planted", "2", "--share")
    code, (record,), asked = run(tool, monkeypatch, tmp_path, 0.0005, *arguments)
    assert code == 0
    assert asked[:6] == [["aa"] * 3 + ["planted"] * 2] * 6
    assert (len(record.medians), record.num_found) == (3, 2)


def test_a_slowdown_that_is_not_there_is_not_found(tool, monkeypatch, tmp_path):
    code, (record,), _ = run(tool, monkeypatch, tmp_path, 0.0005, "--runs", "2", effect=0.0)
    assert code == 1
    assert record.num_found == 0


def test_short_rounds_are_no_record(tool, monkeypatch, tmp_path):
    assert run(tool, monkeypatch, tmp_path, 0.001, "--quick")[:2] == (1, [])
