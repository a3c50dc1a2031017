"""Key-value pages as kernels see them: how their bytes are read, and attention over a run of keys.

Place: imported by the kernels that read or write pages. Holds no operator's kernel.

Axes:    S = slots a page (position p lies in slot p % S of its row's page p // S), D = head dim, M = query rows
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.kernels.fp8 import decode_e4m3
from microllm.ops.target import Target

AS_IT_IS, E4M3FN_BYTES, E4M3FNUZ_BYTES = 0, 1, 2
MAX_D = 256
"""Widest head that a tile of keys is kept for."""
_BYTES = {torch.float8_e4m3fn: E4M3FN_BYTES, torch.float8_e4m3fnuz: E4M3FNUZ_BYTES}


@triton.jit
def read_pages(pointers, ok, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Return what lies at ``pointers`` as ``dtype``, 0 where not ``ok``; nothing that is not ok is read."""
    found = tl.load(pointers, mask=ok, other=0.0)
    if FORMAT == 1:
        found = decode_e4m3(found, False)
    elif FORMAT == 2:
        found = decode_e4m3(found, True)
    if found.dtype == dtype:
        return found
    else:
        return found.to(tl.float32).to(dtype)


@triton.jit
def weigh(weights, v, context):
    """Return context + weights @ v, the weights in v's dtype twice: rounded, and what rounding left over."""
    if v.dtype == tl.float32:
        return tl.dot(weights, v, context, input_precision="ieee")
    else:
        rounded = weights.to(v.dtype)
        context = tl.dot(rounded, v, context)
        return tl.dot((weights - rounded.to(tl.float32)).to(v.dtype), v, context)


@triton.jit
def attend(q, k, v, start, end, last, scores_ptr, scores_at, best, total, context, SCALE: tl.constexpr,
            BLOCK_K: tl.constexpr):  # fmt: skip
    """Return maximum, sum and context of the query rows with a block of keys joined."""
    key = start + tl.arange(0, BLOCK_K)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
    visible = (key < end)[None, :] & (key[None, :] <= last[:, None])
    if scores_ptr is not None:
        tl.store(scores_ptr + scores_at[:, None] + key[None, :], scores, mask=visible)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights, keep = tl.exp(scores - shift[:, None]), tl.exp(best - shift)
    return higher, total * keep + tl.sum(weights, 1), weigh(weights, v, context * keep[:, None])


@triton.jit
def walk(
    q, k_ptr, v_ptr, scores_ptr, table_row, scores_at, last, first, end, page_stride, slot_stride,
    S: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, FORMAT: tl.constexpr,
    M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the maximum, sum and context of M query rows over the keys from ``first`` up to ``end``, unrounded.

    Keys come in blocks, counted from ``first``; a block of which a row sees nothing changes no bit of the row. STAGES
    above 1: that many blocks are on their way through shared memory.
    ``last``: the last position that a row sees. ``scores_at``: where its scores go, for which scores_ptr may be None.
    """
    d = tl.arange(0, BLOCK_D)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    context = tl.zeros([M, BLOCK_D], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_K)
        stored = key < end
        page = tl.load(table_row + key // S, mask=stored, other=0).to(tl.int64)
        at = (page * page_stride + (key % S) * slot_stride)[:, None] + d[None, :]
        ok = stored[:, None] & (d < D)[None, :]
        k, v = read_pages(k_ptr + at, ok, FORMAT, q.dtype), read_pages(v_ptr + at, ok, FORMAT, q.dtype)
        best, total, context = attend(
            q, k, v, start, end, last, scores_ptr, scores_at, best, total, context, SCALE, BLOCK_K
        )
    return best, total, context


@triton.jit
def write(out, at, there, context, total, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write each row's mean over the keys to its place; 0 for a row that saw nothing."""
    d = tl.arange(0, BLOCK_D)
    mean = context / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at[:, None] + d[None, :], mean.to(out.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])


def as_stored(pages: Tensor, target: Target) -> tuple[Tensor, int]:
    """Return pages as a kernel takes them on ``target``, and their FORMAT."""
    if pages.dtype in (target.fp8_dtype, torch.float32, torch.bfloat16, torch.float16):
        return pages, AS_IT_IS
    return pages.view(torch.uint8), _BYTES[pages.dtype]


def takes_fp32(q: Tensor, pages: Tensor) -> bool:
    """Say whether products are taken in fp32: of fp32, and of two different 16-bit formats."""
    return q.dtype == torch.float32 or (pages.dtype.itemsize > 1 and pages.dtype != q.dtype)


def alike(k: Tensor, v: Tensor) -> bool:
    """Say whether two tensors of one shape lie alike, so that offsets into one hold for the other."""
    return k.stride() == v.stride()


def padded(D: int) -> int:
    """Return the width of a tile for heads of D, which matrix instructions take from 16 on."""
    return max(16, triton.next_power_of_2(D))
