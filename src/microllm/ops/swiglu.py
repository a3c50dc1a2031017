"""SwiGLU: silu(gate) * up.

Axes:    F = FFN dim, after any leading axes
Source:  arXiv:2002.05202
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import Arg, Contract, numel, rounded
from microllm.ops.operator import Operator


def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
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


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401 - torch's context
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return BACKWARD.call(dy.contiguous(), *ctx.saved_tensors)


_SIZES = ({"...": (5,), "F": 129}, {"...": (2, 3), "F": 8}, {"...": (), "F": 1}, {"...": (0,), "F": 4})

SWIGLU = Operator(Contract(
    name="swiglu", args=(Arg("gate", "...F"), Arg("up", "...F")), results=(Arg("y", "...F"),),
    reference=swiglu_reference, autograd=(_backward, _setup), sizes=_SIZES, forward=rounded(2e-6, 2e-5),
    backward=rounded(2e-5, 2e-5), num_flops=lambda s: 5 * numel(s, "...F"),
))  # fmt: skip

BACKWARD = Operator(Contract(
    name="swiglu_backward", args=(Arg("dy", "...F"), Arg("gate", "...F"), Arg("up", "...F")),
    results=(Arg("d_gate", "...F"), Arg("d_up", "...F")), reference=_backward_reference, sizes=_SIZES,
    forward=rounded(2e-5, 2e-5), num_flops=lambda s: 12 * numel(s, "...F"),
))  # fmt: skip

OPERATORS = (SWIGLU, BACKWARD)
