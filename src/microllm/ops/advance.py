"""Move the rows of a decode step on by one token, on the device: what lets a captured step feed the next one.

Axes:    A = rows, H = steps that the history holds
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import EXACT, INT64, TRITON, Arg, Contract, Rule, Sizes, between, cases, in_range
from microllm.ops.operator import Operator

IDLE = -2
"""What the history says of a row that ran nothing."""


def advance_rows(
    token: Tensor, token_ids: Tensor, positions: Tensor, last: Tensor, history: Tensor, step: Tensor
) -> None:
    """Make each row's chosen token its next input, in place, and note it in the history's line ``step``.

    A row idles at position -1. It goes on unless its token is -1 or its position was ``last``; then it idles from here
    on. ``step`` grows by one.

    Shapes:  token, token_ids, positions and last [A], history [H, A], step [], all int64
    Raises:
        OperatorError: shapes differ, or (on a CPU) ``step`` is outside 0..H-1.
    """
    ADVANCE_ROWS(token, token_ids, positions, last, history, step)


def _reference(
    token: Tensor, token_ids: Tensor, positions: Tensor, last: Tensor, history: Tensor, step: Tensor
) -> None:  # fmt: skip
    runs = positions >= 0
    history.index_copy_(0, step.view(1), torch.where(runs, token, IDLE)[None])
    goes_on = runs & (token >= 0) & (positions < last)
    token_ids.copy_(torch.where(goes_on, token, 0))
    positions.copy_(torch.where(goes_on, positions + 1, -1))
    step.add_(1)


def _draw_step(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(sizes["H"], shape, generator=generator, dtype=dtype)


_FROM_IDLE = between(-1.9, 7)

ADVANCE_ROWS = Operator(Contract(
    name="advance_rows", args=(
        Arg("token", "A", _FROM_IDLE, INT64), Arg("token_ids", "A", between(0, 7), INT64, mutated=True),
        Arg("positions", "A", _FROM_IDLE, INT64, mutated=True), Arg("last", "A", between(0, 7), INT64),
        Arg("history", "HA", between(0, 7), INT64, mutated=True), Arg("step", "", _draw_step, INT64, mutated=True),
    ),
    rules=(
        Rule(
            "step from 0 to H - 1", lambda *v: in_range(v[5], 0, v[4].shape[0]),
            ({"step": lambda c: c["step"] + c["history"].shape[0]}, {"step": lambda c: c["step"] * 0 - 1}),
            by_value=True,
        ),
    ),
    reference=_reference, levels=TRITON, sizes=cases("A5 H4", "A1 H1", "A70 H3"), forward=EXACT, num_flops=lambda s: 0,
    traffic=lambda s, item: 56 * s["A"] + 16,
))  # fmt: skip
