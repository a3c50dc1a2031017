"""Linear: y = x wT (+ bias), weights stored as [out, in].

Axes:    M = rows, K = in, N = out
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import (
    Arg,
    Contract,
    Refusal,
    Tolerance,
    changed,
    normal,
    require,
    require_float,
    require_unit_stride,
)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x multiplied by the transpose of w, plus bias.

    Shapes:  x [..., K], w [N, K], bias [N] or None -> [..., N]
    Numbers: fp32 accumulation, rounded once to x's dtype
    Raises:
        OperatorError: inner sizes, dtypes or devices differ, or a last dimension is strided.
    """
    tensors = (x, w) if bias is None else (x, w, bias)
    require_float("linear", *tensors)
    require(
        x.dim() >= 1 and w.dim() == 2 and x.shape[-1] == w.shape[1], "linear",
        f"x {tuple(x.shape)}, w {tuple(w.shape)}", "x (..., K) and w (N, K)",
    )  # fmt: skip
    if bias is not None:
        require(bias.shape == w.shape[:1], "linear", f"bias {tuple(bias.shape)}, w {tuple(w.shape)}", "bias (N,)")
    require_unit_stride("linear", *tensors)
    return torch.nn.functional.linear(x, w, bias)


CONTRACT = Contract(
    name="linear",
    call=linear,
    oracle=lambda x, w, bias=None: x @ w.T + (0 if bias is None else bias),
    args=(Arg("x", "MK", normal), Arg("w", "NK", normal), Arg("bias", "N", normal)),
    sizes=(
        {"M": 1, "K": 1, "N": 1},
        {"M": 7, "K": 65, "N": 33},
        {"M": 0, "K": 8, "N": 4},
        {"M": 65, "K": 192, "N": 128},
    ),
    refusals=(
        Refusal("another inner size", changed(w=lambda c: c["w"].new_zeros(c["w"].shape[0], c["w"].shape[1] + 1))),
        Refusal("bias of another size", changed(bias=lambda c: c["bias"].new_zeros(c["bias"].shape[0] + 1))),
        Refusal("mixed dtypes", changed(w=lambda c: c["w"].double())),
        Refusal("a transposed weight", changed(x=torch.zeros(2, 3), w=torch.zeros(3, 4).T, bias=None)),
    ),
    forward={
        torch.float32: Tolerance(2e-5, 2e-5),
        torch.bfloat16: Tolerance(2e-2, 1.6e-2),
        torch.float16: Tolerance(1e-2, 2e-3),
    },
    backward={torch.float32: Tolerance(1e-4, 1e-4)},
    num_bytes=lambda s, item: (s["M"] * s["K"] + s["N"] * s["K"] + s["M"] * s["N"] + s["N"]) * item,
    num_flops=lambda s: 2 * s["M"] * s["N"] * s["K"],
)
