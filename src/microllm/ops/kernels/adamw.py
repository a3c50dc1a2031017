"""AdamW over many tensors in one launch: a program steps one chunk of one tensor, which two tables tell it.

The order of operations and every rounding are torch's on a GPU, products that torch fuses included; the compiler may
fuse no others. bf16 moments are rounded in integer arithmetic, to nearest or by random bits.

Bytes:   a parameter's, its gradient's and its moments' read once; all but the gradient's written once
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.kernels.launch import Compiled

CHUNK = 1024
"""Elements a program steps: with four warps, two loads of 16 bytes a thread of each fp32 tensor."""
_COLUMNS = tl.constexpr(5)  # of the table: addresses of parameter, gradient and moments, then the number of elements


@triton.jit
def _load(pointer, ok, MASKED: tl.constexpr, BF16: tl.constexpr):
    x = tl.load(pointer, mask=ok, other=0) if MASKED else tl.load(pointer)
    return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if BF16 else x


@triton.jit
def _store(pointer, x, ok, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, x, mask=ok)
    else:
        tl.store(pointer, x)


@triton.jit
def _rounded(x, step, stream, seed, index, BF16: tl.constexpr, DITHER: tl.constexpr):
    """Return what a moment is stored as: itself, or bf16's bits, rounded to nearest or by random bits."""
    if BF16:
        bits = x.to(tl.int32, bitcast=True)
        if DITHER:
            low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
            word, _, _, _ = tl.philox(seed, low, high, tl.cast(step, tl.uint32), tl.cast(stream, tl.uint32))
            bits += (word >> 16).to(tl.int32)
        else:
            bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        x = (bits >> 16).to(tl.int16)
    return x


@triton.jit
def _address(entry, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _step(
    entry, number, start, size, keep, weight, beta2, square_weight, inverse_root, eps, step_size, step, seed,
    FIRST_BF16: tl.constexpr, SECOND_BF16: tl.constexpr, HEAVY: tl.constexpr, DITHER: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    index = start + tl.arange(0, CHUNK)
    ok = index < size
    p_ptr = _address(entry, tl.float32, ALIGNED) + index
    m_ptr = _address(entry + 2, tl.int16 if FIRST_BF16 else tl.float32, ALIGNED) + index
    v_ptr = _address(entry + 3, tl.int16 if SECOND_BF16 else tl.float32, ALIGNED) + index
    g = _load(_address(entry + 1, tl.float32, ALIGNED) + index, ok, MASKED, False)
    p = _load(p_ptr, ok, MASKED, False) * tl.cast(keep, tl.float32)
    m = _load(m_ptr, ok, MASKED, FIRST_BF16)
    weight = tl.broadcast_to(tl.cast(weight, tl.float32), g.shape)
    m = tl.fma(m - g, 1.0 - weight, g) if HEAVY else tl.fma(g - m, weight, m)
    v = _load(v_ptr, ok, MASKED, SECOND_BF16) * tl.cast(beta2, tl.float32)
    v = tl.fma(tl.broadcast_to(tl.cast(square_weight, tl.float32), g.shape), g * g, v)
    denominator = tl.sqrt_rn(v) * tl.cast(inverse_root, tl.float32) + tl.cast(eps, tl.float32)
    p = tl.fma(tl.div_rn(m, denominator), tl.broadcast_to(tl.cast(step_size, tl.float32), g.shape), p)
    _store(p_ptr, p, ok, MASKED)
    _store(m_ptr, _rounded(m, step, 2 * number, seed, index, FIRST_BF16, DITHER), ok, MASKED)
    _store(v_ptr, _rounded(v, step, 2 * number + 1, seed, index, SECOND_BF16, DITHER), ok, MASKED)


@triton.jit(do_not_specialize=["step", "seed"])
def adamw_kernel(
    table_ptr, chunks_ptr, keep, weight, beta2, square_weight, inverse_root, eps, step_size, step, seed,
    FIRST_BF16: tl.constexpr, SECOND_BF16: tl.constexpr, HEAVY: tl.constexpr, DITHER: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step chunk (tensor, place) of ``chunks``; grid (chunks,). HEAVY: the gradient's weight is a half or more."""
    number = tl.load(chunks_ptr + 2 * tl.program_id(0))
    start = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    entry = table_ptr + number * _COLUMNS
    size = tl.load(entry + 4)
    if start + CHUNK <= size:  # no mask, so that loads are 16 bytes wide
        _step(
            entry, number, start, size, keep, weight, beta2, square_weight, inverse_root, eps, step_size, step, seed,
            FIRST_BF16, SECOND_BF16, HEAVY, DITHER, ALIGNED, CHUNK, False,
        )  # fmt: skip
    else:
        _step(
            entry, number, start, size, keep, weight, beta2, square_weight, inverse_root, eps, step_size, step, seed,
            FIRST_BF16, SECOND_BF16, HEAVY, DITHER, ALIGNED, CHUNK, True,
        )  # fmt: skip


@lru_cache(maxsize=4)
def _tables(
    device: torch.device, addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the tables on the device: kept, so that a captured step that ran once before copies nothing."""
    table = torch.tensor([(*pointers, size) for pointers, size in zip(addresses, sizes, strict=True)])
    counts = torch.tensor([triton.cdiv(size, CHUNK) for size in sizes])
    number = torch.arange(len(sizes)).repeat_interleave(counts)
    place = torch.arange(len(number)) - (counts.cumsum(0) - counts)[number]
    return table.to(device), torch.stack((number, place), dim=1).int().to(device)


def suits(*values: Sequence[Tensor]) -> tuple[bool, str]:
    """Say whether tensors are lists of elements, and the moments of one dtype each."""
    whole = all(t.is_contiguous() for t in chain(*values[:4]))
    alike = all(len({t.dtype for t in moments}) == 1 for moments in values[2:4])
    return whole and alike, "contiguous tensors, each moment of one dtype"


def run(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, seed: int, *, out: None = None,
) -> None:  # fmt: skip
    """Run ``adamw``."""
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    addresses = tuple(tuple(t.data_ptr() for t in ts) for ts in zip(*lists, strict=True))
    table, chunks = _tables(params[0].device, addresses, tuple(t.numel() for t in params))
    if not len(chunks):
        return
    adamw_kernel[(len(chunks),)](
        table, chunks, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, eps,
        -lr / (1 - beta1**step), step, seed,
        FIRST_BF16=exp_avgs[0].dtype == torch.bfloat16, SECOND_BF16=exp_avg_sqs[0].dtype == torch.bfloat16,
        HEAVY=beta1 <= 0.5, DITHER=seed >= 0, ALIGNED=not any(a % 16 for a in chain(*addresses)), CHUNK=CHUNK,
        enable_fp_fusion=False,
    )  # fmt: skip


def _case(*, bf16: bool, dither: bool) -> Compiled:
    scalars = ("keep", "weight", "beta2", "square_weight", "inverse_root", "eps", "step_size")
    tables = {"table_ptr": "*i64", "chunks_ptr": "*i32"}
    signature = {**tables, **dict.fromkeys(scalars, "fp32"), "step": "i32", "seed": "i64"}
    flags = {"FIRST_BF16": bf16, "SECOND_BF16": bf16, "HEAVY": False, "DITHER": dither, "ALIGNED": True}
    return Compiled(adamw_kernel, signature, {**flags, "CHUNK": CHUNK}, fusion=False)


COMPILED = (_case(bf16=False, dither=False), _case(bf16=True, dither=False), _case(bf16=True, dither=True))
