"""Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin), alone or after a norm of each head.

A pair is half a rotated extent apart (Hugging Face's layout), or side by side (interleaved). The extent, 2 P, may be
less than a head: the rest passes through.

Axes:    B = batch, T = tokens, H = query heads, G = KV heads, D = head dim, P = pairs, C = positions of a table
Source:  arXiv:2104.09864
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import (
    FP32,
    INT64,
    TRITON,
    Arg,
    Contract,
    Outs,
    Rule,
    Sink,
    Sizes,
    cases,
    in_range,
    near_one,
    numel,
    rounded,
)
from microllm.ops.operator import Operator, recomputed, saving
from microllm.ops.rms_norm import norm_reference


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False,
    out: Outs = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate the pairs of every head of q and k by their position's angles.

    Shapes:  q [B, T, H, D], k [B, T, G, D], cos and sin fp32 [B, T, P], or tables [C, P] with int64 positions [B, T]
             -> like q, like k
    Numbers: computed in fp32, rounded once
    Raises:
        OperatorError: sizes or dtypes differ, 2 P is above D, or (on a CPU) a position is outside 0..C-1.
    """
    return ROPE(q, k, cos, sin, positions, interleaved, False, out=out)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *,
    positions: Tensor | None = None, eps: float, interleaved: bool = False,
    out: Outs = None, sink: Sink = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Norm each head of q and k by weights of its own, then rotate as ``rope`` does.

    Shapes:  q [B, T, H, D], k [B, T, G, D], weights [D], angles as in ``rope`` -> like q, like k
    Numbers: as ``rms_norm``, then as ``rope``
    Raises:
        OperatorError: as ``rope`` and ``rms_norm``.
    """
    return QK_NORM_ROPE(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved, out=out, sink=sink)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    extent = 2 * cos.shape[-1]
    turned, rest = x[..., :extent].float(), x[..., extent:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1) if rest.shape[-1] else turned.to(x.dtype)


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Return q and k turned, by the formula."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(2), -sin.unsqueeze(2) if inverse else sin.unsqueeze(2)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    interleaved, inverse = ctx.scalars
    turned = ROPE.call(dq.contiguous(), dk.contiguous(), *ctx.saved_tensors, interleaved, not inverse)
    return (*turned, None, None, None, None, None)


def _norm_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, q_weight: Tensor, k_weight: Tensor,
    eps: float, interleaved: bool, sink: Sink = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = norm_reference(q, q_weight, eps), norm_reference(k, k_weight, eps)
    if sink is not None:
        sink.update(q_normed=q, k_normed=k)
    return rope_reference(q, k, cos, sin, positions, interleaved, False)


def _angles(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw cosines or sines: numbers up to 1 that need not belong together."""
    return torch.rand(shape, generator=generator) * 2 - 1


def _ids(call: dict[str, Any], start: int = 0) -> Tensor:
    return torch.arange(start, start + call["q"].shape[1]).repeat(call["q"].shape[0], 1)


def _wide(call: dict[str, Any]) -> Tensor:
    return torch.zeros(*call["q"].shape[:2], call["q"].shape[-1])


_HEADS, _TURNED = (Arg("q", "BTHD"), Arg("k", "BTGD")), (Arg("q_out", "BTHD"), Arg("k_out", "BTGD"))
_ANGLES = (
    Arg("cos", "BTP|CP", _angles, FP32), Arg("sin", "BTP|CP", _angles, FP32),
    Arg("positions", "BT", None, INT64, optional=True),
)  # fmt: skip
_LATE = {"cos": lambda c: c["cos"][0], "sin": lambda c: c["sin"][0], "positions": lambda c: _ids(c, 1)}
_RULES = (
    Rule("2 P at most D", lambda q, k, cos, *_: 2 * cos.shape[-1] <= q.shape[-1], ({"cos": _wide, "sin": _wide},)),
    Rule(
        "positions with tables [C, P], none with angles [B, T, P]",
        lambda q, k, cos, sin, positions, *_: (positions is None) == (cos.dim() == 3), ({"positions": _ids},),
    ),
    Rule(
        "positions from 0 to C - 1", lambda q, k, cos, sin, positions, *_: positions is None
        or in_range(positions, 0, cos.shape[0]), (_LATE,), by_value=True,
    ),
)  # fmt: skip
_SIZES = cases("B2 T7 H6 G2 D64 P32", "B1 T1 H1 G1 D2 P1", "B1 T0 H2 G1 D4 P2", "B2 T3 H3 G3 D14 P4")

ROPE = Operator(Contract(
    name="rope", args=(*_HEADS, *_ANGLES), results=_TURNED, scalars={"interleaved": False, "inverse": False},
    rules=_RULES, reference=rope_reference, autograd=(_backward, saving(2, 3, 4)), sizes=_SIZES,
    forward=rounded(2e-5, 2e-5), backward=rounded(3e-5, 3e-5), levels=TRITON, invariant=("triton",),
    num_flops=lambda s: 3 * (numel(s, "BTHD") + numel(s, "BTGD")),
))  # fmt: skip

QK_NORM_ROPE = Operator(Contract(
    name="qk_norm_rope", args=(*_HEADS, *_ANGLES, Arg("q_weight", "D", near_one), Arg("k_weight", "D", near_one)),
    results=_TURNED, scalars={"eps": 1e-6, "interleaved": False},
    rules=(*_RULES, Rule("eps above 0", lambda *v: 0 < v[-2] < math.inf, ({"eps": 0.0}, {"eps": math.nan}))),
    reference=_norm_rope_reference, autograd=recomputed(_norm_rope_reference), sink=("q_normed", "k_normed"),
    levels=TRITON, invariant=("triton",), sizes=_SIZES, forward=rounded(3e-5, 3e-5, times=3, wide=2e-2),
    backward=rounded(1e-4, 1e-4, times=3, wide=6e-2), num_flops=lambda s: 7 * (numel(s, "BTHD") + numel(s, "BTGD")),
))  # fmt: skip
