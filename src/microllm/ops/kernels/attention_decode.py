"""Attention of a few queries a row over pages: one launch, every key and value read once for all heads of its group.

``attention_step`` is the same kernel with more before it: heads normed and turned, new keys and values stored.

A row's keys are cut into splits, of a fixed size or, with ``split`` 0, as long as leaves every program of the launch
one. Programs stay and take turns at the splits that the rows really have, whose list follows from the positions on the
device: a captured launch costs the same at any length. Who ends the last split of a row joins them all, in their order.
Up to 16 query rows (heads of a group, then tokens) make a tile, which never changes its shape: with a fixed size a
query's bits depend neither on the other rows, nor on the other queries, nor on who joins.

Of a fixed size, the first block of keys is on its way to registers before the kernel waits for the queries: only they
and the new token come from the launch ahead. Whoever walks the block in which a new token lies puts its key and value
there in registers, and one program writes them to the page, which nobody reads again in this launch. With ``split`` 0
blocks stream through shared memory instead, two on their way, and whoever walks a new token's block writes the token
first. Nothing else may write pages in between.

Axes:    A = rows, T = queries a row, H = query heads, G = KV heads, R = H / G, D = head dim, P = pairs of a head;
         S = slots a page
Bytes:   the keys and values up to each row's last position, once for each 16 of a row's T * R query rows
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.attention_paged import split_key
from microllm.ops.contract import Out, Outs, Sink
from microllm.ops.kernels.attention_parts import (
    angles_of,
    as_kept,
    gain_of,
    hand_in,
    join,
    keys_of,
    splits_of,
    turned,
    walk_early,
)
from microllm.ops.kernels.launch import Compiled, capped, overlapping, pdl, scratch, stream_of, zeros
from microllm.ops.kernels.pages import MAX_D, alike, as_stored, padded, takes_fp32, walk, write
from microllm.ops.target import MUCH_SHARED_BYTES, target_of
from microllm.ops.tuned import device_name, tuned

MAX_ROWS = 1024
"""Most rows of a call: each program counts the splits of all of them."""
TILE = 16
"""Query rows of a tile: what the smallest matrix instruction takes."""
NUM_PROGRAMS = 528
"""Most programs of a launch: four for each of the 132 multiprocessors of an H200."""
NUM_STREAMING = {64: 396, 128: 264}
"""Programs of a launch whose splits follow the load, by width of a head: as many as run at once."""
NUM_ROOMY, MAX_REGISTERS = 264, 168
"""Programs up to which each may have all the registers it wants; beyond, so many a thread, that three fit in one place.

