"""Embedding: pick one row of a table for each id.

Axes:    B = batch, T = tokens, V = vocabulary, D = model dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import Arg, Contract, Refusal, Tolerance, changed, ids_below, normal, require


def embedding(ids: Tensor, w: Tensor) -> Tensor:
    """Return the rows of w that ids name.

    Shapes:  ids [...] int32 or int64, w [V, D] -> [..., D]
    Numbers: exact
    Raises:
        OperatorError: ids are not whole numbers, w is not a matrix, or (on a CPU) an id is outside 0..V-1.
    """
    require(ids.dtype in (torch.int32, torch.int64), "embedding", f"ids of {ids.dtype}", "int32 or int64 ids")
    require(w.dim() == 2, "embedding", f"w {tuple(w.shape)}", "w of shape (V, D)")
    require(ids.device == w.device, "embedding", f"ids on {ids.device}, w on {w.device}", "one device")
    if ids.device.type == "cpu" and ids.numel():
        low, high = ids.aminmax()
        require(
            0 <= int(low) and int(high) < w.shape[0], "embedding",
            f"ids from {int(low)} to {int(high)}", f"ids from 0 to {w.shape[0] - 1}",
        )  # fmt: skip
    return torch.nn.functional.embedding(ids, w)


CONTRACT = Contract(
    name="embedding",
    call=embedding,
    oracle=lambda ids, w: w[ids],
    args=(Arg("ids", "BT", ids_below("V"), is_float=False), Arg("w", "VD", normal)),
    sizes=(
        {"B": 1, "T": 1, "V": 1, "D": 1},
        {"B": 2, "T": 5, "V": 11, "D": 24},
        {"B": 1, "T": 0, "V": 3, "D": 8},
    ),
    refusals=(
        Refusal("an id of V", changed(ids=lambda c: c["ids"] * 0 + c["w"].shape[0])),
        Refusal("a negative id", changed(ids=lambda c: c["ids"] * 0 - 1)),
        Refusal("float ids", changed(ids=lambda c: c["ids"].float())),
        Refusal("a table that is no matrix", changed(w=lambda c: c["w"][0])),
    ),
    forward={d: Tolerance(0, 0) for d in (torch.float32, torch.bfloat16, torch.float16)},
    backward={torch.float32: Tolerance(1e-6, 1e-6)},
    num_bytes=lambda s, item: 2 * s["B"] * s["T"] * s["D"] * item + 8 * s["B"] * s["T"],
    num_flops=lambda s: 0,
    exact=True,
)
