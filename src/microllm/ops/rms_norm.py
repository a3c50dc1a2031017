"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w.

Axes:    R = rows (any leading axes), D = model or head dim
Source:  arXiv:1910.07467
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from microllm.ops.contract import (
    Arg,
    Contract,
    Refusal,
    Tolerance,
    changed,
    near_one,
    normal,
    require,
    require_float,
    require_unit_stride,
)


def rms_norm(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
    """Scale each row of x to unit root mean square, then by w.

    Shapes:  x [..., D], w [D] -> y like x
    Numbers: mean and scaling in fp32; rounded to x's dtype before the product with w, as Llama does
    Raises:
        OperatorError: w is not [D], dtypes or devices differ, eps is not above 0, D is strided.
    """
    require_float("rms_norm", x, w)
    require(
        x.dim() >= 1 and w.shape == x.shape[-1:], "rms_norm",
        f"x {tuple(x.shape)}, w {tuple(w.shape)}", "w of shape (D,), D the last axis of x",
    )  # fmt: skip
    require(math.isfinite(eps) and eps > 0, "rms_norm", f"eps={eps}", "a finite eps above 0")
    require_unit_stride("rms_norm", x, w)
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * w


def _oracle(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, w.shape, w, eps)


CONTRACT = Contract(
    name="rms_norm",
    call=rms_norm,
    oracle=_oracle,
    args=(Arg("x", "RD", normal), Arg("w", "D", near_one)),
    scalars={"eps": 1e-5},
    sizes=({"R": 1, "D": 1}, {"R": 3, "D": 64}, {"R": 17, "D": 577}, {"R": 0, "D": 8}),
    refusals=(
        Refusal("w of another width", changed(w=lambda c: c["w"].new_ones(c["w"].shape[0] + 1))),
        Refusal("eps = 0", changed(eps=0.0)),
        Refusal("eps NaN", changed(eps=math.nan)),
        Refusal("mixed dtypes", changed(w=lambda c: c["w"].double())),
        Refusal("a strided last dimension", changed(x=lambda c: torch.empty(4, 8).T, w=torch.ones(4))),
        Refusal("whole numbers", changed(x=lambda c: torch.ones(2, 4, dtype=torch.int32))),
    ),
    forward={
        torch.float32: Tolerance(1e-6, 2e-6),
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),
        torch.float16: Tolerance(1e-6, 2e-3),
    },
    backward={torch.float32: Tolerance(1e-5, 1e-4)},
    num_bytes=lambda s, item: (2 * s["R"] * s["D"] + s["D"]) * item,
    num_flops=lambda s: 4 * s["R"] * s["D"],
)