Some words are spilled. Of the 0.5B's heads, 64 rows of 512 tokens took 18.4 us without streaming, 19.4 with two
programs in a place, 11.5 with three (H200).
"""


@triton.jit(do_not_specialize=["A", "T", "C", "max_splits"])
def attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_pages, v_pages, table_ptr, positions_ptr, q_weight, k_weight, out_ptr,
    scores_ptr, parts_ptr, sums_ptr, done_ptr, A, T, C, max_splits,
    q_row, q_token, q_head, k_row, k_token, k_head, page_stride, slot_stride, group_stride, table_stride,
    positions_stride, angle_stride, out_row, out_token, out_head, scores_head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SPLIT: tl.constexpr,
    SCALE: tl.constexpr, EPS: tl.constexpr, FORMAT: tl.constexpr, FP32: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, Q: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take turns at all splits of all rows; grid (any number of programs,). ``done`` is 0 before and after.

    Parts:   with Q = min(16, T * R): parts [A, tiles, G, max_splits, Q, BLOCK_D], sums [.., Q, 2]: maximum, total
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if P == 0:
            tl.extra.cuda.gdc_wait()  # the launch ahead may have stored the keys
    dtype: tl.constexpr = tl.float32 if FP32 else q_ptr.dtype.element_ty
    rows, new, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)[None, :]
    lanes, num_rows = (T * R + 15) // 16 * G, tl.minimum(T * R, 16)
    lengths, spans, counts = splits_of(positions_ptr, positions_stride, A, T, lanes, SPLIT, BLOCK_A, BLOCK_T, BLOCK_K)
    ends = tl.cumsum(counts, 0)
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
        span = tl.sum(tl.where(rows == a, spans, 0), 0)
        begin, end = split * span, tl.minimum(split * span + span, length)
        mine = (position >= begin) & (position < end)
        page_row, out = table_ptr + a * table_stride, out_ptr + a * out_row
        k_own, v_own = k_pages + g * group_stride, v_pages + g * group_stride
        k_raw, v_raw, k_new, v_new = None, None, None, None
        if STAGES == 1:
            k_raw, v_raw = keys_of(k_own, v_own, page_row, begin, end, page_stride, slot_stride, S, D, BLOCK_D, BLOCK_K)
        q_cos, q_sin = angles_of(cos_ptr, sin_ptr, angle_stride, last, t < T, C, P, BLOCK_D)
        q_gain, q_other = gain_of(q_weight, D, P, BLOCK_D)
        if P > 0:
            page = tl.load(page_row + position // S, mask=mine, other=0).to(tl.int64)
            slot = (page * page_stride + (position % S) * slot_stride)[:, None] + d
            k_cos, k_sin = angles_of(cos_ptr, sin_ptr, angle_stride, position, mine, C, P, BLOCK_D)
            k_gain, k_other = gain_of(k_weight, D, P, BLOCK_D)
            if PDL:
                tl.extra.cuda.gdc_wait()  # what this step makes is read from here on; over after the first turn
        q = turned(
            q_ptr, a * q_row + t * q_token + h * q_head, t < T, q_cos, q_sin, q_gain, q_other, q_weight is not None,
            EPS, D, P, BLOCK_D,
        ).to(dtype)  # fmt: skip
        if P > 0:
            at, there = a * k_row + new * k_token + g * k_head, mine[:, None] & (d < D)
            k_new = turned(k_ptr, at, mine, k_cos, k_sin, k_gain, k_other, k_weight is not None, EPS, D, P, BLOCK_D)
            k_new = as_kept(k_new, k_pages, FORMAT)
            v_new = as_kept(tl.load(v_ptr + at[:, None] + d, mask=there, other=0.0), v_pages, FORMAT)
            there &= (lane < G) | (STAGES > 1)  # each that reads them, all the same
            tl.store(k_own + slot, k_new, mask=there)
            tl.store(v_own + slot, v_new, mask=there)
        scores_at = ((a * G * R + h) * T + t) * scores_head
        if STAGES > 1:
            tl.debug_barrier()  # what was stored here is read here
            best, total, context = walk(
                q, k_own, v_own, scores_ptr, page_row, scores_at, last, begin, end, page_stride, slot_stride, S, D,
                SCALE, FORMAT, 16, BLOCK_D, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            best, total, context = walk_early(
                q, k_raw, v_raw, k_new, v_new, k_own, v_own, page_row, positions_ptr + a * positions_stride, begin,
                end, T, last, scores_ptr, scores_at, page_stride, slot_stride, S, D, P, SCALE, FORMAT, BLOCK_T,
                BLOCK_D, BLOCK_K, SPLIT == BLOCK_K,
            )  # fmt: skip
        if num_splits == 1:
            write(out, t * out_token + h * out_head, t < T, context, total, D, BLOCK_D)
        else:
            done, first = done_ptr + a * lanes + lane, (a * lanes + lane) * max_splits * num_rows
            parts, sums = parts_ptr + first * BLOCK_D, sums_ptr + first * 2
            if hand_in(parts, sums, done, split, num_splits, num_rows, t < T, best, total, context, 16, BLOCK_D):
                few = lane // G * 16 + tl.arange(0, Q)
                whole, joined = join(parts, sums, num_splits, num_rows, few // R < T, Q, BLOCK_D, AHEAD)
                few_at = few // R * out_token + (g * R + few % R) * out_head
                write(out, few_at, few // R < T, joined, whole, D, BLOCK_D)
                tl.store(done, 0)
        item += tl.num_programs(0)


def suits(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether heads and rows are of a size that the kernel takes, and k's offsets are v's."""
    if not alike(k_pages, v_pages):
        return False, "k_pages and v_pages lie differently"
    fits = q.shape[3] <= MAX_D and q.shape[0] <= MAX_ROWS
    return fits, f"keys read once a group; heads up to {MAX_D}, at most {MAX_ROWS} rows"


def suits_step(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, *rest: Tensor
) -> tuple[bool, str]:
    """Say whether that holds, and besides that new keys lie as their values do."""
    if not (alike(k, v) and alike(cos, sin) and cos.shape[1] > 0):
        return False, "k and v, or cos and sin, lie differently, or no pair turns"
    return suits(q, k_pages, v_pages, *rest)


def is_tuned(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, *rest: Any) -> bool:
    """Say whether a call's split is the one that an entry of ``tuned.json`` has for it."""
    (A, _, H, D), (S, G) = q.shape, k_pages.shape[1:3]
    shape = split_key(A, (H, G, D), S, page_table.shape[1] * S)
    return tuned("attention_decode", shape, q.dtype, device_name(q.device)) == {"split": rest[-1]}


