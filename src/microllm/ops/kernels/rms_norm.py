"""RMSNorm, alone or of a sum, and its backward: a row stays in registers between its mean and its scaling.

A program takes a tile of whole rows. The tile follows from D alone, so that a row's bits do not depend on the number
of rows. Backward sums dw in two stages, both in a fixed order: each program over its rows, then over the programs.

Axes:    D = model or head dim, after any leading axes (rows)
Bytes:   forward reads a row and writes it once; backward reads dy and x once, and writes dx and 512 rows of partial dw
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Out, Outs
from microllm.ops.kernels.launch import Compiled, overlapping, pdl, row_stride, scratch, stream_of

MAX_D = 8192
"""Longest row that is kept in registers: 32 values a thread of eight warps."""
NUM_PARTIALS = 512
"""Programs of backward's first stage, whatever the GPU, so that dw has the same bits on all."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr, residual_ptr, w_ptr, sum_ptr, y_ptr, num_rows, x_stride, residual_stride, sum_stride, y_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = rms_norm(x) * w, or of sum = x + residual; grid (ceil(num_rows / ROWS),)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    ok = (row < num_rows) & (d < D)
    row = row.to(tl.int64)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + d, mask=ok, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + d, mask=ok, other=0.0).to(tl.float32)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * sum_stride + d, total, mask=ok)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / D) + tl.cast(eps, tl.float32))
    normed = (x * scale).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * y_stride + d, (normed * w).to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, addend_ptr, dx_ptr, partial_ptr, num_rows, dy_stride, x_stride, addend_stride, dx_stride,
    eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx (+ addend) of every row, and dw of this program's rows, every NUM_PARTIALS-th tile; grid (programs,)."""
    d = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        ok = (row < num_rows) & (d < D)
        row = row.to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + d, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + d, mask=ok, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / D) + tl.cast(eps, tl.float32))
        normed = x * scale
        d_normed = dy * w
        mean = tl.sum(d_normed * normed, axis=1, keep_dims=True) * (1.0 / D)
        dx = scale * (d_normed - normed * mean)
        if addend_ptr is not None:
            dx += tl.load(addend_ptr + row * addend_stride + d, mask=ok, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * dx_stride + d, dx.to(dx_ptr.dtype.element_ty), mask=ok)
        dw += dy * normed
    column = tl.arange(0, BLOCK)
    tl.store(partial_ptr + tl.program_id(0) * D + column, tl.sum(dw, axis=0), mask=column < D)


