"""Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin), alone or after a norm of each head.

A pair is half a rotated extent apart (Hugging Face's layout), or side by side (interleaved). The extent, 2 P, may be
less than a head: the rest passes through.

Axes:    B = batch, T = tokens, H = query heads, G = KV heads, D = head dim, P = pairs, C = positions of a table
Source:  arXiv:2104.09864
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import (
    FP32,
    INT64,
    Arg,
    Change,
    Contract,
    Draw,
    Rule,
    Sizes,
    in_range,
    near_one,
    numel,
    rounded,
)
from microllm.ops.operator import Operator, recomputed
from microllm.ops.rms_norm import norm_reference


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
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
    out: tuple[Tensor, Tensor] | None = None, sink: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Norm each head of q and k by weights of its own, then rotate as ``rope`` does.

    Shapes:  q [B, T, H, D], k [B, T, G, D], weights [D], angles as in ``rope`` -> like q, like k
    Numbers: as ``rms_norm``, then as ``rope``
    Raises:
        OperatorError: as ``rope`` and ``rms_norm``.
    """
    return QK_NORM_ROPE(q, k, q_weight, k_weight, cos, sin, positions, eps, interleaved, out=out, sink=sink)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:  # noqa: FBT001
    extent = 2 * cos.shape[-1]
    turned, rest = x[..., :extent].float(), x[..., extent:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1) if rest.shape[-1] else turned.to(x.dtype)


def _reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(2), -sin.unsqueeze(2) if inverse else sin.unsqueeze(2)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401 - torch's context
    _, _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    back = ROPE.call(dq.contiguous(), dk.contiguous(), *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return (*back, None, None, None, None, None)


def _norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, interleaved: bool, sink: dict[str, Tensor] | None = None,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = norm_reference(q, q_weight, eps), norm_reference(k, k_weight, eps)
    if sink is not None:
        sink.update(q_normed=q, k_normed=k)
    return _reference(q, k, cos, sin, positions, interleaved, False)


def _angle(function: str) -> Draw:
    def draw(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        angles = torch.arange(shape[-2])[:, None] * torch.logspace(0, -4, shape[-1])
        return getattr(torch, function)(angles.expand(shape)).contiguous()

    return draw


_ANGLES = (
    Arg("cos", "BTP|CP", _angle("cos"), FP32), Arg("sin", "BTP|CP", _angle("sin"), FP32),
    Arg("positions", "BT", None, INT64, optional=True),
)  # fmt: skip
_SIZES = (
    {"B": 2, "T": 7, "H": 6, "G": 2, "D": 64, "P": 32}, {"B": 1, "T": 1, "H": 1, "G": 1, "D": 2, "P": 1},
    {"B": 1, "T": 0, "H": 2, "G": 1, "D": 4, "P": 2}, {"B": 2, "T": 3, "H": 3, "G": 3, "D": 14, "P": 4},
)  # fmt: skip


def _rules(first: int) -> tuple[Rule, ...]:
    """Return the rules on cos, sin and positions, which begin at argument ``first``."""

    def wide(call: dict[str, Any]) -> Tensor:
        return torch.zeros(*call["q"].shape[:2], call["q"].shape[-1])

    def table(call: dict[str, Any]) -> Tensor:
        return call["cos"][0]

    def ids(call: dict[str, Any], start: int = 0) -> Tensor:
        return torch.arange(start, start + call["q"].shape[1]).repeat(call["q"].shape[0], 1)

    late: Change = {"cos": table, "sin": table, "positions": partial(ids, start=1)}
    return (
        Rule("2 P at most D", lambda *v: 2 * v[first].shape[-1] <= v[0].shape[-1], ({"cos": wide, "sin": wide},)),
        Rule(
            "positions with a table [C, P], none with angles [B, T, P]",
            lambda *v: (v[first + 2] is None) == (v[first].dim() == 3), ({"positions": ids},),
        ),
        Rule(
            "positions from 0 to C - 1",
            lambda *v: v[first + 2] is None or in_range(v[first + 2], 0, v[first].shape[0]), (late,), by_value=True,
        ),
    )  # fmt: skip


def _traffic(s: Sizes, item: int) -> int:
    return 2 * (numel(s, "BTHD") + numel(s, "BTGD")) * item + 8 * numel(s, "BTP")


ROPE = Operator(Contract(
    name="rope", args=(Arg("q", "BTHD"), Arg("k", "BTGD"), *_ANGLES),
    results=(Arg("q_out", "BTHD"), Arg("k_out", "BTGD")), scalars={"interleaved": False, "inverse": False},
    rules=_rules(2), reference=_reference, autograd=(_backward, _setup), sizes=_SIZES, forward=rounded(2e-5, 2e-5),
    backward=rounded(3e-5, 3e-5), traffic=_traffic, num_flops=lambda s: 3 * (numel(s, "BTHD") + numel(s, "BTGD")),
))  # fmt: skip

QK_NORM_ROPE = Operator(Contract(
    name="qk_norm_rope",
    args=(Arg("q", "BTHD"), Arg("k", "BTGD"), Arg("q_weight", "D", near_one), Arg("k_weight", "D", near_one),
        *_ANGLES),
    results=(Arg("q_out", "BTHD"), Arg("k_out", "BTGD")), scalars={"eps": 1e-6, "interleaved": False},
    rules=(*_rules(4), Rule("eps above 0", lambda *v: 0 < v[-2] < math.inf, ({"eps": 0.0}, {"eps": math.nan}))),
    reference=_norm_rope_reference, autograd=recomputed(_norm_rope_reference), sink=("q_normed", "k_normed"),
    sizes=_SIZES, forward=rounded(3e-5, 3e-5, times=3, wide=2e-2), backward=rounded(1e-4, 1e-4, times=3, wide=6e-2), traffic=_traffic,
    num_flops=lambda s: 7 * (numel(s, "BTHD") + numel(s, "BTGD")),
))  # fmt: skip

OPERATORS = (ROPE, QK_NORM_ROPE)
