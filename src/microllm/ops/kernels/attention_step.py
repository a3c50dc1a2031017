"""A decode step's attention in one launch: ``attention_decode`` that turns its queries and stores its own keys first.

Whoever walks the block in which a new token lies puts its key and value there in registers, and one program writes them
to the page, which nobody reads again in this launch. What earlier steps stored is on its way before the kernel waits
for the queries: only they, and the new token, come from the launch ahead. Nothing else may write pages in between.

Axes:    A = rows, T = queries a row, H = query heads, G = KV heads, R = H / G, D = head dim, P = pairs of a head;
         S = slots a page
Bytes:   those of ``attention_decode``, and q, k, v once for each split
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Out, Outs
from microllm.ops.kernels.attention_decode import (
    MAX_ROWS,
    NUM_PROGRAMS,
    TILE,
    blocks,
    hand_in,
    join,
    num_warps,
    splits_of,
)
from microllm.ops.kernels.fp8 import decode_e4m3, encode_e4m3
from microllm.ops.kernels.launch import Compiled, overlapping, pdl, scratch, stream_of, zeros
from microllm.ops.kernels.pages import MAX_D, alike, as_stored, takes_fp32, weigh, write
from microllm.ops.target import target_of


@triton.jit
def _angles(cos_ptr, sin_ptr, angle_stride, position, ok, C, P: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return what rows at some positions are multiplied by, and their partners: [rows, BLOCK_D] each."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = tl.minimum(tl.maximum(position, 0), C - 1)[:, None] * angle_stride + d % P
    turns = ok[:, None] & (d < 2 * P)
    sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
    return tl.load(cos_ptr + at, mask=turns, other=1.0), tl.where(d < P, -sin, sin)


@triton.jit
def _gain(weight_ptr, D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr):
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
def _turned(
    x_ptr, at, ok, cos, sin, w, w_other, NORMED: tl.constexpr, EPS: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return rows of x [rows, BLOCK_D], normed where told, turned by their angles, rounded."""
    d = tl.arange(0, BLOCK_D)[None, :]
    there = ok[:, None] & (d < D)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + at[:, None] + d, mask=there, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + at[:, None] + _partner(d, P), mask=there, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / D) + EPS)[:, None]
        x = ((x * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * w_other).to(dtype).to(tl.float32)
    return (x * cos + y * sin).to(dtype)


@triton.jit
def _keys(k_ptr, v_ptr, page_row, start, end, page_stride, slot_stride, S: tl.constexpr, D: tl.constexpr,
          BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return the stored bytes of the keys and values from ``start`` on, as they are; zero from ``end`` on."""
    key, d = start + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    stored = key < end
    page = tl.load(page_row + key // S, mask=stored, other=0).to(tl.int64)
    at = (page * page_stride + (key % S) * slot_stride)[:, None] + d[None, :]
    ok = stored[:, None] & (d < D)[None, :]
    return tl.load(k_ptr + at, mask=ok, other=0.0), tl.load(v_ptr + at, mask=ok, other=0.0)


@triton.jit
def _plain(raw, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Return what stored bytes stand for."""
    if FORMAT > 0:
        raw = decode_e4m3(raw, FORMAT == 2)
    return raw.to(tl.float32).to(dtype)


@triton.jit
def _stored(x, like_ptr, FORMAT: tl.constexpr):
    """Return x as pages hold it."""
    if FORMAT > 0:
        return encode_e4m3(x.to(tl.float32), FORMAT == 2)
    else:
        return x.to(tl.float32).to(like_ptr.dtype.element_ty)


@triton.jit
def _row(x, i, BLOCK_T: tl.constexpr):
    """Return row i of x [BLOCK_T, BLOCK_D] as [1, BLOCK_D]."""
    if BLOCK_T > 1:
        picked = (tl.arange(0, BLOCK_T) == i)[:, None]
        x = tl.sum(tl.where(picked, x.to(tl.float32), 0.0), 0)[None, :].to(x.dtype)
    return x


@triton.jit
def _attend(q, k, v, start, end, last, best, total, context, SCALE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return maximum, sum and context of the query rows with a block of keys joined."""
    key = start + tl.arange(0, BLOCK_K)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
    visible = (key < end)[None, :] & (key[None, :] <= last[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights, keep = tl.exp(scores - shift[:, None]), tl.exp(best - shift)
    return higher, total * keep + tl.sum(weights, 1), weigh(weights, v, context * keep[:, None])


@triton.jit(do_not_specialize=["A", "T", "C", "max_splits"])
def attention_step_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_pages, v_pages, table_ptr, positions_ptr, q_weight, k_weight, out_ptr,
    parts_ptr, sums_ptr, done_ptr, A, T, C, max_splits,
    q_row, q_token, q_head, k_row, k_token, k_head, page_stride, slot_stride, group_stride, table_stride,
    positions_stride, angle_stride, out_row, out_token, out_head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SPLIT: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr, FORMAT: tl.constexpr, FP32: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take turns at all splits of all rows; grid (any number of programs,). ``done`` is 0 before and after.

    Parts:   as ``attention_decode_kernel``'s
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = tl.float32 if FP32 else q_ptr.dtype.element_ty
    rows, new, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)[None, :]
    lengths, counts = splits_of(positions_ptr, positions_stride, A, T, SPLIT, BLOCK_A, BLOCK_T)
    ends = tl.cumsum(counts, 0)
    lanes, num_rows = (T * R + 15) // 16 * G, tl.minimum(T * R, 16)
    num_items = tl.sum(counts, 0) * lanes
    item = tl.program_id(0)
    while item < num_items:
        turn, lane = item // lanes, item % lanes
        a = tl.sum((ends <= turn).to(tl.int32), 0).to(tl.int64)
        split = turn - tl.sum(tl.where(ends <= turn, counts, 0), 0)
        num_splits, length = tl.sum(tl.where(rows == a, counts, 0), 0), tl.sum(tl.where(rows == a, lengths, 0), 0)
        g, row = lane % G, lane // G * 16 + tl.arange(0, 16)
        t, h = row // R, g * R + row % R
        last = tl.load(positions_ptr + a * positions_stride + t, mask=t < T, other=-1).to(tl.int32)
        position = tl.load(positions_ptr + a * positions_stride + new, mask=new < T, other=-1).to(tl.int32)
        begin, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length)
        mine = (position >= begin) & (position < end)
        page_row = table_ptr + a * table_stride
        k_own, v_own = k_pages + g * group_stride, v_pages + g * group_stride
        k_raw, v_raw = _keys(k_own, v_own, page_row, begin, end, page_stride, slot_stride, S, D, BLOCK_D, BLOCK_K)
        page = tl.load(page_row + position // S, mask=mine, other=0).to(tl.int64)
        slot = (page * page_stride + (position % S) * slot_stride)[:, None] + d
        q_cos, q_sin = _angles(cos_ptr, sin_ptr, angle_stride, last, t < T, C, P, BLOCK_D)
        k_cos, k_sin = _angles(cos_ptr, sin_ptr, angle_stride, position, mine, C, P, BLOCK_D)
        q_gain, q_other = _gain(q_weight, D, P, BLOCK_D)
        k_gain, k_other = _gain(k_weight, D, P, BLOCK_D)
        if PDL:
            tl.extra.cuda.gdc_wait()  # what this step makes is read from here on; the wait is over after the first turn
        at = a * k_row + new * k_token + g * k_head
        there = mine[:, None] & (d < D)
        q = _turned(
            q_ptr, a * q_row + t * q_token + h * q_head, t < T, q_cos, q_sin, q_gain, q_other, q_weight is not None,
            EPS, D, P, BLOCK_D,
        ).to(dtype)  # fmt: skip
        k_new = _turned(
            k_ptr, at, mine, k_cos, k_sin, k_gain, k_other, k_weight is not None, EPS, D, P, BLOCK_D
        )  # fmt: skip
        k_new = _stored(k_new, k_pages, FORMAT)
        v_new = _stored(tl.load(v_ptr + at[:, None] + d, mask=there, other=0.0), v_pages, FORMAT)
        tl.store(k_own + slot, k_new, mask=there & (lane < G))
        tl.store(v_own + slot, v_new, mask=there & (lane < G))
        best = tl.full([16], float("-inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        context = tl.zeros([16, BLOCK_D], tl.float32)
        for start in range(begin, end, BLOCK_K):
            k, v = _plain(k_raw, FORMAT, dtype), _plain(v_raw, FORMAT, dtype)
            if SPLIT > BLOCK_K:
                k_raw, v_raw = _keys(
                    k_own, v_own, page_row, start + BLOCK_K, end, page_stride, slot_stride, S, D, BLOCK_D, BLOCK_K
                )
            key = start + tl.arange(0, BLOCK_K)
            for i in range(0, 1 if BLOCK_T == 1 else T):
                here = key == tl.load(positions_ptr + a * positions_stride + i).to(tl.int32)
                k = tl.where(here[:, None], _plain(_row(k_new, i, BLOCK_T), FORMAT, dtype), k)
                v = tl.where(here[:, None], _plain(_row(v_new, i, BLOCK_T), FORMAT, dtype), v)
            best, total, context = _attend(q, k, v, start, end, last, best, total, context, SCALE, BLOCK_K)
        out, out_at = out_ptr + a * out_row, t * out_token + h * out_head
        if num_splits == 1:
            write(out, out_at, t < T, context, total, D, BLOCK_D)
        else:
            done, first = done_ptr + a * lanes + lane, (a * lanes + lane) * max_splits * num_rows
            parts, sums = parts_ptr + first * BLOCK_D, sums_ptr + first * 2
            if hand_in(parts, sums, done, split, num_splits, num_rows, t < T, best, total, context, 16, BLOCK_D):
                whole, joined = join(parts, sums, num_splits, num_rows, t < T, 16, BLOCK_D, AHEAD)
                write(out, out_at, t < T, joined, whole, D, BLOCK_D)
                tl.store(done, 0)
        item += tl.num_programs(0)


def suits(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, *_: object
) -> tuple[bool, str]:
    """Say whether heads and rows are of a size that the kernel takes, and k's offsets are v's."""
    if not (alike(k, v) and alike(k_pages, v_pages) and alike(cos, sin)):
        return False, "k and v, their pages, or cos and sin lie differently"
    fits = q.shape[3] <= MAX_D and q.shape[0] <= MAX_ROWS and cos.shape[1] > 0
    return fits, f"keys read once a group; heads up to {MAX_D} with a pair or more, at most {MAX_ROWS} rows"


def run(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    positions: Tensor, q_weight: Out, k_weight: Out, scale: float, eps: float, split: int, *, out: Outs = None,
) -> Tensor:  # fmt: skip
    """Run ``attention_step``."""
    A, T, H, D = q.shape
    S, G = k_pages.shape[1:3]
    context = q.new_empty(q.shape) if out is None else out[0]
    if not q.numel():
        return context
    (k_pages, form), (v_pages, _) = (as_stored(pages, target_of(q.device)) for pages in (k_pages, v_pages))
    fp32, overlap, stream = takes_fp32(q, k_pages), pdl(q.device), stream_of(q)
    sizes = _blocks(D, split, fp32=fp32, fp8=k_pages.dtype.itemsize == 1)
    lanes = A * G * triton.cdiv(T * H // G, TILE)
    max_splits = max(1, triton.cdiv(page_table.shape[1] * S, split))
    part_rows = triton.next_power_of_2(lanes * max_splits * min(TILE, T * H // G)) if max_splits > 1 else 1
    parts = scratch(q.device, stream, "attention_decode", part_rows * sizes["BLOCK_D"])
    sums = scratch(q.device, stream, "attention_decode_sums", part_rows * 2)
    done = zeros(q.device, stream, triton.next_power_of_2(lanes))
    attention_step_kernel[(min(lanes * max_splits, NUM_PROGRAMS),)](
        q, k, v, cos, sin, k_pages, v_pages, page_table, positions, q_weight, k_weight, context, parts, sums, done,
        A, T, cos.shape[0], max_splits, *q.stride()[:3], *k.stride()[:3], *k_pages.stride()[:3], page_table.stride(0),
        positions.stride(0), cos.stride(0), *context.stride()[:3],
        G=G, R=H // G, D=D, P=cos.shape[1], S=S, SPLIT=split, SCALE=scale, EPS=eps,
        FORMAT=form, FP32=fp32, BLOCK_A=triton.next_power_of_2(A), BLOCK_T=triton.next_power_of_2(T), **sizes,
        PDL=overlap, num_warps=num_warps(sizes), num_stages=2, **overlapping(overlap),
    )  # fmt: skip
    return context


def _blocks(D: int, split: int, *, fp32: bool, fp8: bool) -> dict[str, int]:
    """Return ``attention_decode``'s blocks, and more parts on their way when joined: splits are short here."""
    sizes = blocks(D, split, fp32=fp32, fp8=fp8)
    return sizes | {"AHEAD": max(2, min(8, (256 if fp32 else 512) // sizes["BLOCK_D"]))}


def _compiled() -> tuple[Compiled, ...]:
    strides = ("q_row", "q_token", "q_head", "k_row", "k_token", "k_head", "page_stride", "slot_stride")
    numbers = dict.fromkeys((*strides, "group_stride", "out_row", "out_token", "out_head"), "i32:16")
    plain = ("A", "T", "C", "max_splits", "table_stride", "positions_stride", "angle_stride")
    numbers |= dict.fromkeys(plain, "i32")
    given = {"table_ptr": "*i32", "positions_ptr": "*i64", "done_ptr": "*i32"}
    given |= dict.fromkeys(("parts_ptr", "sums_ptr", "cos_ptr", "sin_ptr"), "*fp32")
    cases = []
    for G, R, D, rows, queries, normed, pages, form in (
        (2, 7, 64, 1, 1, False, "*bf16", 0), (8, 2, 128, 64, 1, True, "*bf16", 0), (2, 6, 128, 1, 8, False, "*bf16", 0),
        (8, 2, 128, 8, 1, True, "*u8", 1), (3, 3, 64, 256, 1, False, "*bf16", 0),
    ):  # fmt: skip
        sizes = _blocks(D, 64, fp32=False, fp8="8" in pages)
        heads = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
        heads |= dict.fromkeys(("q_weight", "k_weight") if normed else (), "*bf16")
        absent = {} if normed else {"q_weight": None, "k_weight": None}
        signature = heads | {"k_pages": pages, "v_pages": pages} | given | numbers
        fixed = {"G": G, "R": R, "D": D, "P": D // 2, "S": 16, "SPLIT": 64, "SCALE": D**-0.5, "EPS": 1e-6} | absent
        fixed |= {"FORMAT": form, "FP32": False, "BLOCK_A": rows, "BLOCK_T": queries, "PDL": True, **sizes}
        cases.append(Compiled(attention_step_kernel, signature, fixed, num_warps(sizes), 2, ("pdl",)))
    return tuple(cases)


COMPILED = _compiled()
