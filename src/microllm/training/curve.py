"""The picture of a run: loss by step, with the validation's.

Place: reads ``metrics.jsonl`` alone, so that it can be drawn again at any time.
"""

from __future__ import annotations

import json
from pathlib import Path

from microllm.errors import DataError, MissingExtraError
from microllm.evidence.journal import read_lines
from microllm.io.paths import expanded
from microllm.training.metrics import FILE

PICTURE = "loss.png"


def draw_curve(output: Path) -> Path:
    """Draw the run in ``output`` as ``loss.png`` there and return its path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: the run has no step yet.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "the loss curve") from error
    output = expanded(output)
    rows = [json.loads(line) for line in read_lines(output / FILE)]
    curves = {kind: [(r["step"], r["loss"]) for r in rows if r["kind"] == kind] for kind in ("step", "validation")}
    if not curves["step"]:
        raise DataError(f"got {output / FILE} without a step; need at least one to draw")
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curves["step"], strict=True), linewidth=0.8, label="train, each step")
    if curves["validation"]:
        axes.plot(*zip(*curves["validation"], strict=True), marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(output / PICTURE, dpi=110)
    return output / PICTURE
