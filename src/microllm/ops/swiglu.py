"""SwiGLU: silu(gate) * up.

Axes:    F = FFN dim, after any leading axes
Source:  arXiv:2002.05202
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import TRITON, Arg, Contract, Out, cases, numel, rounded
from microllm.ops.operator import Operator, saving


def swiglu(gate: Tensor, up: Tensor, *, out: Out = None) -> Tensor:
    """Return silu(gate) * up.

    Shapes:  gate, up [..., F] -> the same shape
    Numbers: computed in fp32, rounded once
    Raises:
        OperatorError: shapes, dtypes or devices differ.
    """
    return SWIGLU(gate, up, out=out)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return SwiGLU by its formula."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def _backward_reference(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy32, gate32 = dy.float(), gate.float()
    sigmoid = torch.sigmoid(gate32)
    d_silu = sigmoid * (1 + gate32 * (1 - sigmoid))
    return (dy32 * up.float() * d_silu).to(gate.dtype), (dy32 * gate32 * sigmoid).to(up.dtype)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return SWIGLU_BACKWARD.call(dy.contiguous(), *ctx.saved_tensors)


_SIZES = cases("...5 F129", "...2,3 F8", "... F1", "...0 F4")

SWIGLU = Operator(Contract(
    name="swiglu", args=(Arg("gate", "...F"), Arg("up", "...F")), results=(Arg("y", "...F"),),
    reference=swiglu_reference, autograd=(_backward, saving(0, 1)), sizes=_SIZES, forward=rounded(2e-6, 2e-5),
    backward=rounded(2e-5, 2e-5), levels=TRITON, invariant=("triton",), num_flops=lambda s: 5 * numel(s, "...F"),
))  # fmt: skip

SWIGLU_BACKWARD = Operator(Contract(
    name="swiglu_backward", args=(Arg("dy", "...F"), Arg("gate", "...F"), Arg("up", "...F")),
    results=(Arg("d_gate", "...F"), Arg("d_up", "...F")), reference=_backward_reference, sizes=_SIZES,
    levels=TRITON, invariant=("triton",), forward=rounded(2e-5, 2e-5), num_flops=lambda s: 12 * numel(s, "...F"),
))  # fmt: skip
