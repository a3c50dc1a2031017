"""What a run left behind, read back for comparing."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors")


def steps(output: Path) -> list[tuple[float, ...]]:
    """Return what each step's row says of the numbers."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"], r["learning_rate"]) for r in rows if r["kind"] == "step"]


def assert_same_end(one: Path, other: Path, step: int) -> None:
    """Compare two runs' last checkpoints and all their steps, bit for bit."""
    for name in FILES:
        mine, theirs = (load_file(output / f"checkpoints/step-{step:08d}/{name}") for output in (one, other))
        assert mine.keys() == theirs.keys()
        assert all(tensor.equal(theirs[key]) for key, tensor in mine.items()), name
    assert steps(one) == steps(other)
    assert [row[0] for row in steps(one)] == list(range(1, step + 1))
