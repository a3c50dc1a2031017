"""RMSNorm folded into the linear that reads it: the QKV pack, and the gate and up pack with SwiGLU.

Axes:    K = in, N = out, F = FFN dim, after any leading axes of x
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from microllm.ops.contract import Arg, Contract, Rule, near_one, numel, rounded, weight
from microllm.ops.linear import LINEAR_SIZES, linear_flops
from microllm.ops.operator import Operator, recomputed
from microllm.ops.rms_norm import norm_reference
from microllm.ops.swiglu import swiglu_reference


def norm_linear(
    x: Tensor, norm_weight: Tensor, w: Tensor, bias: Tensor | None = None, *, eps: float, out: Tensor | None = None,
    sink: dict[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return linear(rms_norm(x)): w is one matrix or several stacked (q, k, v).

    Shapes:  x [..., K], norm_weight [K], w [N, K], bias [N] or None -> [..., N]
    Numbers: the normed input is rounded as ``rms_norm`` rounds it; fp32 accumulation
    Raises:
        OperatorError: sizes, dtypes or devices differ, or eps is not above 0.
    """
    return NORM_LINEAR(x, norm_weight, w, bias, eps, out=out, sink=sink)


def norm_linear_swiglu(
    x: Tensor, norm_weight: Tensor, w: Tensor, bias: Tensor | None = None, *, eps: float, out: Tensor | None = None,
    sink: dict[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return swiglu(gate, up) of linear(rms_norm(x)), where w's first F rows make the gate and its last F rows up.

    Shapes:  x [..., K], norm_weight [K], w [2 F, K], bias [2 F] or None -> [..., F]
    Numbers: gate and up are rounded to x's dtype before SwiGLU, as separate operators would
    Raises:
        OperatorError: as ``norm_linear``.
    """
    return NORM_LINEAR_SWIGLU(x, norm_weight, w, bias, eps, out=out, sink=sink)


def _reference(
    x: Tensor, norm_weight: Tensor, w: Tensor, bias: Tensor | None, eps: float, sink: dict[str, Tensor] | None = None
) -> Tensor:
    normed = norm_reference(x, norm_weight, eps)
    if sink is not None:
        sink.update(normed=normed)
    return functional.linear(normed, w, bias)


def _swiglu_reference(
    x: Tensor, norm_weight: Tensor, w: Tensor, bias: Tensor | None, eps: float, sink: dict[str, Tensor] | None = None
) -> Tensor:
    gate, up = _reference(x, norm_weight, w, bias, eps, sink).chunk(2, dim=-1)
    if sink is not None:
        sink.update(gate=gate, up=up)
    return swiglu_reference(gate, up)


_EPS = Rule("eps above 0", lambda *values: 0 < values[-1] < math.inf, ({"eps": 0.0}, {"eps": math.nan}))
_FORWARD, _BACKWARD = rounded(2e-5, 2e-5, times=3, wide=3e-2), rounded(2e-4, 2e-4, times=4, wide=0.25)
_ARGS = (Arg("x", "...K"), Arg("norm_weight", "K", near_one))

NORM_LINEAR = Operator(Contract(
    name="norm_linear", args=(*_ARGS, Arg("w", "NK", weight), Arg("bias", "N", optional=True)), results=(Arg("y", "...N"),),
    scalars={"eps": 1e-5}, rules=(_EPS,), reference=_reference, autograd=recomputed(_reference), sink=("normed",),
    sizes=LINEAR_SIZES, forward=_FORWARD, backward=_BACKWARD,
    num_flops=lambda s: linear_flops(s) + 4 * numel(s, "...K"),
))  # fmt: skip

NORM_LINEAR_SWIGLU = Operator(Contract(
    name="norm_linear_swiglu", args=(*_ARGS, Arg("w", "2F K", weight), Arg("bias", "2F", optional=True)),
    results=(Arg("y", "...F"),), scalars={"eps": 1e-5}, rules=(_EPS,), reference=_swiglu_reference,
    autograd=recomputed(_swiglu_reference), sink=("normed", "gate", "up"),
    sizes=tuple({"F": s["N"], **s} for s in LINEAR_SIZES),
    forward=_FORWARD, backward=_BACKWARD,
    num_flops=lambda s: 4 * numel(s, "...F") * s["K"],
))  # fmt: skip

OPERATORS = (NORM_LINEAR, NORM_LINEAR_SWIGLU)
