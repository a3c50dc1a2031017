"""Linear: y = x wT (+ bias), weights stored as [out, in]; with a residual added; and with one tiling for any rows.

Axes:    K = in, N = out, after any leading axes of x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from microllm.ops.contract import VENDOR, Arg, Contract, Sizes, numel, rounded, weight
from microllm.ops.operator import Operator, recomputed


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return x multiplied by the transpose of w, plus bias.

    Shapes:  x [..., K], w [N, K], bias [N] or None -> [..., N]
    Numbers: fp32 accumulation, rounded once to x's dtype
    Raises:
        OperatorError: inner sizes, dtypes or devices differ, or a last dimension is strided.
    """
    return LINEAR(x, w, bias, out=out)


def linear_residual(
    x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None,
    sink: dict[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return residual + (x multiplied by the transpose of w, plus bias).

    Shapes:  x [..., K], w [N, K], residual [..., N], bias [N] or None -> [..., N]
    Numbers: the product is rounded to x's dtype before the sum, as two operators would
    Raises:
        OperatorError: as ``linear``.
    """
    return LINEAR_RESIDUAL(x, w, residual, bias, out=out, sink=sink)


def linear_one_tiling(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
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


def _vendor(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if out is None:
        return functional.linear(x, w, bias)
    rows, target = x.flatten(0, -2) if x.dim() != 1 else x[None], out.view(-1, w.shape[0])
    return torch.mm(rows, w.T, out=target) if bias is None else torch.addmm(bias, rows, w.T, out=target)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - torch's context
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    x, w = ctx.saved_tensors
    dy_MN = dy.reshape(-1, w.shape[0])
    need_x, need_w, need_bias = ctx.needs_input_grad
    return (
        (dy_MN @ w).view(x.shape) if need_x else None,
        dy_MN.T @ x.reshape(-1, w.shape[1]) if need_w else None,
        dy_MN.sum(dim=0, dtype=torch.float32).to(dy.dtype) if need_bias else None,
    )


def _residual_reference(
    x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None, sink: dict[str, Tensor] | None = None
) -> Tensor:
    projected = functional.linear(x, w, bias)
    if sink is not None:
        sink.update(projected=projected)
    return residual + projected


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


LINEAR_SIZES = (
    {"...": (7,), "K": 65, "N": 33}, {"...": (), "K": 1, "N": 1}, {"...": (0,), "K": 8, "N": 4},
    {"...": (5, 13), "K": 192, "N": 128},
)  # fmt: skip
LINEAR_TOLERANCE = rounded(2e-5, 2e-5, times=2, wide=1e-2)
"""bf16 and fp16 leave room for a library that rounds partial sums."""

_ARGS = (Arg("x", "...K"), Arg("w", "NK", weight))
_BIAS = Arg("bias", "N", optional=True)
_BACKWARD = rounded(1e-4, 1e-4, times=2, wide=3e-2)

LINEAR = Operator(Contract(
    name="linear", args=(*_ARGS, _BIAS), results=(Arg("y", "...N"),), reference=linear_reference, vendor=_vendor,
    vendor_takes_out=True, autograd=(_backward, _setup), levels=VENDOR, sizes=LINEAR_SIZES, forward=LINEAR_TOLERANCE,
    backward=_BACKWARD, num_flops=linear_flops,
))  # fmt: skip

LINEAR_RESIDUAL = Operator(Contract(
    name="linear_residual", args=(*_ARGS, Arg("residual", "...N"), _BIAS), results=(Arg("y", "...N"),),
    reference=_residual_reference, autograd=recomputed(_residual_reference), sink=("projected",), sizes=LINEAR_SIZES,
    forward=LINEAR_TOLERANCE, backward=_BACKWARD, num_flops=linear_flops,
))  # fmt: skip

ONE_TILING = Operator(Contract(
    name="linear_one_tiling", args=(*_ARGS, _BIAS), results=(Arg("y", "...N"),), reference=_one_tiling_reference,
    invariant=("reference",), sizes=LINEAR_SIZES, forward=LINEAR_TOLERANCE, num_flops=linear_flops,
))  # fmt: skip

OPERATORS = (LINEAR, LINEAR_RESIDUAL, ONE_TILING)
