"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, alone or of a sum.

Axes:    D = model or head dim, after any leading axes
Source:  arXiv:1910.07467
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import TRITON, Arg, Contract, Out, Outs, Rule, cases, near_one, numel, rounded
from microllm.ops.operator import Operator, saving


def rms_norm(x: Tensor, w: Tensor, *, eps: float, out: Out = None) -> Tensor:
    """Scale each row of x to unit root mean square, then by w.

    Shapes:  x [..., D], w [D] -> y like x
    Numbers: mean and scaling in fp32; rounded to x's dtype before the product with w, as Llama does
    Raises:
        OperatorError: w is not [D], dtypes or devices differ, eps is not above 0, D is strided.
    """
    return RMS_NORM(x, w, eps, out=out)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, *, eps: float, out: Outs = None) -> tuple[Tensor, Tensor]:
    """Return x + residual, rounded, and the norm of that.

    Shapes:  x, residual [..., D], w [D] -> sum, y, both like x
    Numbers: the sum is rounded to x's dtype before its mean is taken; then as ``rms_norm``
    Raises:
        OperatorError: shapes, dtypes or devices differ, eps is not above 0, D is strided.
    """
    return ADD_RMS_NORM(x, residual, w, eps, out=out)


def norm_reference(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return RMSNorm by its formula."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * w


def _backward_reference(dy: Tensor, x: Tensor, w: Tensor, addend: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x32, dy32 = x.float(), dy.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    normed, d_normed = x32 * scale, dy32 * w.float()
    dx = scale * (d_normed - normed * (d_normed * normed).mean(dim=-1, keepdim=True))
    dw = (dy32 * normed).flatten(0, -2).sum(dim=0) if x.dim() > 1 else dy32 * normed
    return (dx if addend is None else dx + addend.float()).to(x.dtype), dw.to(w.dtype)


def _add_reference(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norm_reference(total, w, eps)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return (*RMS_NORM_BACKWARD.call(dy.contiguous(), *ctx.saved_tensors, None, *ctx.scalars), None)


def _add_backward(ctx: Any, d_sum: Tensor, dy: Tensor) -> tuple[Any, ...]:
    w, total = ctx.saved_tensors
    dx, dw = RMS_NORM_BACKWARD.call(dy.contiguous(), total, w, d_sum.contiguous(), *ctx.scalars)
    return dx, dx, dw, None


EPS = Rule("eps above 0", lambda *values: 0 < values[-1] < math.inf, ({"eps": 0.0}, {"eps": math.nan}))
_SIZES = cases("...3 D64", "...2,5 D577", "... D1", "...0 D8")

RMS_NORM = Operator(Contract(
    name="rms_norm", args=(Arg("x", "...D"), Arg("w", "D", near_one)), results=(Arg("y", "...D"),),
    scalars={"eps": 1e-5}, rules=(EPS,), reference=norm_reference, autograd=(_backward, saving(0, 1)), sizes=_SIZES,
    forward=rounded(1e-6, 2e-6, times=2), backward=rounded(1e-5, 1e-4, times=2), levels=TRITON, invariant=("triton",),
    num_flops=lambda s: 4 * numel(s, "...D"),
))  # fmt: skip

ADD_RMS_NORM = Operator(Contract(
    name="add_rms_norm", args=(Arg("x", "...D"), Arg("residual", "...D"), Arg("w", "D", near_one)),
    results=(Arg("sum", "...D"), Arg("y", "...D")), scalars={"eps": 1e-5}, rules=(EPS,), reference=_add_reference,
    autograd=(_add_backward, saving(2, outputs=(0,))), sizes=_SIZES, forward=rounded(1e-6, 2e-6, times=3),
    backward=rounded(1e-5, 1e-4, times=3, wide=3e-2), levels=TRITON, invariant=("triton",),
    num_flops=lambda s: 5 * numel(s, "...D"),
))  # fmt: skip

RMS_NORM_BACKWARD = Operator(Contract(
    name="rms_norm_backward",
    args=(Arg("dy", "...D"), Arg("x", "...D"), Arg("w", "D", near_one), Arg("addend", "...D", optional=True)),
    results=(Arg("dx", "...D"), Arg("dw", "D")), scalars={"eps": 1e-5}, rules=(EPS,), reference=_backward_reference,
    levels=TRITON, sizes=_SIZES, forward=rounded(1e-5, 1e-4), num_flops=lambda s: 9 * numel(s, "...D"),
))  # fmt: skip
