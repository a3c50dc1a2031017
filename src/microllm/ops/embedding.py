"""Embedding: pick one row of a table for each id.

Axes:    V = vocabulary, D = model dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import EXACT, Arg, Contract, Rule, ids_below, in_range, numel, rounded
from microllm.ops.operator import Operator


def embedding(ids: Tensor, w: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the rows of w that ids name.

    Shapes:  ids [...] int32 or int64, w [V, D] -> [..., D]
    Numbers: exact
    Raises:
        OperatorError: ids are not whole numbers, w is not a matrix, or (on a CPU) an id is outside 0..V-1.
    """
    return EMBEDDING(ids, w, out=out)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401 - torch's context
    ids, w = inputs
    ctx.num_rows = w.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:  # noqa: ANN401
    return None, torch.ops.aten.embedding_dense_backward(dy, ctx.saved_tensors[0], ctx.num_rows, -1, False)


EMBEDDING = Operator(Contract(
    name="embedding",
    args=(Arg("ids", "...", ids_below("V"), (torch.int64, torch.int32), layout="any"), Arg("w", "VD")),
    results=(Arg("y", "...D"),),
    rules=(Rule("ids from 0 to V - 1", lambda ids, w: in_range(ids, 0, w.shape[0]),
        ({"ids": lambda c: c["ids"] + c["w"].shape[0]}, {"ids": lambda c: c["ids"] - c["w"].shape[0]}),
        by_value=True,),),
    reference=lambda ids, w: torch.nn.functional.embedding(ids, w), autograd=(_backward, _setup),
    sizes=({"...": (2, 5), "V": 11, "D": 24}, {"...": (), "V": 1, "D": 1}, {"...": (0,), "V": 3, "D": 8}),
    forward=EXACT, backward=rounded(1e-6, 1e-6, times=4),
    traffic=lambda s, item: 2 * numel(s, "...D") * item + 8 * numel(s, "..."), num_flops=lambda s: 0,
))  # fmt: skip

OPERATORS = (EMBEDDING,)
