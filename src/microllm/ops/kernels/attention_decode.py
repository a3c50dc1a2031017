"""Attention of a few queries a row over pages: one launch, every key and value read once for all heads of its group.

A row's keys are cut into splits of a fixed size. Programs stay and take turns at the splits that the rows really have,
whose list follows from the positions on the device: a captured launch costs the same at any length. Who ends the last
split of a row joins them all, in their order. Up to 16 query rows (heads of a group, then tokens) make a tile, which
never changes its shape: a query's bits depend neither on the other rows, nor on the other queries, nor on who joins.

Axes:    A = rows, T = queries a row, H = query heads, G = KV heads, R = H / G, D = head dim; S = slots a page
Bytes:   the keys and values up to each row's last position, once for each 16 of a row's T * R query rows
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Outs, Sink
from microllm.ops.kernels.launch import Compiled, overlapping, pdl, scratch, stream_of, zeros
from microllm.ops.kernels.pages import MAX_D, alike, as_stored, padded, takes_fp32, walk, write
from microllm.ops.target import target_of

MAX_ROWS = 1024
"""Most rows of a call: each program counts the splits of all of them."""
TILE = 16
"""Query rows of a tile: what the smallest matrix instruction takes."""
NUM_PROGRAMS = 528
"""Most programs of a launch: four for each of the 132 multiprocessors of an H200."""


@triton.jit
def splits_of(positions_ptr, positions_stride, A, T, SPLIT: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return, for each row, its length and how many splits it has: one at least, which writes an idle row's zeros."""
    a, t = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_T)
    at = a.to(tl.int64)[:, None] * positions_stride + t[None, :]
    positions = tl.load(positions_ptr + at, mask=(a < A)[:, None] & (t < T)[None, :], other=-1)
    lengths = tl.max(positions.to(tl.int32), 1) + 1
    return lengths, tl.where(a < A, tl.maximum((lengths + SPLIT - 1) // SPLIT, 1), 0)


@triton.jit
def join(parts, sums, num_splits, num_rows, there, M: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr):
    """Return the joined total and context of a tile's splits, one by one in their order, AHEAD of them in flight."""
    row, d = tl.arange(0, M), tl.arange(0, BLOCK_D)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    context = tl.zeros([M, BLOCK_D], tl.float32)
    for start in range(0, num_splits, AHEAD):
        found = ()
        for i in tl.static_range(AHEAD):
            ok = (start + i < num_splits) & there
            at = (start + i) * num_rows + row
            higher = tl.load(sums + at * 2, mask=ok, other=float("-inf"))
            more = tl.load(sums + at * 2 + 1, mask=ok, other=0.0)
            part = tl.load(parts + at[:, None] * BLOCK_D + d[None, :], mask=ok[:, None], other=0.0)
            found = found + ((higher, more, part),)  # noqa: RUF005 - Triton has no starred tuples
        for i in tl.static_range(AHEAD):
            higher = tl.maximum(best, found[i][0])
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            keep, weight = tl.exp(best - shift), tl.exp(found[i][0] - shift)
            total = total * keep + found[i][1] * weight
            context = context * keep[:, None] + found[i][2] * weight[:, None]
            best = higher
    return total, context


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


@triton.jit(do_not_specialize=["A", "T", "max_splits"])
def attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, out_ptr, scores_ptr, parts_ptr, sums_ptr, done_ptr, A, T, max_splits,
    q_row, q_token, q_head, page_stride, slot_stride, group_stride, table_stride, positions_stride,
    out_row, out_token, out_head, scores_head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, SPLIT: tl.constexpr, SCALE: tl.constexpr,
    FORMAT: tl.constexpr, FP32: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take turns at all splits of all rows; grid (any number of programs,). ``done`` is 0 before and after.

    Parts:   with Q = min(16, T * R): parts [A, tiles, G, max_splits, Q, BLOCK_D], sums [.., Q, 2]: maximum, total
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = tl.float32 if FP32 else q_ptr.dtype.element_ty
    rows, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_D)
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
        ok = (t < T)[:, None] & (d < D)[None, :]
        last = tl.load(positions_ptr + a * positions_stride + t, mask=t < T, other=-1).to(tl.int32)
        q_at = a * q_row + t[:, None] * q_token + h[:, None] * q_head + d[None, :]
        q = tl.load(q_ptr + q_at, mask=ok, other=0.0).to(dtype)
        best, total, context = walk(
            q, k_ptr + g * group_stride, v_ptr + g * group_stride, scores_ptr, table_ptr + a * table_stride,
            ((a * G * R + h) * T + t) * scores_head, last, split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length),
            page_stride, slot_stride, S, D, SCALE, FORMAT, 16, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        out = out_ptr + a * out_row
        out_at = t * out_token + h * out_head
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


def suits(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether heads and rows are of a size that the kernel takes, and k's offsets are v's."""
    if not alike(k_pages, v_pages):
        return False, "k_pages and v_pages lie differently"
    fits = q.shape[3] <= MAX_D and q.shape[0] <= MAX_ROWS
    return fits, f"keys read once a group; heads up to {MAX_D}, at most {MAX_ROWS} rows"


def run(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, positions: Tensor, scale: float, split: int,
    *, out: Outs = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Run ``attention_decode``."""
    A, T, H, D = q.shape
    S, G = k_pages.shape[1:3]
    context = q.new_empty(q.shape) if out is None else out[0]
    max_keys = page_table.shape[1] * S
    scores = None if sink is None else q.new_full((A, H, T, max_keys), float("-inf"), dtype=torch.float32)
    if sink is not None and scores is not None:
        sink.update(scores=scores)
    if not q.numel():
        return context
    (k_pages, form), (v_pages, _) = (as_stored(pages, target_of(q.device)) for pages in (k_pages, v_pages))
    fp32, overlap, stream = takes_fp32(q, k_pages), pdl(q.device), stream_of(q)
    sizes = blocks(D, split, fp32=fp32, fp8=k_pages.dtype.itemsize == 1)
    lanes, max_splits = A * G * triton.cdiv(T * H // G, TILE), max(1, triton.cdiv(max_keys, split))
    part_rows = triton.next_power_of_2(lanes * max_splits * min(TILE, T * H // G)) if max_splits > 1 else 1
    parts = scratch(q.device, stream, "attention_decode", part_rows * sizes["BLOCK_D"])
    sums = scratch(q.device, stream, "attention_decode_sums", part_rows * 2)
    done = zeros(q.device, stream, triton.next_power_of_2(lanes))
    attention_decode_kernel[(min(lanes * max_splits, NUM_PROGRAMS),)](
        q, k_pages, v_pages, page_table, positions, context, scores, parts, sums, done, A, T, max_splits,
        *q.stride()[:3], *k_pages.stride()[:3], page_table.stride(0), positions.stride(0), *context.stride()[:3],
        max_keys, G=G, R=H // G, D=D, S=S, SPLIT=split, SCALE=scale, FORMAT=form, FP32=fp32,
        BLOCK_A=triton.next_power_of_2(A), BLOCK_T=triton.next_power_of_2(T), **sizes, PDL=overlap,
        num_warps=num_warps(sizes), num_stages=2, **overlapping(overlap),
    )  # fmt: skip
    return context


def blocks(D: int, split: int, *, fp32: bool, fp8: bool) -> dict[str, int]:
    """Return what of a launch decides a query's bits, by head, split and dtypes alone."""
    width = padded(D)
    keys = 32 if fp32 or fp8 or width > 128 else 64
    return {"BLOCK_D": width, "BLOCK_K": min(keys, padded(split)), "AHEAD": 2 if fp32 else 4}


def num_warps(sizes: dict[str, int]) -> int:
    """Return how many warps hold a block of keys without spilling."""
    return 8 if sizes["BLOCK_K"] * sizes["BLOCK_D"] > 4096 else 4


def _compiled() -> tuple[Compiled, ...]:
    strides = ("q_row", "q_token", "q_head", "page_stride", "slot_stride", "group_stride", "out_row", "out_token")
    numbers = dict.fromkeys((*strides, "out_head", "scores_head"), "i32:16")
    numbers |= dict.fromkeys(("A", "T", "max_splits", "table_stride", "positions_stride"), "i32")
    given = {"table_ptr": "*i32", "positions_ptr": "*i64", "done_ptr": "*i32"}
    given |= {"parts_ptr": "*fp32", "sums_ptr": "*fp32"}
    cases = []
    for G, R, D, rows, queries, q, pages, form in (
        (2, 7, 64, 1, 1, "*bf16", "*bf16", 0), (8, 2, 128, 64, 1, "*bf16", "*bf16", 0),
        (2, 6, 128, 1, 8, "*bf16", "*bf16", 0), (3, 3, 64, 256, 1, "*fp32", "*fp32", 0),
        (8, 2, 128, 8, 1, "*bf16", "*u8", 1), (8, 2, 128, 8, 1, "*bf16", "*u8", 2),
        (8, 2, 128, 8, 1, "*bf16", "*fp8e4nv", 0), (8, 2, 128, 8, 1, "*bf16", "*fp8e4b8", 0),
    ):  # fmt: skip
        fp32, sizes = q == "*fp32", blocks(D, 256, fp32=q == "*fp32", fp8="8" in pages)
        signature = {"q_ptr": q, "k_ptr": pages, "v_ptr": pages, "out_ptr": q} | given | numbers
        fixed = {"G": G, "R": R, "D": D, "S": 16, "SPLIT": 256, "SCALE": D**-0.5, "FORMAT": form, "FP32": fp32}
        fixed |= {"BLOCK_A": rows, "BLOCK_T": queries, "scores_ptr": None, "PDL": True, **sizes}
        uses = ("pdl", "fp8") if "fp8" in pages else ("pdl",)
        cases.append(Compiled(attention_decode_kernel, signature, fixed, num_warps(sizes), 2, uses))
    return tuple(cases)


COMPILED = _compiled()
