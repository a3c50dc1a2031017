"""Argmax of logits, and of the head's product without the logits: two stages, both in a fixed order.

The first stage leaves the largest value of each block of a row and its index, in ``scratch``; the second takes the
largest of those and the least index that has it. A block with NaN or infinity leaves (inf, -1), which no other beats.

Axes:    A = rows, V = vocabulary, D = model dim
Bytes:   logits once (the head: its weight once, no logits), and 8 for each block of a row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Out, Outs, Sink
from microllm.ops.kernels.launch import Compiled, overlapping, pdl, row_stride, scratch, stream_of
from microllm.ops.kernels.linear import BF16, MAX_ROWS, Operands, Results, case, chosen, multiply, num_tiles
from microllm.ops.kernels.linear_choice import Matrix
from microllm.ops.kernels.linear_forms import first_largest

BLOCK = 4096
PICKED = 1024
"""Blocks that the second stage looks at in one go."""


@triton.jit(do_not_specialize=["A"])
def argmax_kernel(
    logits_ptr, best_ptr, index_ptr, A, stride,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave the largest of BLOCK logits of ROWS rows and its index; grid (blocks of V, of A)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = (row < A)[:, None] & (v < V)
    at = logits_ptr + row[:, None].to(tl.int64) * stride + v
    best, index = first_largest(tl.load(at, mask=there, other=float("-inf")).to(tl.float32), v, 1)
    at = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + at, best, mask=row < A)
    tl.store(index_ptr + at, index, mask=row < A)


@triton.jit(do_not_specialize=["A"])
def pick_kernel(
    best_ptr, index_ptr, greedy_ptr, temperature_ptr, token_ptr, A,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write each row's token from its P blocks, or ``greedy`` where that is -1 or the row is cold.

    Grid (blocks of A,).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * P
    best = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    index = tl.full([ROWS, BLOCK], 2147483647, tl.int32)
    for start in tl.range(0, P, BLOCK):
        p = start + tl.arange(0, BLOCK)[None, :]
        there = (row < A)[:, None] & (p < P)
        v = tl.load(best_ptr + at + p, mask=there, other=float("-inf"))
        i = tl.load(index_ptr + at + p, mask=there, other=2147483647)
        take = (v > best) | ((v == best) & (i < index))
        best = tl.where(take, v, best)
        index = tl.where(take, i, index)
    top = tl.max(best, 1)
    token = tl.min(tl.where(best == top[:, None], index, 2147483647), 1)
    token = tl.where(top == float("-inf"), -1, token)
    if greedy_ptr is not None:
        greedy = tl.load(greedy_ptr + row, mask=row < A, other=0)
        cold = tl.load(temperature_ptr + row, mask=row < A, other=0.0) == 0
        token = tl.where((greedy < 0) | cold, greedy, token)
    tl.store(token_ptr + row, token.to(tl.int64), mask=row < A)


def tall(x: Tensor) -> int:
    """Return the rows of a program: one, but where programs are interpreted, which are slow rather than big."""
    return 1 if x.is_cuda else 64


def partials(x: Tensor, name: str, rows: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return where the first stage leaves values (fp32) and indices (int32)."""
    numel, stream = rows * blocks, stream_of(x)
    return (
        scratch(x.device, stream, f"{name} values", numel),
        scratch(x.device, stream, f"{name} indices", numel).view(torch.int32),
    )


def pick(best: Tensor, index: Tensor, token: Tensor, *, greedy: Out = None, temperature: Out = None) -> None:
    """Launch the second stage."""
    A, rows = token.shape[0], tall(token)
    overlap, blocks = pdl(best.device), best.numel() // A
    pick_kernel[(triton.cdiv(A, rows),)](
        best, index, greedy, temperature, token, A,
        P=blocks, ROWS=rows, BLOCK=min(PICKED, triton.next_power_of_2(blocks)), PDL=overlap, **overlapping(overlap),
    )  # fmt: skip


def suits(logits: Tensor, *_: Tensor) -> tuple[bool, str]:
    """Say whether the rows make a grid."""
    return logits.shape[0] < 1 << 16, "for fewer than 65,536 rows, by blocks in a fixed order"


def run(logits: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``argmax``."""
    A, V = logits.shape
    token = logits.new_empty(A, dtype=torch.int64) if out is None else out[0]
    if A:
        block = min(BLOCK, triton.next_power_of_2(V))
        best, index = partials(logits, "argmax", A, triton.cdiv(V, block))
        overlap, rows = pdl(logits.device), tall(logits)
        argmax_kernel[(triton.cdiv(V, block), triton.cdiv(A, rows))](
            logits, best, index, A, row_stride(logits),
            V=V, ROWS=rows, BLOCK=block, PDL=overlap, **overlapping(overlap),
        )  # fmt: skip
        pick(best, index, token)
    return token


def suits_head(x: Tensor, w: Tensor) -> tuple[bool, str]:
    """Say whether the rows are few enough."""
    return x.shape[0] <= MAX_ROWS and x.shape[1] > 0, f"for up to {MAX_ROWS} rows, D above 0; no logits are stored"


def run_head(x: Tensor, w: Tensor, *, out: Outs = None, sink: Sink = None) -> Tensor:
    """Run ``lm_head_argmax``."""
    A, V = x.shape[0], w.shape[0]
    token = x.new_empty(A, dtype=torch.int64) if out is None else out[0]
    if sink is not None:
        sink.update(logits=x.new_empty((A, V)))
    if A:
        o = Operands(op="lm_head_argmax", x=x, w=w)
        choice = chosen(o)
        best, index = partials(x, "lm_head_argmax", A, num_tiles(o.matrix, choice))
        multiply(o, Results(y=sink and sink["logits"], best=best, index=index), choice)
        pick(best, index, token)
    return token


def _compiled() -> tuple[Compiled, ...]:
    stage = {"best_ptr": "*fp32", "index_ptr": "*i32"}
    cases = [
        Compiled(
            argmax_kernel, {"logits_ptr": "*bf16", **stage, "A": "i32", "stride": "i32:16"},
            {"V": 151936, "ROWS": 1, "BLOCK": BLOCK, "PDL": True}, uses=("pdl",),
        ),
        Compiled(
            pick_kernel, {**stage, "token_ptr": "*i64", "A": "i32"},
            {"greedy_ptr": None, "temperature_ptr": None, "P": 9496, "ROWS": 1, "BLOCK": PICKED, "PDL": True},
            uses=("pdl",),
        ),
    ]  # fmt: skip
    head = Matrix("lm_head_argmax", 151936, 896, BF16)
    return (
        *cases,
        *(case(head, M, "best", "index") for M in (1, 8, 32)),
        case(head, 32, "best", "index", one_order=True),
        case(Matrix("lm_head_argmax", 151936, 1536, BF16), 1, "best", "index"),
    )


COMPILED = _compiled()
