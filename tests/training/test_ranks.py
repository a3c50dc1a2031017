"""Two gloo ranks under torchrun: equal to one process, exact to resume, and stopped together."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks_script
import torch
from run_files import assert_same_end, steps
from safetensors.torch import load_file

from microllm.training import train
from microllm.training.checkpoints import latest_checkpoint

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "ranks_script.py"


def launch(scenario, data, output):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    started = time.monotonic()
    done = subprocess.run(
        [*command, str(data), str(output), scenario], capture_output=True, text=True, timeout=300, check=False
    )
    return done, time.monotonic() - started


@pytest.fixture(scope="module")
def together(packed, tmp_path_factory):
    output = tmp_path_factory.mktemp("ranks")
    done, _ = launch("together", packed, output)
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def last_step(output):
    complete, _ = latest_checkpoint(output / "checkpoints")
    return None if complete is None else complete.step


def told(together, name):
    return [(together / f"{name}.rank{rank}").read_text() for rank in (0, 1)]


def test_five_and_five_steps_are_ten(together):
    assert_same_end(together / "whole", together / "parts", 10)
    assert_same_end(together / "shard-whole", together / "shard-parts", 4)


@pytest.mark.parametrize("name", ["sgd", "micro", "shard"])
def test_two_ranks_with_uneven_rows_equal_one_process(name, together, packed, tmp_path):
    train(ranks_script.config(packed, tmp_path / "one", num_steps=2, optimizer=ranks_script.SGD))
    one, two = (
        load_file(output / "checkpoints/step-00000002/model.safetensors")
        for output in (tmp_path / "one", together / name)
    )
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert torch.allclose(two[key], tensor, rtol=1e-6, atol=1e-7), key
    losses = [[row[1:3] for row in steps(output)] for output in (tmp_path / "one", together / name)]
    assert losses[0] == [pytest.approx(pair, rel=1e-6) for pair in losses[1]]


def test_a_number_that_is_not_finite_on_one_rank_stops_both(together):
    assert all("not finite at step 6" in text for text in told(together, "nan"))
    assert last_step(together / "nan") == 4
    assert [row[0] for row in steps(together / "nan")][-1] <= 5


def test_a_disk_that_fills_up_ends_both_ranks(together):
    first, second = told(together, "full")
    assert first.startswith("CheckpointError")
    assert second.startswith("TrainingError")
    assert "No space left" in first
    assert "No space left" in second
    assert last_step(together / "full") == 4


def test_a_rank_that_drifts_is_found(together):
    assert all("got norm.weight with other bits" in text for text in told(together, "drift"))


def test_one_ranks_sigterm_stops_all_at_the_same_step_with_a_checkpoint(together):
    first, second = told(together, "term")
    assert first == second == str({"kind": "end", "step": 3, "stopped": True})
    assert last_step(together / "term") == 3


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_the_next_launch_goes_on(packed, tmp_path):
    done, seconds = launch("killed", packed, tmp_path)
    assert done.returncode != 0
    assert seconds < 60
    assert "exitcode  : -9" in done.stderr  # torchrun's table
    assert "rank      : 1" in done.stderr
    assert last_step(tmp_path / "killed") == 4
    done, _ = launch("resumed", packed, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, _ = launch("resumed", packed, tmp_path / "whole")  # with nothing to go on from
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert_same_end(tmp_path / "whole" / "killed", tmp_path / "killed", 10)
