"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, alone or of a sum.

Axes:    D = model or head dim, after any leading axes
Source:  arXiv:1910.07467
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import Arg, Contract, Rule, near_one, numel, rounded
from microllm.ops.operator import Operator


def rms_norm(x: Tensor, w: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Scale each row of x to unit root mean square, then by w.

    Shapes:  x [..., D], w [D] -> y like x
    Numbers: mean and scaling in fp32; rounded to x's dtype before the product with w, as Llama does
    Raises:
        OperatorError: w is not [D], dtypes or devices differ, eps is not above 0, D is strided.
    """
    return RMS_NORM(x, w, eps, out=out)


def add_rms_norm(
    x: Tensor, residual: Tensor, w: Tensor, *, eps: float, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - torch's context
    x, w, ctx.eps = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    return (*BACKWARD.call(dy.contiguous(), *ctx.saved_tensors, None, ctx.eps), None)


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    *_, w, ctx.eps = inputs
    ctx.save_for_backward(output[0], w)


def _add_backward(ctx: Any, d_sum: Tensor, dy: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    dx, dw = BACKWARD.call(dy.contiguous(), *ctx.saved_tensors, d_sum.contiguous(), ctx.eps)
    return dx, dx, dw, None


_EPS = Rule("eps above 0", lambda *values: 0 < values[-1] < math.inf, ({"eps": 0.0}, {"eps": math.nan}))
_SIZES = (
    {"...": (3,), "D": 64}, {"...": (2, 5), "D": 577}, {"...": (), "D": 1}, {"...": (0,), "D": 8},
)  # fmt: skip

RMS_NORM = Operator(Contract(
    name="rms_norm", args=(Arg("x", "...D"), Arg("w", "D", near_one)), results=(Arg("y", "...D"),),
    scalars={"eps": 1e-5}, rules=(_EPS,), reference=norm_reference, autograd=(_backward, _setup), sizes=_SIZES,
    forward=rounded(1e-6, 2e-6, times=2), backward=rounded(1e-5, 1e-4, times=2),
    num_flops=lambda s: 4 * numel(s, "...D"),
))  # fmt: skip

ADD_RMS_NORM = Operator(Contract(
    name="add_rms_norm", args=(Arg("x", "...D"), Arg("residual", "...D"), Arg("w", "D", near_one)),
    results=(Arg("sum", "...D"), Arg("y", "...D")), scalars={"eps": 1e-5}, rules=(_EPS,), reference=_add_reference,
    autograd=(_add_backward, _add_setup), sizes=_SIZES, forward=rounded(1e-6, 2e-6, times=3),
    backward=rounded(1e-5, 1e-4, times=3, wide=3e-2), num_flops=lambda s: 5 * numel(s, "...D"),
))  # fmt: skip

BACKWARD = Operator(Contract(
    name="rms_norm_backward",
    args=(Arg("dy", "...D"), Arg("x", "...D"), Arg("w", "D", near_one), Arg("addend", "...D", optional=True)),
    results=(Arg("dx", "...D"), Arg("dw", "D")), scalars={"eps": 1e-5}, rules=(_EPS,), reference=_backward_reference,
    sizes=_SIZES, forward=rounded(1e-5, 1e-4), num_flops=lambda s: 9 * numel(s, "...D"),
))  # fmt: skip

OPERATORS = (RMS_NORM, ADD_RMS_NORM, BACKWARD)
