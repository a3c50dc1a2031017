"""Rows of a decode step moved on by one token: one program for all of them.

Axes:    A = rows, H = steps that the history holds
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.kernels.launch import Compiled, overlapping, pdl

MAX_ROWS = 4096


@triton.jit(do_not_specialize=["A"])
def advance_rows_kernel(
    token_ptr, ids_ptr, positions_ptr, last_ptr, history_ptr, step_ptr, A, history_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Note each row's token, make it the next input and count the position on; grid (1,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.arange(0, BLOCK)
    ok = a < A
    step = tl.load(step_ptr)
    token, position = tl.load(token_ptr + a, mask=ok, other=-1), tl.load(positions_ptr + a, mask=ok, other=-1)
    runs = position >= 0
    tl.store(history_ptr + step * history_stride + a, tl.where(runs, token, -2), mask=ok)
    goes_on = runs & (token >= 0) & (position < tl.load(last_ptr + a, mask=ok, other=-1))
    tl.store(ids_ptr + a, tl.where(goes_on, token, 0), mask=ok)
    tl.store(positions_ptr + a, tl.where(goes_on, position + 1, -1), mask=ok)
    tl.debug_barrier()  # every thread has read the step before it grows
    tl.store(step_ptr, step + 1)


def suits(token: Tensor, *_: Tensor) -> tuple[bool, str]:
    """Say whether one program holds the rows."""
    return 0 < token.shape[0] <= MAX_ROWS, f"for 1 to {MAX_ROWS} rows"


def run(
    token: Tensor, token_ids: Tensor, positions: Tensor, last: Tensor, history: Tensor, step: Tensor, *,
    out: None = None,
) -> None:  # fmt: skip
    """Run ``advance_rows``."""
    A, overlap = token.shape[0], pdl(token.device)
    advance_rows_kernel[(1,)](
        token, token_ids, positions, last, history, step, A, history.stride(0),
        BLOCK=triton.next_power_of_2(A), PDL=overlap, **overlapping(overlap),
    )  # fmt: skip


_POINTERS = ("token_ptr", "ids_ptr", "positions_ptr", "last_ptr", "history_ptr", "step_ptr")
COMPILED = tuple(
    Compiled(
        advance_rows_kernel, {**dict.fromkeys(_POINTERS, "*i64"), "A": "i32", "history_stride": "i32"},
        {"BLOCK": block, "PDL": True}, uses=("pdl",),
    )
    for block in (1, 64)
)  # fmt: skip