def run(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, positions: Tensor, scale: float, split: int,
    *, out: Outs = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Run ``attention_decode``."""
    A, T, H, _ = q.shape
    scores = None
    if sink is not None:
        scores = q.new_full((A, H, T, page_table.shape[1] * k_pages.shape[1]), float("-inf"), dtype=torch.float32)
        sink.update(scores=scores)
    nothing = (None, None, None, None, None, None)
    return _launch(q, nothing, (k_pages, v_pages, page_table, positions), (scale, 1.0, split), out, scores)


def run_step(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    positions: Tensor, q_weight: Out, k_weight: Out, scale: float, eps: float, split: int, *, out: Outs = None,
) -> Tensor:  # fmt: skip
    """Run ``attention_step``."""
    new = (k, v, cos, sin, q_weight, k_weight)
    return _launch(q, new, (k_pages, v_pages, page_table, positions), (scale, eps, split), out, None)


def _launch(
    q: Tensor, new: tuple[Out, ...], where: tuple[Tensor, Tensor, Tensor, Tensor], numbers: tuple[float, float, int],
    out: Outs, scores: Out,
) -> Tensor:  # fmt: skip
    (A, T, H, D), (k, v, cos, sin, q_weight, k_weight), (scale, eps, split) = q.shape, new, numbers
    k_pages, v_pages, page_table, positions = where
    S, G = k_pages.shape[1:3]
    context = q.new_empty(q.shape) if out is None else out[0]
    if not q.numel():
        return context
    target = target_of(q.device)
    (k_pages, form), (v_pages, _) = (as_stored(pages, target) for pages in (k_pages, v_pages))
    fp32, overlap, stream = takes_fp32(q, k_pages), pdl(q.device), stream_of(q)
    much = target.shared_bytes >= MUCH_SHARED_BYTES
    sizes = blocks(D, split, T * H // G, fp32=fp32, fp8=k_pages.dtype.itemsize == 1, much=much)
    lanes, max_keys = A * G * triton.cdiv(T * H // G, TILE), page_table.shape[1] * S
    max_splits = max(1, triton.cdiv(max_keys, split or sizes["BLOCK_K"]))
    part_rows = triton.next_power_of_2(lanes * max_splits * min(TILE, T * H // G)) if max_splits > 1 else 1
    parts = scratch(q.device, stream, "attention_decode", part_rows * sizes["BLOCK_D"])
    sums = scratch(q.device, stream, "attention_decode_sums", part_rows * 2)
    done = zeros(q.device, stream, triton.next_power_of_2(lanes))
    num_programs = min(lanes * max_splits, NUM_PROGRAMS if split else NUM_STREAMING.get(sizes["BLOCK_D"], 264))
    attention_decode_kernel[(num_programs,)](
        q, k, v, cos, sin, k_pages, v_pages, page_table, positions, q_weight, k_weight, context, scores, parts, sums,
        done, A, T, 0 if cos is None else cos.shape[0], max_splits, *q.stride()[:3],
        *((0, 0, 0) if k is None else k.stride()[:3]), *k_pages.stride()[:3], page_table.stride(0), positions.stride(0),
        0 if cos is None else cos.stride(0), *context.stride()[:3], max_keys,
        G=G, R=H // G, D=D, P=0 if cos is None else cos.shape[1], S=S, SPLIT=split, SCALE=scale, EPS=eps, FORMAT=form,
        FP32=fp32, BLOCK_A=triton.next_power_of_2(A), BLOCK_T=triton.next_power_of_2(T), **sizes, PDL=overlap,
        num_warps=num_warps(sizes), **overlapping(overlap),
        **capped(target, most_registers(num_programs, sizes)),
    )  # fmt: skip
    return context


def blocks(D: int, split: int, num_rows: int, *, fp32: bool, fp8: bool, much: bool) -> dict[str, int]:
    """Return the blocks of a launch; of them BLOCK_K, by head, split, dtypes and target alone, decides a query's bits.

    ``much``: there is shared memory for three large blocks of keys on their way.
    """
    width, Q = padded(D), min(TILE, triton.next_power_of_2(num_rows))
    keys = 32 if fp32 or fp8 or width > 128 else 64
    if split == 0 and much and not fp32 and not fp8 and width == 128:
        keys = 128
    return {
        "BLOCK_D": width, "BLOCK_K": min(keys, padded(split)) if split else keys, "Q": Q,
        "AHEAD": max(2, min(4, 2048 // (Q * width))),
        "STAGES": 1 if split else 2 if not much else 3 if keys == 128 else 4,
    }  # fmt: skip


def most_registers(num_programs: int, sizes: dict[str, int]) -> int:
    """Return how many registers a thread may have, 0 for any number."""
    return MAX_REGISTERS if num_programs > NUM_ROOMY and sizes["BLOCK_D"] <= 64 else 0


def num_warps(sizes: dict[str, int]) -> int:
    """Return how many warps hold a block of keys without spilling."""
    return 8 if sizes["BLOCK_K"] * sizes["BLOCK_D"] > 4096 and sizes["STAGES"] == 1 else 4


def _case(
    G: int, R: int, D: int, rows: int, queries: int, dtypes: tuple[str, str], form: int = 0, *, step: bool = False,
    normed: bool = False, split: int = 64, much: bool = False,
) -> Compiled:  # fmt: skip
    q, pages = dtypes
    fp32, sizes = q == "*fp32", blocks(D, split, R * queries, fp32=q == "*fp32", fp8="8" in pages, much=much)
    pointers = {"q_ptr": q, "out_ptr": q, "k_pages": pages, "v_pages": pages, "table_ptr": "*i32"}
    pointers |= {"positions_ptr": "*i64", "done_ptr": "*i32", "parts_ptr": "*fp32", "sums_ptr": "*fp32"}
    pointers |= {"k_ptr": q, "v_ptr": q, "cos_ptr": "*fp32", "sin_ptr": "*fp32"} if step else {}
    pointers |= dict.fromkeys(("q_weight", "k_weight") if normed else (), q)
    optional = ("k_ptr", "v_ptr", "cos_ptr", "sin_ptr", "q_weight", "k_weight", "scores_ptr")
    aligned = ("q_row", "q_token", "q_head", "k_row", "k_token", "k_head", "page_stride", "slot_stride", "group_stride")
    numbers = dict.fromkeys((*aligned, "out_row", "out_token", "out_head", "scores_head"), "i32:16")
    counts = ("A", "T", "C", "max_splits", "table_stride", "positions_stride", "angle_stride")
    numbers |= dict.fromkeys(counts, "i32")
    fixed = dict.fromkeys((name for name in optional if name not in pointers), None)
    fixed |= {"G": G, "R": R, "D": D, "P": D // 2 if step else 0, "S": 16, "SPLIT": split, "SCALE": D**-0.5}
    fixed |= {"EPS": 1e-6, "FORMAT": form, "FP32": fp32, "BLOCK_A": rows, "BLOCK_T": queries, "PDL": True, **sizes}
    spills = 16 if "8" in pages else 80 if normed and much else 0  # bytes a thread, as seen
    uses = ("pdl", *(("fp8",) if "fp8" in pages else ()), *(("much shared memory",) if much else ()))
    return Compiled(attention_decode_kernel, pointers | numbers, fixed, num_warps(sizes), 1, uses, may_spill=spills)


BF16, FP32 = ("*bf16", "*bf16"), ("*fp32", "*fp32")
COMPILED = (
    _case(2, 7, 64, 1, 1, BF16), _case(8, 2, 128, 64, 1, BF16), _case(3, 3, 64, 256, 1, FP32),
    _case(8, 2, 128, 8, 1, ("*bf16", "*u8"), 1), _case(8, 2, 128, 8, 1, ("*bf16", "*u8"), 2),
    _case(8, 2, 128, 8, 1, ("*bf16", "*fp8e4nv")), _case(8, 2, 128, 8, 1, ("*bf16", "*fp8e4b8")),
    _case(2, 7, 64, 1, 1, BF16, step=True), _case(8, 2, 128, 64, 1, BF16, step=True, normed=True),
    _case(2, 6, 128, 1, 8, BF16, step=True), _case(3, 3, 64, 256, 1, BF16, step=True),
    _case(8, 2, 128, 8, 1, ("*bf16", "*u8"), 1, step=True, normed=True),
    *(
        _case(*heads, 8, 1, BF16, step=True, normed=heads[1] == 2, split=0, much=much)
        for heads in ((2, 7, 64), (8, 2, 128), (2, 6, 128)) for much in (True, False)
    ),
    _case(8, 2, 128, 8, 1, BF16, split=0, much=True), _case(3, 3, 64, 8, 1, FP32, split=0),
    _case(8, 2, 128, 8, 1, ("*bf16", "*u8"), 1, step=True, split=0, much=True),
    _case(2, 6, 128, 8, 4, BF16, step=True, split=0, much=True),
    _case(2, 7, 64, 64, 1, BF16, step=True)._replace(max_registers=MAX_REGISTERS, may_spill=16),
)  # fmt: skip
