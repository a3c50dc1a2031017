"""Embedding: pick one row of a table for each id.

Axes:    V = vocabulary, D = model dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import EXACT, Arg, Contract, Out, Rule, cases, ids_below, in_range, numel, rounded
from microllm.ops.operator import Operator, saving


def embedding(ids: Tensor, w: Tensor, *, out: Out = None) -> Tensor:
    """Return the rows of w that ids name.

    Shapes:  ids [...] int32 or int64, w [V, D] -> [..., D]
    Numbers: exact
    Raises:
        OperatorError: ids are not whole numbers, w is not a matrix, or (on a CPU) an id is outside 0..V-1.
    """
    return EMBEDDING(ids, w, out=out)


def _backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
    ids, w = ctx.saved_tensors
    return None, torch.ops.aten.embedding_dense_backward(dy, ids, w.shape[0], -1, False)


EMBEDDING = Operator(Contract(
    name="embedding",
    args=(Arg("ids", "...", ids_below("V"), (torch.int64, torch.int32), layout="any"), Arg("w", "VD")),
    results=(Arg("y", "...D"),), rules=(Rule(
        "ids from 0 to V - 1", lambda ids, w: in_range(ids, 0, w.shape[0]),
        ({"ids": lambda c: c["ids"] + c["w"].shape[0]}, {"ids": lambda c: c["ids"] - c["w"].shape[0]}), by_value=True,
    ),),
    reference=lambda ids, w: torch.nn.functional.embedding(ids, w), autograd=(_backward, saving(0, 1)), forward=EXACT,
    backward=rounded(1e-6, 1e-6, times=4), sizes=cases("...2,5 V11 D24", "... V1 D1", "...0 V3 D8"),
    traffic=lambda s, item: 2 * numel(s, "...D") * item + 8 * numel(s, "..."), num_flops=lambda s: 0,
))  # fmt: skip
