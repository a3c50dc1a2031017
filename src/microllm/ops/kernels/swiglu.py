"""SwiGLU and its backward: element by element, in tiles of rows and columns, so that gate and up may be halves of one.

Axes:    F = FFN dim, after any leading axes (rows)
Bytes:   forward reads two and writes one; backward reads three and writes two
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Outs
from microllm.ops.kernels.launch import Compiled, row_stride

ELEMENTS = 2048
"""Of a tile: four warps load 32 bytes a thread of each tensor."""


@triton.jit
def _tile(num_rows, F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    row = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    f = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row.to(tl.int64), f, (row < num_rows) & (f < F)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(
    gate_ptr, up_ptr, y_ptr, num_rows, gate_stride, up_stride, y_stride,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = silu(gate) * up; grid (ceil(num_rows / ROWS) * ceil(F / BLOCK),)."""
    row, f, ok = _tile(num_rows, F, BLOCK, ROWS)
    gate = tl.load(gate_ptr + row * gate_stride + f, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + f, mask=ok, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * y_stride + f, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, num_rows, dy_stride, gate_stride, up_stride, d_gate_stride,
    d_up_stride, F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients by gate and by up; grid as ``swiglu_kernel``'s."""
    row, f, ok = _tile(num_rows, F, BLOCK, ROWS)
    dy = tl.load(dy_ptr + row * dy_stride + f, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + f, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + f, mask=ok, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    tl.store(d_gate_ptr + row * d_gate_stride + f, d_gate.to(d_gate_ptr.dtype.element_ty), mask=ok)
    tl.store(d_up_ptr + row * d_up_stride + f, (dy * gate * sigmoid).to(d_up_ptr.dtype.element_ty), mask=ok)


def _tiles(x: Tensor) -> tuple[int, int, int, int]:
    """Return rows, columns of a tile, rows of a tile, and tiles."""
    F = x.shape[-1]
    num_rows, block = x.numel() // F, min(512, max(16, triton.next_power_of_2(F)))
    rows = ELEMENTS // block
    return num_rows, block, rows, triton.cdiv(num_rows, rows) * triton.cdiv(F, block)


def suits(x: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether there is anything to do."""
    return x.shape[-1] > 0, "element by element"


def run(gate: Tensor, up: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``swiglu``."""
    y = gate.new_empty(gate.shape) if out is None else out[0]
    num_rows, block, rows, tiles = _tiles(gate)
    if tiles:
        swiglu_kernel[(tiles,)](
            gate, up, y, num_rows, row_stride(gate), row_stride(up), row_stride(y),
            F=gate.shape[-1], BLOCK=block, ROWS=rows,
        )  # fmt: skip
    return y


def run_backward(dy: Tensor, gate: Tensor, up: Tensor, *, out: Outs = None) -> tuple[Tensor, Tensor]:
    """Run ``swiglu_backward``."""
    d_gate, d_up = (gate.new_empty(gate.shape), up.new_empty(up.shape)) if out is None else out
    num_rows, block, rows, tiles = _tiles(gate)
    if tiles:
        swiglu_backward_kernel[(tiles,)](
            dy, gate, up, d_gate, d_up, num_rows, row_stride(dy), row_stride(gate), row_stride(up), row_stride(d_gate),
            row_stride(d_up), F=gate.shape[-1], BLOCK=block, ROWS=rows,
        )  # fmt: skip
    return d_gate, d_up


def _case(kernel: object, tensors: tuple[str, ...], dtype: str) -> Compiled:
    pointers = {f"{name}_ptr": dtype for name in tensors}
    strides = {f"{name}_stride": "i32:16" for name in tensors}
    return Compiled(kernel, pointers | {"num_rows": "i32"} | strides, {"F": 4864, "BLOCK": 512, "ROWS": 4})


COMPILED = tuple(
    case
    for dtype in ("*bf16", "*fp32")
    for case in (
        _case(swiglu_kernel, ("gate", "up", "y"), dtype),
        _case(swiglu_backward_kernel, ("dy", "gate", "up", "d_gate", "d_up"), dtype),
    )
)