@triton.jit(do_not_specialize=["num_partials"])
def sum_partials_kernel(partial_ptr, dw_ptr, num_partials, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dw = the sum of partial [num_partials, D] over its rows; grid (ceil(D / BLOCK),)."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, num_partials, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial_ptr + row * D + d[None, :], mask=(row < num_partials) & (d < D)[None, :], other=0.0)
    tl.store(dw_ptr + d, tl.sum(total, axis=0).to(dw_ptr.dtype.element_ty), mask=d < D)


def tile(D: int, elements: int) -> tuple[int, int, int]:
    """Return the padded row, the rows of a tile of about ``elements``, and the warps that hold it."""
    block = max(16, triton.next_power_of_2(D))
    return block, max(1, elements // block), 4 if block <= elements else 8


def suits(x: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether a row fits in registers."""
    return 0 < x.shape[-1] <= MAX_D, f"rows of 1 to {MAX_D} in registers"


def suits_backward(dy: Tensor, x: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether a row fits in registers."""
    return suits(x)


def run(x: Tensor, w: Tensor, eps: float, *, out: Outs = None) -> Tensor:
    """Run ``rms_norm``."""
    y = x.new_empty(x.shape) if out is None else out[0]
    _launch(x, None, w, None, y, eps)
    return y


def run_add(x: Tensor, residual: Tensor, w: Tensor, eps: float, *, out: Outs = None) -> tuple[Tensor, Tensor]:
    """Run ``add_rms_norm``."""
    total, y = (x.new_empty(x.shape), x.new_empty(x.shape)) if out is None else out
    _launch(x, residual, w, total, y, eps)
    return total, y


def _launch(x: Tensor, residual: Out, w: Tensor, total: Out, y: Tensor, eps: float) -> None:
    D = x.shape[-1]
    if (num_rows := x.numel() // D) == 0:
        return
    block, rows, num_warps = tile(D, 4096)
    overlap = pdl(x.device)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, residual, w, total, y, num_rows, row_stride(x), row_stride(residual), row_stride(total), row_stride(y), eps,
        D=D, BLOCK=block, ROWS=rows, PDL=overlap, num_warps=num_warps, **overlapping(overlap),
    )  # fmt: skip


def run_backward(
    dy: Tensor, x: Tensor, w: Tensor, addend: Out, eps: float, *, out: Outs = None
) -> tuple[Tensor, Tensor]:
    """Run ``rms_norm_backward``."""
    D = x.shape[-1]
    dx, dw = (x.new_empty(x.shape), w.new_empty(w.shape)) if out is None else out
    block, rows, num_warps = tile(D, 2048)
    num_rows = x.numel() // D
    programs = min(NUM_PARTIALS, triton.cdiv(num_rows, rows))
    partials = scratch(x.device, stream_of(x), "rms_norm_backward", NUM_PARTIALS * D)
    if programs:
        rms_norm_backward_kernel[(programs,)](
            dy, x, w, addend, dx, partials, num_rows, row_stride(dy), row_stride(x), row_stride(addend), row_stride(dx),
            eps, D=D, BLOCK=block, ROWS=rows, num_warps=num_warps,
        )  # fmt: skip
    sum_partials_kernel[(triton.cdiv(D, 32),)](partials, dw, programs, D=D, ROWS=128, BLOCK=32)
    return dx, dw


def _compiled() -> tuple[Compiled, ...]:
    cases: list[Compiled] = []
    strides = dict.fromkeys(("x_stride", "residual_stride", "sum_stride", "y_stride"), "i32:16")
    for D, dtype in ((896, "*bf16"), (8192, "*fp32")):
        block, rows, num_warps = tile(D, 4096)
        sizes = {"D": D, "BLOCK": block, "ROWS": rows, "PDL": True}
        added = dict.fromkeys(("x_ptr", "residual_ptr", "w_ptr", "sum_ptr", "y_ptr"), dtype)
        alone = {name: dtype for name in added if name not in ("residual_ptr", "sum_ptr")}
        more = {"num_rows": "i32", **strides, "eps": "fp32"}
        absent = {"residual_ptr": None, "sum_ptr": None}
        cases.append(Compiled(rms_norm_kernel, alone | more, absent | sizes, num_warps, uses=("pdl",)))
        cases.append(Compiled(rms_norm_kernel, added | more, sizes, num_warps, uses=("pdl",)))
        block, rows, num_warps = tile(D, 2048)
        pointers = dict.fromkeys(("dy_ptr", "x_ptr", "w_ptr", "addend_ptr", "dx_ptr"), dtype)
        more = dict.fromkeys(("dy_stride", "x_stride", "addend_stride", "dx_stride"), "i32:16")
        signature = {**pointers, "partial_ptr": "*fp32", "num_rows": "i32", **more, "eps": "fp32"}
        sizes = {"D": D, "BLOCK": block, "ROWS": rows}
        cases.append(Compiled(rms_norm_backward_kernel, signature, sizes, num_warps))
    signature = {"partial_ptr": "*fp32", "dw_ptr": "*bf16", "num_partials": "i32"}
    cases.append(Compiled(sum_partials_kernel, signature, {"D": 896, "ROWS": 128, "BLOCK": 32}))
    return tuple(cases)


COMPILED = _compiled()
