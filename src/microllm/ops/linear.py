"""Linear: y = x wT (+ bias), weights stored as [out, in]; fused with what stands before or after it in a block.

That is a residual added, or RMSNorm folded in: the QKV pack, and the gate and up pack with SwiGLU. One form keeps
one tiling for any number of rows.

Axes:    K = in, N = out, F = FFN dim, after any leading axes of x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from microllm.ops.contract import (
    TRITON,
    VENDOR,
    Arg,
    Contract,
    Out,
    Sink,
    Sizes,
    cases,
    near_one,
    numel,
    rounded,
    weight,
)
from microllm.ops.operator import Operator, recomputed, saving
from microllm.ops.rms_norm import EPS, norm_reference
from microllm.ops.swiglu import swiglu_reference


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Out = None) -> Tensor:
    """Return x multiplied by the transpose of w, plus bias.

    Shapes:  x [..., K], w [N, K], bias [N] or None -> [..., N]
    Numbers: fp32 accumulation, rounded once to x's dtype
    Raises:
        OperatorError: inner sizes, dtypes or devices differ, or a last dimension is strided.
    """
    return LINEAR(x, w, bias, out=out)


def linear_residual(
    x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None = None, *, out: Out = None,
    sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return residual + (x multiplied by the transpose of w, plus bias).

    Shapes:  x [..., K], w [N, K], residual [..., N], bias [N] or None -> [..., N]
    Numbers: fp32 accumulation; whether the product is rounded before the sum is the level's
    Raises:
        OperatorError: as ``linear``.
    """
    return LINEAR_RESIDUAL(x, w, residual, bias, out=out, sink=sink)


