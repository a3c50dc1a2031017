"""SwiGLU: silu(gate) * up.

Source:  arXiv:2002.05202
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import Arg, Contract, Refusal, Tolerance, changed, normal, require, require_float


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Shapes:  gate, up of one shape -> the same shape
    Numbers: computed in fp32, rounded once
    Raises:
        OperatorError: shapes, dtypes or devices differ.
    """
    require_float("swiglu", gate, up)
    require(gate.shape == up.shape, "swiglu", f"gate {tuple(gate.shape)}, up {tuple(up.shape)}", "equal shapes")
    if gate.dtype == torch.float32:
        return torch.nn.functional.silu(gate) * up
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


CONTRACT = Contract(
    name="swiglu",
    call=swiglu,
    oracle=lambda gate, up: gate * torch.sigmoid(gate) * up,
    args=(Arg("gate", "MF", normal), Arg("up", "MF", normal)),
    sizes=({"M": 1, "F": 1}, {"M": 5, "F": 129}, {"M": 0, "F": 4}),
    refusals=(
        Refusal("unequal shapes", changed(up=lambda c: c["up"].new_zeros(2, 3, 4))),
        Refusal("mixed dtypes", changed(up=lambda c: c["up"].double())),
    ),
    forward={
        torch.float32: Tolerance(2e-6, 2e-5),
        torch.bfloat16: Tolerance(1e-6, 4e-3),
        torch.float16: Tolerance(1e-6, 1e-3),
    },
    backward={torch.float32: Tolerance(2e-5, 2e-5)},
    num_bytes=lambda s, item: 3 * s["M"] * s["F"] * item,
    num_flops=lambda s: 5 * s["M"] * s["F"],
)
