"""Attention of a decode step in one piece: heads normed and turned, new keys and values stored, then attended to.

It is ``qk_norm_rope`` (or ``rope``), ``kv_store_paged`` and ``attention_decode`` one after the other, as one launch.

Axes:    A = rows, T = queries a row, H = query heads, G = KV heads, D = head dim, C = context, R = pairs of a head,
         P = pages, S = slots a page, N = pages a row
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from microllm.ops.attention_paged import attention_reference, draw_run
from microllm.ops.contract import (
    FP32,
    INT64,
    TRITON,
    Arg,
    Contract,
    Out,
    Rule,
    between,
    cases,
    near_one,
    numel,
    rounded,
)
from microllm.ops.kv_store import TABLE, page_rules, pages, store_reference
from microllm.ops.operator import Operator
from microllm.ops.rms_norm import norm_reference
from microllm.ops.rope import rope_reference


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    positions: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, *, scale: float,
    eps: float = 1e-6, split: int = 256, out: Out = None,
) -> Tensor:  # fmt: skip
    """Turn q and k by their positions' angles, store k and v in the pages in place, and return q's attention.

    With weights, each head of q and k is normed first. A position of -1 is no token: it is not stored, its result is 0.

    Shapes:  q [A, T, H, D], k and v [A, T, G, D], cos and sin fp32 [C, R], pages [P, S, G, D], page_table [A, N] int32,
             positions [A, T] int64, weights [D] or None -> [A, T, H, D]
    Numbers: as the operators that it is made of, rounded where they round
    Raises:
        OperatorError: as those, or one weight is given and not the other.
    """
    return ATTENTION_STEP(
        q, k, v, cos, sin, k_pages, v_pages, page_table, positions, q_weight, k_weight, scale, eps, split, out=out
    )


def _reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    positions: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, scale: float, eps: float, split: int,
) -> Tensor:  # fmt: skip
    if q_weight is not None and k_weight is not None:
        q, k = norm_reference(q, q_weight, eps), norm_reference(k, k_weight, eps)
    q, k = rope_reference(q, k, cos, sin, positions.clamp(min=0), False, False)
    store_reference(k_pages, v_pages, k, v, page_table, positions)
    return attention_reference(q, k_pages, v_pages, page_table, positions, scale, split)


def _context_holds(*v: Any) -> bool:
    return not v[8].numel() or int(v[8].max()) < v[3].shape[0]


_RULES = (
    Rule("H a multiple of G", lambda q, k, *_: q.shape[2] % k.shape[2] == 0, ({"q": lambda c: c["q"][:, :, :-1]},)),
    Rule("2 R at most D", lambda *v: 2 * v[3].shape[1] <= v[0].shape[3],
         ({"cos": lambda c: c["cos"].repeat(1, 9), "sin": lambda c: c["sin"].repeat(1, 9)},)),
    Rule("both weights or none", lambda *v: (v[9] is None) == (v[10] is None), ({"q_weight": None},)),
    Rule("scale and eps above 0", lambda *v: v[11] > 0 and v[12] > 0, ({"scale": 0.0}, {"eps": 0.0})),
    Rule("split a multiple of S", lambda *v: v[13] >= 0 and v[13] % v[5].shape[1] == 0,
         ({"split": -32}, {"split": 10})),
    Rule("T at most 8", lambda q, *_: q.shape[1] <= 8,
         ({name: (lambda c, name=name: c[name].repeat(1, 9, *[1] * (c[name].dim() - 2)))
           for name in ("q", "k", "v", "positions")},)),
    Rule("positions below C", _context_holds, ({name: (lambda c, name=name: c[name][:1]) for name in ("cos", "sin")},),
         by_value=True),
    *page_rules(5, 7),
)  # fmt: skip
_ANGLE = Arg("cos", "CR", between(-1, 1), FP32)

ATTENTION_STEP = Operator(Contract(
    name="attention_step", args=(
        Arg("q", "ATHD"), Arg("k", "ATGD"), Arg("v", "ATGD"), _ANGLE, Arg("sin", "CR", between(-1, 1), FP32),
        pages("k_pages", mutated=True), pages("v_pages", mutated=True), TABLE, Arg("positions", "AT", draw_run, INT64),
        Arg("q_weight", "D", near_one, optional=True), Arg("k_weight", "D", near_one, optional=True),
    ),
    results=(Arg("context", "ATHD"),), scalars={"scale": 0.125, "eps": 1e-6, "split": 32}, rules=_RULES,
    reference=_reference, levels=TRITON, invariant=("reference", "triton"),
    forward=rounded(3e-5, 3e-5, times=3, wide=2e-2),
    sizes=cases(
        "A3 T2 H6 G2 D64 C144 R32 P40 S16 N9", "A1 T1 H1 G1 D4 C16 R2 P2 S8 N2", "A5 T1 H8 G4 D32 C68 R12 P99 S4 N17",
        "A2 T8 H6 G2 D32 C144 R16 P40 S16 N9",
    ),
    traffic=lambda s, item: 2 * item * (numel(s, "ATHD") + numel(s, "ATGD") + s["A"] * s["N"] * numel(s, "SGD")),
    num_flops=lambda s: 4 * numel(s, "ATHD") * s["N"] * s["S"],
))  # fmt: skip