def norm_linear(
    x: Tensor, norm_weight: Tensor, w: Tensor, bias: Tensor | None = None, *, eps: float, out: Out = None,
    sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return linear(rms_norm(x)): w is one matrix or several stacked (q, k, v).

    Shapes:  x [..., K], norm_weight [K], w [N, K], bias [N] or None -> [..., N]
    Numbers: fp32 accumulation; where the normed input is rounded is the level's
    Raises:
        OperatorError: sizes, dtypes or devices differ, or eps is not above 0.
    """
    return NORM_LINEAR(x, norm_weight, w, bias, eps, out=out, sink=sink)


def norm_linear_swiglu(
    x: Tensor, norm_weight: Tensor | None, w: Tensor, bias: Tensor | None = None, *, eps: float, out: Out = None,
    sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return swiglu(gate, up) of linear(rms_norm(x)), where w's first F rows make the gate and its last F rows up.

    Without a norm_weight x is taken as it is: it is normed already.

    Shapes:  x [..., K], norm_weight [K] or None, w [2 F, K], bias [2 F] or None -> [..., F]
    Numbers: fp32 accumulation; whether gate and up are rounded before SwiGLU is the level's
    Raises:
        OperatorError: as ``norm_linear``.
    """
    return NORM_LINEAR_SWIGLU(x, norm_weight, w, bias, eps, out=out, sink=sink)


def linear_one_tiling(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Out = None) -> Tensor:
    """Return what ``linear`` does, each row with the same bits whatever rows stand beside it.

    Shapes:  x [..., K], w [N, K], bias [N] or None -> [..., N]
    Numbers: one tile and one order of K for any number of rows; fp32 accumulation, rounded once
    Raises:
        OperatorError: as ``linear``.
    """
    return ONE_TILING(x, w, bias, out=out)


def linear_reference(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in fp32, rounded once."""
    y = x.float() @ w.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _vendor(x: Tensor, w: Tensor, bias: Tensor | None, out: Out = None) -> Tensor:
    if out is None:
        return functional.linear(x, w, bias)
    rows, target = x.flatten(0, -2) if x.dim() != 1 else x[None], out.view(-1, w.shape[0])
    return torch.mm(rows, w.T, out=target) if bias is None else torch.addmm(bias, rows, w.T, out=target)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dy_MN = dy.reshape(-1, w.shape[0])
    need_x, need_w, need_bias = ctx.needs_input_grad
    return (
        (dy_MN @ w).view(x.shape) if need_x else None,
        dy_MN.T @ x.reshape(-1, w.shape[1]) if need_w else None,
        dy_MN.sum(dim=0, dtype=torch.float32).to(dy.dtype) if need_bias else None,
    )


def _residual_reference(x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None, sink: Sink = None) -> Tensor:
    projected = functional.linear(x, w, bias)
    if sink is not None:
        sink.update(projected=projected)
    return residual + projected


def _norm_reference(x: Tensor, g: Tensor, w: Tensor, bias: Tensor | None, eps: float, sink: Sink = None) -> Tensor:
    normed = norm_reference(x, g, eps)
    if sink is not None:
        sink.update(normed=normed)
    return functional.linear(normed, w, bias)


def _swiglu_reference(
    x: Tensor, g: Tensor | None, w: Tensor, bias: Tensor | None, eps: float, sink: Sink = None
) -> Tensor:
    both = functional.linear(x, w, bias) if g is None else _norm_reference(x, g, w, bias, eps, sink)
    gate, up = both.chunk(2, dim=-1)
    if sink is not None:
        sink.update(gate=gate, up=up, normed=sink.get("normed", x))
    return swiglu_reference(gate, up)


def _one_tiling_reference(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply tiles of ``TILE_ROWS`` rows, the last one padded: every product has one shape, hence one order of K."""
    rows = x.reshape(-1, x.shape[-1]).float()
    padded = functional.pad(rows, (0, 0, 0, -rows.shape[0] % TILE_ROWS))
    w_KN = w.float().T
    y = torch.cat([tile @ w_KN for tile in padded.split(TILE_ROWS)])[: rows.shape[0]]
    return (y if bias is None else y + bias.float()).to(x.dtype).view(*x.shape[:-1], w.shape[0])


TILE_ROWS = 32
"""Rows of a tile of ``linear_one_tiling``'s reference: torch's CPU products change their bits below 16."""


def linear_flops(s: Sizes) -> int:
    """Return the FLOPs of x [..., K] times w [N, K]."""
    return 2 * numel(s, "...N") * s["K"]


MODE_B = "mma (in fp32 and on AMD: tiles of 16 rows)"
LINEAR_SIZES = cases("...7 K65 N33", "... K1 N1", "...0 K8 N4", "...5,13 K192 N128")
LINEAR_TOLERANCE = rounded(2e-5, 2e-5, times=2, wide=1e-2)
"""bf16 and fp16 leave room for a library that rounds partial sums."""

_X, _W, _BIAS, _Y = Arg("x", "...K"), Arg("w", "NK", weight), Arg("bias", "N", optional=True), (Arg("y", "...N"),)
_NORM = Arg("norm_weight", "K", near_one)
_BACKWARD = rounded(1e-4, 1e-4, times=2, wide=3e-2)
_NORM_FORWARD, _NORM_BACKWARD = rounded(2e-5, 2e-5, times=3, wide=3e-2), rounded(2e-4, 2e-4, times=4, wide=0.25)

LINEAR = Operator(Contract(
    name="linear", args=(_X, _W, _BIAS), results=_Y, reference=linear_reference, vendor=_vendor, vendor_takes_out=True,
    autograd=(_backward, saving(0, 1)), levels={**VENDOR, "cuda": ("triton", "vendor", "reference")},
    invariant=("triton",), mode_b=MODE_B, sizes=LINEAR_SIZES, forward=LINEAR_TOLERANCE, backward=_BACKWARD,
    num_flops=linear_flops,
))  # fmt: skip

LINEAR_RESIDUAL = Operator(Contract(
    name="linear_residual", args=(_X, _W, Arg("residual", "...N"), _BIAS), results=_Y, reference=_residual_reference,
    autograd=recomputed(_residual_reference), levels=TRITON, invariant=("triton",), mode_b=MODE_B, sink=("projected",),
    sizes=LINEAR_SIZES, forward=LINEAR_TOLERANCE, backward=_BACKWARD, num_flops=linear_flops,
))  # fmt: skip

ONE_TILING = Operator(Contract(
    name="linear_one_tiling", args=(_X, _W, _BIAS), results=_Y, reference=_one_tiling_reference,
    levels=TRITON, invariant=("reference", "triton"), mode_b="tile, one for any number of rows",
    sizes=LINEAR_SIZES, forward=LINEAR_TOLERANCE, num_flops=linear_flops,
))  # fmt: skip

NORM_LINEAR = Operator(Contract(
    name="norm_linear", args=(_X, _NORM, _W, _BIAS), results=_Y, scalars={"eps": 1e-5}, rules=(EPS,),
    reference=_norm_reference, autograd=recomputed(_norm_reference), levels=TRITON, invariant=("triton",),
    mode_b=MODE_B, sink=("normed",), sizes=LINEAR_SIZES, forward=_NORM_FORWARD, backward=_NORM_BACKWARD,
    num_flops=linear_flops,
))  # fmt: skip

NORM_LINEAR_SWIGLU = Operator(Contract(
    name="norm_linear_swiglu", args=(
        _X, Arg("norm_weight", "K", near_one, optional=True), Arg("w", "2F K", weight),
        Arg("bias", "2F", optional=True),
    ),
    results=(Arg("y", "...F"),), scalars={"eps": 1e-5}, rules=(EPS,), reference=_swiglu_reference,
    autograd=recomputed(_swiglu_reference), levels=TRITON, invariant=("triton",), mode_b=MODE_B,
    sink=("normed", "gate", "up"), forward=_NORM_FORWARD, backward=_NORM_BACKWARD,
    sizes=tuple({"F": s["N"], **s} for s in LINEAR_SIZES), num_flops=lambda s: 4 * numel(s, "...F") * s["K"],
))  # fmt: skip

LINEARS = (LINEAR, LINEAR_RESIDUAL, ONE_TILING, NORM_LINEAR, NORM_LINEAR_SWIGLU)
