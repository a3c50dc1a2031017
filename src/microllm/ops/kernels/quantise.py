"""Quantise and dequantise: int8, fp8 and int4 codes with a scale for each group of a row.

Codes are made in integer arithmetic, fp8's too: so the same bits come out on a GPU without fp8 (sm_80), on AMD's
FNUZ format and in the interpreter. Ties go to even by adding and taking away 1.5 * 2^23, which leaves no fraction.

Axes:    N = rows, K = columns, J = K / 2 bytes, U = groups a row
Bytes:   each element read once and written once; scales come from cache
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Outs
from microllm.ops.kernels.launch import Compiled, row_stride

ELEMENTS = 2048
"""Of a tile."""
INT8, FP8, FP8_FNUZ = 0, 1, 2


@triton.jit
def _tile(N, U: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows, groups and places in them of this program's tile of N * U groups, and which there are."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    group = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return (group // U).to(tl.int64), group % U, place, (group < N * U), (group < N * U) & (place < WIDTH)


@triton.jit
def _to_even(x):
    """Round |x| < 2^22 to whole numbers, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _fp8_code(x, FNUZ: tl.constexpr):
    """Return e4m3 codes (uint8) of fp32 x: saturated, ties to even, NaN kept."""
    LARGEST: tl.constexpr = 240.0 if FNUZ else 448.0
    BIAS: tl.constexpr = 8 if FNUZ else 7
    SMALLEST: tl.constexpr = 0.0078125 if FNUZ else 0.015625  # normal: 2^(1 - BIAS)
    STEPS: tl.constexpr = 1024.0 if FNUZ else 512.0  # below it, 8 codes a SMALLEST
    size = tl.minimum(tl.abs(tl.where(x == x, x, 0.0)), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    below = _to_even(tl.minimum(size, SMALLEST) * STEPS).to(tl.int32)
    code = tl.where(size < SMALLEST, below, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if FNUZ:
        code = tl.where(x != x, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(x != x, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def _fp8_value(code, FNUZ: tl.constexpr):
    """Return the fp32 numbers that e4m3 codes (uint8) stand for."""
    BIAS: tl.constexpr = 8 if FNUZ else 7
    UNIT: tl.constexpr = 0.0009765625 if FNUZ else 0.001953125
    code = code.to(tl.int32)
    size = code & 0x7F
    normal = (size << 20) + ((127 - BIAS) << 23)
    below = (size.to(tl.float32) * UNIT).to(tl.int32, bitcast=True)
    value = (tl.where(size < 8, below, normal) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where(code == 0x80 if FNUZ else size == 0x7F, float("nan"), value)


@triton.jit(do_not_specialize=["N"])
def quantise_kernel(
    x_ptr, scale_ptr, codes_ptr, N, x_stride, scale_stride, codes_stride,
    U: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """codes = x / scale in a format of one byte; grid (ceil(N * U / ROWS) * ceil(GROUP / BLOCK),)."""
    n, u, place, live, ok = _tile(N, U, GROUP, BLOCK, ROWS)
    x = tl.load(x_ptr + n * x_stride + (u * GROUP + place), mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + n * scale_stride + u, mask=live, other=1.0).to(tl.float32)
    ratio = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    if FORMAT == 0:
        code = _to_even(tl.minimum(tl.maximum(tl.where(ratio == ratio, ratio, 0.0), -127.0), 127.0)).to(tl.int8)
    else:
        code = _fp8_code(ratio, FORMAT == 2)
    tl.store(codes_ptr + n * codes_stride + (u * GROUP + place), code, mask=ok)


@triton.jit(do_not_specialize=["N"])
def dequantise_kernel(
    codes_ptr, scale_ptr, x_ptr, N, codes_stride, scale_stride, x_stride,
    U: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """x = codes * scale; grid as ``quantise_kernel``'s."""
    n, u, place, live, ok = _tile(N, U, GROUP, BLOCK, ROWS)
    code = tl.load(codes_ptr + n * codes_stride + (u * GROUP + place), mask=ok, other=0)
    scale = tl.load(scale_ptr + n * scale_stride + u, mask=live, other=1.0).to(tl.float32)
    value = code.to(tl.float32) if FORMAT == 0 else _fp8_value(code, FORMAT == 2)
    tl.store(x_ptr + n * x_stride + (u * GROUP + place), (value * scale).to(x_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _int4_code(x_ptr, scale, minimum, ok):
    x = tl.load(x_ptr, mask=ok, other=0.0).to(tl.float32)
    ratio = tl.div_rn(x - minimum, tl.broadcast_to(scale, x.shape))
    return _to_even(tl.minimum(tl.maximum(tl.where(ratio == ratio, ratio, 0.0), 0.0), 15.0)).to(tl.int32)


@triton.jit(do_not_specialize=["N"])
def quantise_int4_kernel(
    x_ptr, scale_ptr, minimum_ptr, codes_ptr, N, x_stride, scale_stride, minimum_stride, codes_stride,
    U: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """codes = (x - minimum) / scale: byte j of 16 holds columns j and 16 + j of 32; grid over the bytes of groups."""
    n, u, j, live, ok = _tile(N, U, GROUP // 2, BLOCK, ROWS)
    x = x_ptr + n * x_stride + (u * GROUP + (j // 16) * 32 + j % 16)
    scale = tl.load(scale_ptr + n * scale_stride + u, mask=live, other=1.0).to(tl.float32)
    minimum = tl.load(minimum_ptr + n * minimum_stride + u, mask=live, other=0.0).to(tl.float32)
    code = _int4_code(x, scale, minimum, ok) | (_int4_code(x + 16, scale, minimum, ok) << 4)
    tl.store(codes_ptr + n * codes_stride + (u * (GROUP // 2) + j), code.to(tl.uint8), mask=ok)


@triton.jit(do_not_specialize=["N"])
def dequantise_int4_kernel(
    codes_ptr, scale_ptr, minimum_ptr, x_ptr, N, codes_stride, scale_stride, minimum_stride, x_stride,
    U: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x = codes * scale + minimum; grid as ``quantise_int4_kernel``'s."""
    n, u, j, live, ok = _tile(N, U, GROUP // 2, BLOCK, ROWS)
    code = tl.load(codes_ptr + n * codes_stride + (u * (GROUP // 2) + j), mask=ok, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + n * scale_stride + u, mask=live, other=1.0).to(tl.float32)
    minimum = tl.load(minimum_ptr + n * minimum_stride + u, mask=live, other=0.0).to(tl.float32)
    x = x_ptr + n * x_stride + (u * GROUP + (j // 16) * 32 + j % 16)
    low, high = (code & 15).to(tl.float32) * scale + minimum, (code >> 4).to(tl.float32) * scale + minimum
    tl.store(x, low.to(x_ptr.dtype.element_ty), mask=ok)
    tl.store(x + 16, high.to(x_ptr.dtype.element_ty), mask=ok)


def _tiles(N: int, U: int, width: int) -> tuple[int, dict[str, int]]:
    """Return the number of tiles over N * U groups of ``width``, and the places and groups of one."""
    block = min(1024, max(16, triton.next_power_of_2(width)))
    rows = ELEMENTS // block
    return triton.cdiv(N * U, rows) * triton.cdiv(width, block), {"U": U, "BLOCK": block, "ROWS": rows}


def suits(x: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether there is anything to do."""
    return x.numel() > 0, "element by element"


def _quantise(x: Tensor, scale: Tensor, codes: Tensor, number: int) -> Tensor:
    (N, K), bytes_NK = x.shape, codes.view(torch.int8 if number == INT8 else torch.uint8)
    U = scale.shape[1]
    tiles, sizes = _tiles(N, U, K // U)
    quantise_kernel[(tiles,)](
        x, scale, bytes_NK, N, row_stride(x), row_stride(scale), row_stride(codes),
        GROUP=K // U, FORMAT=number, **sizes,
    )  # fmt: skip
    return codes


def _dequantise(codes: Tensor, scale: Tensor, x: Tensor, number: int) -> Tensor:
    (N, K), bytes_NK = codes.shape, codes.view(torch.int8 if number == INT8 else torch.uint8)
    U = scale.shape[1]
    tiles, sizes = _tiles(N, U, K // U)
    dequantise_kernel[(tiles,)](
        bytes_NK, scale, x, N, row_stride(codes), row_stride(scale), row_stride(x),
        GROUP=K // U, FORMAT=number, **sizes,
    )  # fmt: skip
    return x


def run_to_int8(x: Tensor, scale: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``quantise_int8``."""
    return _quantise(x, scale, x.new_empty(x.shape, dtype=torch.int8) if out is None else out[0], INT8)


def run_to_fp8(x: Tensor, scale: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``quantise_fp8``."""
    return _quantise(x, scale, x.new_empty(x.shape, dtype=torch.float8_e4m3fn) if out is None else out[0], FP8)


def run_to_fp8_fnuz(x: Tensor, scale: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``quantise_fp8_fnuz``."""
    return _quantise(x, scale, x.new_empty(x.shape, dtype=torch.float8_e4m3fnuz) if out is None else out[0], FP8_FNUZ)


def run_from_int8(codes: Tensor, scale: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``dequantise_int8``."""
    return _dequantise(codes, scale, scale.new_empty(codes.shape) if out is None else out[0], INT8)


def run_from_fp8(codes: Tensor, scale: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``dequantise_fp8``."""
    number = FP8 if codes.dtype == torch.float8_e4m3fn else FP8_FNUZ
    return _dequantise(codes, scale, scale.new_empty(codes.shape) if out is None else out[0], number)


def run_to_int4(x: Tensor, scale: Tensor, minimum: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``quantise_int4``."""
    (N, J), U = (x.shape[0], x.shape[1] // 2), scale.shape[1]
    codes = x.new_empty((N, J), dtype=torch.uint8) if out is None else out[0]
    tiles, sizes = _tiles(N, U, J // U)
    quantise_int4_kernel[(tiles,)](
        x, scale, minimum, codes, N, row_stride(x), row_stride(scale), row_stride(minimum), row_stride(codes),
        GROUP=2 * J // U, **sizes,
    )  # fmt: skip
    return codes


def run_from_int4(codes: Tensor, scale: Tensor, minimum: Tensor, *, out: Outs = None) -> Tensor:
    """Run ``dequantise_int4``."""
    (N, J), U = codes.shape, scale.shape[1]
    x = scale.new_empty((N, 2 * J)) if out is None else out[0]
    tiles, sizes = _tiles(N, U, J // U)
    dequantise_int4_kernel[(tiles,)](
        codes, scale, minimum, x, N, row_stride(codes), row_stride(scale), row_stride(minimum), row_stride(x),
        GROUP=2 * J // U, **sizes,
    )  # fmt: skip
    return x


def _case(kernel: object, pointers: dict[str, str], group: int, **sizes: int) -> Compiled:
    strides = {f"{name.removesuffix('_ptr')}_stride": "i32:16" for name in pointers}
    width = group // 2 if "minimum_ptr" in pointers else group
    tile = _tiles(1, 4096 // group, width)[1]
    return Compiled(kernel, pointers | {"N": "i32"} | strides, {**tile, "GROUP": group, **sizes})


_SIGNED = {"x_ptr": "*bf16", "scale_ptr": "*bf16", "codes_ptr": "*i8"}
_BYTES = {"x_ptr": "*bf16", "scale_ptr": "*bf16", "codes_ptr": "*u8"}
_INT4 = {"x_ptr": "*bf16", "scale_ptr": "*bf16", "minimum_ptr": "*bf16", "codes_ptr": "*u8"}
COMPILED = (
    _case(quantise_kernel, _SIGNED, 4096, FORMAT=INT8),
    _case(quantise_kernel, _BYTES, 128, FORMAT=FP8),
    _case(quantise_kernel, _BYTES, 128, FORMAT=FP8_FNUZ),
    _case(dequantise_kernel, _SIGNED, 32, FORMAT=INT8),
    _case(dequantise_kernel, _BYTES, 128, FORMAT=FP8),
    _case(dequantise_kernel, _BYTES, 128, FORMAT=FP8_FNUZ),
    _case(quantise_int4_kernel, _INT4, 128),
    _case(dequantise_int4_kernel, _INT4, 32),
)
