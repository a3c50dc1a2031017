"""The calibration tool, tried with short rounds: sessions, planted work, the record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "calibrate_timing.py"


def test_tool_times_equal_arms_and_planted_work_in_fresh_processes(tmp_path):
    out = tmp_path / "calibrations.jsonl"
    arguments = ["--runs", "1", "--planted", "1", "--processes", "2", "--share", "--quick", "--wait-s", "0"]
    done = subprocess.run(
        [sys.executable, TOOL, *arguments, "--out", out], capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # short rounds find nothing
    found = json.loads(done.stdout.splitlines()[-1])
    assert [len(session) for session in found["medians"]] == [2]
    assert [len(session) for session in found["planted_medians"]] == [2]
    assert found["process_sd"] >= 0
    assert (found["num_kept"], found["num_found"], found["num_planted"]) == (0, 0, 1)
    assert "planted 1 process 1" in done.stderr
    assert not out.exists(), "short rounds are no record"
