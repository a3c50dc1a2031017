"""Cross-entropy of rows of logits, and its backward: each logit is read once, and no row is kept in fp32.

Forward: a program walks over its row in blocks with a running maximum and a running sum of exponentials (online
softmax). Backward: a program a block, from the logsumexp that forward kept.

Axes:    N = tokens, V = vocabulary
Bytes:   forward reads a row once; backward reads it once and writes it once
Source:  arXiv:1805.02867
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Outs
from microllm.ops.kernels.launch import Compiled, row_stride

BLOCK = 4096
"""Logits of a step: with eight warps, two loads of 16 bytes a thread in bf16."""


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, row_stride, ignore_index, V: tl.constexpr, BLOCK: tl.constexpr
):
    """loss = logsumexp(row) - row[target] (0 ignored, NaN out of range) and the logsumexp; grid (N,)."""
    row = tl.program_id(0)
    logits_row = logits_ptr + row.to(tl.int64) * row_stride
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row of -inf so far: its sum is 0, not NaN
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), axis=0)
        largest = higher
    lse = tl.where(largest == float("-inf"), largest, largest + tl.log(total))
    target = tl.load(targets_ptr + row)
    valid = (target >= 0) & (target < V)
    picked = tl.load(logits_row + target, mask=valid, other=float("nan")).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, lse - picked))
    tl.store(lse_ptr + row, lse)


@triton.jit
def cross_entropy_backward_kernel(
    grad_ptr, logits_ptr, targets_ptr, lse_ptr, d_logits_ptr, row_stride, d_row_stride, ignore_index,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_logits = (softmax - one hot) * grad, 0 ignored, NaN out of range; grid (N * ceil(V / BLOCK),)."""
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    v = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    valid = (target >= 0) & (target < V)
    factor = tl.where(valid, tl.load(grad_ptr + row), float("nan"))
    x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + v, mask=v < V, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(lse_ptr + row)) - tl.where(v == target, 1.0, 0.0)
    d = tl.where(target == ignore_index, 0.0, p * factor)
    tl.store(d_logits_ptr + row.to(tl.int64) * d_row_stride + v, d.to(d_logits_ptr.dtype.element_ty), mask=v < V)


def suits(logits: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether there is a vocabulary."""
    return 0 < logits.shape[1] < 2**31 - BLOCK, "a row a program"


def suits_backward(grad: Tensor, logits: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether a program a block makes a grid."""
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    return 0 < logits.shape[1] and logits.shape[0] * blocks < 2**31, "a block of a row a program"


def _block(V: int) -> tuple[int, int]:
    """Return the logits of a step and the warps that take them."""
    block = min(BLOCK, max(16, triton.next_power_of_2(V)))
    return block, 8 if block == BLOCK else 4


def run(
    logits: Tensor, targets: Tensor, ignore_index: int, need_valid: bool, *, out: Outs = None
) -> tuple[Tensor, Tensor]:
    """Run ``cross_entropy``."""
    N, V = logits.shape
    loss, lse = (logits.new_empty(N, dtype=torch.float32) for _ in range(2)) if out is None else out
    block, num_warps = _block(V)
    if N:
        cross_entropy_kernel[(N,)](
            logits, targets, loss, lse, row_stride(logits), ignore_index, V=V, BLOCK=block, num_warps=num_warps
        )
    return loss, lse


def run_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int, *, out: Outs = None
) -> Tensor:
    """Run ``cross_entropy_backward``."""
    N, V = logits.shape
    d_logits = logits.new_empty(logits.shape) if out is None else out[0]
    block, num_warps = _block(V)
    if N:
        cross_entropy_backward_kernel[(N * triton.cdiv(V, block),)](
            grad, logits, targets, lse, d_logits, row_stride(logits), row_stride(d_logits), ignore_index,
            V=V, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return d_logits


def _cases(V: int, dtype: str) -> tuple[Compiled, Compiled]:
    sizes: dict[str, object] = {"V": V, "BLOCK": BLOCK}
    loss = {"logits_ptr": dtype, "targets_ptr": "*i64", "loss_ptr": "*fp32", "lse_ptr": "*fp32"}
    gradient = {
        "grad_ptr": "*fp32", "logits_ptr": dtype, "targets_ptr": "*i64", "lse_ptr": "*fp32", "d_logits_ptr": dtype,
    }  # fmt: skip
    stride = {"row_stride": "i32:16"}
    return (
        Compiled(cross_entropy_kernel, loss | stride | {"ignore_index": "i32"}, sizes, 8),
        Compiled(
            cross_entropy_backward_kernel,
            gradient | stride | {"d_row_stride": "i32:16", "ignore_index": "i32"}, sizes, 8,
        ),
    )  # fmt: skip


COMPILED = (*_cases(151936, "*bf16"), *_cases(49152, "*fp32"))
