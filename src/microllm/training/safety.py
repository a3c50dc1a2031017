"""Which tensor went wrong: asked once, when a loss or a gradient is not finite."""

from __future__ import annotations

import math
from typing import Any

import torch

from microllm.training.build import Built
from microllm.training.dataset import Rows
from microllm.training.optimizer import local


def first_bad(built: Built, batches: list[Rows], loss: float) -> str:
    """Return the first tensor that is not finite, in words: a parameter, a block's output, the loss, or a gradient."""
    for name, parameter in built.parameters.items():
        if not bool(local(parameter).isfinite().all()):
            return f"parameter {name}"
    if not math.isfinite(loss):
        return _first_output(built, batches)
    for name, parameter in built.parameters.items():
        if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
            return f"the gradient of {name}"
    return "the gradients' norm"


def _first_output(built: Built, batches: list[Rows]) -> str:
    """Run forward once more, looking at every block's output."""
    found: list[str] = []

    def look(number: int, outputs: Any) -> None:  # noqa: ANN401  a hook gets what a block returns
        if not all(bool(t.isfinite().all()) for t in outputs):
            found.append(f"the output of layers.{number}")

    hooks = [
        block.register_forward_hook(lambda m, i, outputs, number=number: look(number, outputs))
        for number, block in enumerate(built.network.blocks)
    ]
    with torch.no_grad():
        for rows in batches:
            built.network.eval()(rows)
    for hook in hooks:
        hook.remove()
    return found[0] if found else "the loss"
