"""Attention of a chunk of queries over pages: a program takes a tile of query rows and walks the keys in fixed blocks.

A tile holds the heads of one group for consecutive queries, so that a key is read once for all of them; its shape and
the blocks follow from D and the dtypes alone, counted from position 0: the same bits whatever the chunk.

Axes:    A = rows, T = queries a row, H = query heads, G = KV heads, R = H / G, D = head dim; S = slots a page
Bytes:   the keys and values up to a tile's last position, once for each BLOCK_M of a row's T * R query rows
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Outs, Sink
from microllm.ops.kernels.launch import Compiled, overlapping, pdl
from microllm.ops.kernels.pages import MAX_D, alike, as_stored, padded, takes_fp32, walk, write
from microllm.ops.target import target_of


@triton.jit(do_not_specialize=["T"])
def attention_prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, positions_ptr, out_ptr, scores_ptr, T,
    q_row, q_token, q_head, page_stride, slot_stride, group_stride, table_stride, positions_stride,
    out_row, out_token, out_head, scores_head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, SCALE: tl.constexpr, FORMAT: tl.constexpr,
    FP32: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend for one tile of query rows; grid (ceil(T * R / BLOCK_M), G, A), the tiles with most keys first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = tl.float32 if FP32 else q_ptr.dtype.element_ty
    tile, g, a = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t, h = row // R, g * R + row % R
    there = t < T
    last = tl.load(positions_ptr + a * positions_stride + t, mask=there, other=-1).to(tl.int32)
    ok = there[:, None] & (d < D)[None, :]
    q_at = a * q_row + t[:, None] * q_token + h[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=ok, other=0.0).to(dtype)
    _, total, context = walk(
        q, k_ptr + g * group_stride, v_ptr + g * group_stride, scores_ptr, table_ptr + a * table_stride,
        ((a * G * R + h) * T + t) * scores_head, last, 0, tl.max(last, 0) + 1,
        page_stride, slot_stride, S, D, SCALE, FORMAT, BLOCK_M, BLOCK_D, BLOCK_K, 2,
    )  # fmt: skip
    write(out_ptr + a * out_row, t * out_token + h * out_head, there, context, total, D, BLOCK_D)


def suits(q: Tensor, k_pages: Tensor, v_pages: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether heads are of a size that the kernel takes, and k's offsets are v's."""
    if not alike(k_pages, v_pages):
        return False, "k_pages and v_pages lie differently"
    return q.shape[3] <= MAX_D, f"keys read once a tile of queries; heads up to {MAX_D}"


def run(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, positions: Tensor, scale: float, split: int,
    *, out: Outs = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Run ``attention_prefill``; keys are walked in blocks of the kernel's own, whatever ``split``."""
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
    fp32, overlap = takes_fp32(q, k_pages), pdl(q.device)
    sizes = blocks(D, fp32=fp32)
    attention_prefill_kernel[(triton.cdiv(T * H // G, sizes["BLOCK_M"]), G, A)](
        q, k_pages, v_pages, page_table, positions, context, scores, T,
        *q.stride()[:3], *k_pages.stride()[:3], page_table.stride(0), positions.stride(0), *context.stride()[:3],
        max_keys, G=G, R=H // G, D=D, S=S, SCALE=scale, FORMAT=form, FP32=fp32, **sizes, PDL=overlap,
        num_warps=4, num_stages=2, **overlapping(overlap),
    )  # fmt: skip
    return context


def blocks(D: int, *, fp32: bool) -> dict[str, int]:
    """Return what of a launch decides a query's bits, by head and dtype alone."""
    width = padded(D)
    rows = 16 if fp32 else 64 if width <= 128 else 32
    return {"BLOCK_M": rows, "BLOCK_D": width, "BLOCK_K": 64 if width <= 64 and not fp32 else 32}


def _compiled() -> tuple[Compiled, ...]:
    strides = ("q_row", "q_token", "q_head", "page_stride", "slot_stride", "group_stride", "out_row", "out_token")
    numbers = dict.fromkeys((*strides, "out_head", "scores_head"), "i32:16")
    numbers |= dict.fromkeys(("T", "table_stride", "positions_stride"), "i32")
    given = {"table_ptr": "*i32", "positions_ptr": "*i64"}
    cases = []
    for G, R, D, q, pages, form in (
        (2, 7, 64, "*bf16", "*bf16", 0), (8, 2, 128, "*bf16", "*bf16", 0), (3, 3, 64, "*fp32", "*fp32", 0),
        (8, 2, 128, "*bf16", "*u8", 1), (8, 2, 128, "*bf16", "*u8", 2),
        (8, 2, 128, "*bf16", "*fp8e4nv", 0), (8, 2, 128, "*bf16", "*fp8e4b8", 0),
    ):  # fmt: skip
        fp32 = q == "*fp32"
        pointers = {"q_ptr": q, "k_ptr": pages, "v_ptr": pages, "out_ptr": q}
        fixed = {"G": G, "R": R, "D": D, "S": 16, "SCALE": D**-0.5, "FORMAT": form, "FP32": fp32, "PDL": True}
        uses = ("pdl", *(() if fp32 else ("wgmma",)), *(("fp8",) if "fp8" in pages else ()))
        fixed |= {"scores_ptr": None, **blocks(D, fp32=fp32)}
        cases.append(Compiled(attention_prefill_kernel, pointers | given | numbers, fixed, 4, 2, uses))
    return tuple(cases)


COMPILED = _compiled()
