"""The pieces of attention over pages, on the device: splits, queries and new keys turned, a block joined, parts joined.

Place: ``attention_decode``'s kernel is put together from them. Holds no kernel.

Axes:    rows = heads of a group, then tokens; D = head dim, P = pairs of a head, S = slots a page
"""

from __future__ import annotations

import triton
import triton.language as tl

from microllm.ops.kernels.fp8 import decode_e4m3, encode_e4m3
from microllm.ops.kernels.pages import attend


@triton.jit
def splits_of(positions_ptr, positions_stride, A, T, lanes, SPLIT: tl.constexpr, BLOCK_A: tl.constexpr,
              BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return, for each row, its length, the keys of a split and how many splits it has.

    A row has one at least, which writes an idle row's zeros. SPLIT 0: each row has its share of the launch's programs,
    rounded down, so that all splits run at once where there are no more rows than programs.
    """
    a, t = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_T)
    at = a.to(tl.int64)[:, None] * positions_stride + t[None, :]
    positions = tl.load(positions_ptr + at, mask=(a < A)[:, None] & (t < T)[None, :], other=-1)
    lengths = tl.max(positions.to(tl.int32), 1) + 1
    if SPLIT > 0:
        spans = tl.full([BLOCK_A], SPLIT, tl.int32)
    else:
        blocks = (lengths + BLOCK_K - 1) // BLOCK_K
        share = tl.num_programs(0) // lanes * blocks // tl.maximum(tl.sum(blocks, 0), 1)
        share = tl.maximum(share, 1)
        spans = tl.maximum((blocks + share - 1) // share, 1) * BLOCK_K
    return lengths, spans, tl.where(a < A, tl.maximum((lengths + spans - 1) // spans, 1), 0)


@triton.jit
def join(parts, sums, num_splits, num_rows, there, Q: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr):
    """Return the joined total [Q] and context [Q, BLOCK_D] of a tile's splits, each of ``num_rows`` rows.

    They are added one by one in their order, AHEAD of them in flight, by the largest maximum of all: neither Q nor
    AHEAD changes a bit.
    """
    q, d = tl.arange(0, Q), tl.arange(0, BLOCK_D)
    best = tl.full([Q], float("-inf"), tl.float32)
    for start in range(0, num_splits, 32):
        part = start + tl.arange(0, 32)[:, None]
        ok = (part < num_splits) & there[None, :]
        best = tl.maximum(best, tl.max(tl.load(sums + (part * num_rows + q) * 2, mask=ok, other=float("-inf")), 0))
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros([Q], tl.float32)
    context = tl.zeros([Q, BLOCK_D], tl.float32)
    for start in range(0, num_splits, AHEAD):
        found = ()
        for i in tl.static_range(AHEAD):
            ok = (start + i < num_splits) & there
            at = (start + i) * num_rows + q
            highest = tl.load(sums + at * 2, mask=ok, other=float("-inf"))
            more = tl.load(sums + at * 2 + 1, mask=ok, other=0.0)
            context_of = tl.load(parts + at[:, None] * BLOCK_D + d[None, :], mask=ok[:, None], other=0.0)
            found = found + ((highest, more, context_of),)  # noqa: RUF005 - Triton has no starred tuples
        for i in tl.static_range(AHEAD):
            weight = tl.exp(found[i][0] - shift)
            total += found[i][1] * weight
            context += found[i][2] * weight[:, None]
    return total, context


@triton.jit
def walk_early(
    q, k_raw, v_raw, k_new, v_new, k_own, v_own, page_row, positions, begin, end, T, last, scores_ptr,
    scores_at, page_stride, slot_stride, S: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SCALE: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Return maximum, sum and context over the keys from ``begin`` on, whose first block is in registers already.

    New tokens are put in their places there. ONE: there is one block.
    """
    best = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    context = tl.zeros([16, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_K):
        k, v = plain(k_raw, FORMAT, q.dtype), plain(v_raw, FORMAT, q.dtype)
        if not ONE:
            k_raw, v_raw = keys_of(
                k_own, v_own, page_row, start + BLOCK_K, end, page_stride, slot_stride, S, D, BLOCK_D, BLOCK_K
            )
        key = start + tl.arange(0, BLOCK_K)
        if P > 0:
            for i in range(1 if BLOCK_T == 1 else T):
                here = key == tl.load(positions + i).to(tl.int32)
                k = tl.where(here[:, None], plain(row_of(k_new, i, BLOCK_T), FORMAT, q.dtype), k)
                v = tl.where(here[:, None], plain(row_of(v_new, i, BLOCK_T), FORMAT, q.dtype), v)
        best, total, context = attend(
            q, k, v, start, end, last, scores_ptr, scores_at, best, total, context, SCALE, BLOCK_K
        )
    return best, total, context


@triton.jit
def hand_in(
    parts, sums, done, split, num_splits, num_rows, there, best, total, context, M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Store a split's part and say so; return whether it was the last one, whose program joins them all."""
    at = split * num_rows + tl.arange(0, M)
    tl.store(sums + at * 2, best, mask=there)
    tl.store(sums + at * 2 + 1, total, mask=there)
    tl.store(parts + at[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], context, mask=there[:, None])
    tl.debug_barrier()  # every thread's part before the one that tells the others
    return tl.atomic_add(done, 1, sem="acq_rel") == num_splits - 1


@triton.jit
def angles_of(cos_ptr, sin_ptr, angle_stride, position, ok, C, P: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return what rows at some positions are multiplied by, and their partners: [rows, BLOCK_D] each."""
    d = tl.arange(0, BLOCK_D)[None, :]
    cos = tl.full([position.shape[0], BLOCK_D], 1.0, tl.float32)
    sin = cos
    if P > 0:
        at = tl.minimum(tl.maximum(position, 0), C - 1)[:, None] * angle_stride + d % P
        turns = ok[:, None] & (d < 2 * P)
        cos = tl.load(cos_ptr + at, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
        sin = tl.where(d < P, -sin, sin)
    return cos, sin


@triton.jit
def gain_of(weight_ptr, D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a norm's weight in fp32, as it is and partner by partner; ones where there is none."""
    d = tl.arange(0, BLOCK_D)
    w = tl.full([BLOCK_D], 1.0, tl.float32)
    other = w
    if weight_ptr is not None:
        w = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        other = tl.load(weight_ptr + _partner(d, P), mask=d < D, other=0.0).to(tl.float32)
    return w[None, :], other[None, :]


@triton.jit
def _partner(d, P: tl.constexpr):
    return tl.where(d < P, d + P, tl.where(d < 2 * P, d - P, d))


@triton.jit
def turned(
    x_ptr, at, ok, cos, sin, w, w_other, NORMED: tl.constexpr, EPS: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return rows of x [rows, BLOCK_D], normed where told, turned by their angles where P is not 0, rounded."""
    d = tl.arange(0, BLOCK_D)[None, :]
    there = ok[:, None] & (d < D)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + at[:, None] + d, mask=there, other=0.0)
    if P > 0:
        x = _turn(x.to(tl.float32), x_ptr, at, there, cos, sin, w, w_other, NORMED, EPS, D, P, BLOCK_D)
    return x.to(dtype)


@triton.jit
def _turn(
    x, x_ptr, at, there, cos, sin, w, w_other, NORMED: tl.constexpr, EPS: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return x, normed and turned, unrounded."""
    d = tl.arange(0, BLOCK_D)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    y = tl.load(x_ptr + at[:, None] + _partner(d, P), mask=there, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / D) + EPS)[:, None]
        x = ((x * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * w_other).to(dtype).to(tl.float32)
    return x * cos + y * sin


@triton.jit
def keys_of(k_ptr, v_ptr, page_row, start, end, page_stride, slot_stride, S: tl.constexpr, D: tl.constexpr,
          BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return the stored bytes of the keys and values from ``start`` on, as they are; zero from ``end`` on."""
    key, d = start + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    stored = key < end
    page = tl.load(page_row + key // S, mask=stored, other=0).to(tl.int64)
    at = (page * page_stride + (key % S) * slot_stride)[:, None] + d[None, :]
    ok = stored[:, None] & (d < D)[None, :]
    return tl.load(k_ptr + at, mask=ok, other=0.0), tl.load(v_ptr + at, mask=ok, other=0.0)


@triton.jit
def plain(raw, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Return what stored bytes stand for."""
    if FORMAT > 0:
        raw = decode_e4m3(raw, FORMAT == 2)
    if raw.dtype == dtype:
        return raw
    else:
        return raw.to(tl.float32).to(dtype)


@triton.jit
def as_kept(x, like_ptr, FORMAT: tl.constexpr):
    """Return x as pages hold it."""
    if FORMAT > 0:
        return encode_e4m3(x.to(tl.float32), FORMAT == 2)
    else:
        return x.to(tl.float32).to(like_ptr.dtype.element_ty)


@triton.jit
def row_of(x, i, BLOCK_T: tl.constexpr):
    """Return row i of x [BLOCK_T, BLOCK_D] as [1, BLOCK_D]."""
    if BLOCK_T > 1:
        picked = (tl.arange(0, BLOCK_T) == i)[:, None]
        x = tl.sum(tl.where(picked, x.to(tl.float32), 0.0), 0)[None, :].to(x.dtype)
    return x
