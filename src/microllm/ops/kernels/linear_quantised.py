"""Linears with weights of one byte or half a byte: the forms of ``linear``, whose codes are decoded in registers.

Place: operators of ``ops/linear_quantised.py``. Up to 256 rows take the forms for few rows; more take tiles, whose
weights are decoded to x's dtype before the product. Inside ``batch_invariant`` every number of rows takes the mma form.

Numbers: fp32 sums; a scale a row is applied to the sum, scales of groups to each weight, in the mma and tile forms
         rounded to x's dtype; fp8 codes are read as bytes on every target, so that all give the same values
Bytes:   N * K (int4: half of that) and the scales, once for each tile of rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import Out, Outs
from microllm.ops.kernels.launch import Compiled
from microllm.ops.kernels.linear import BF16, Operands, Results, case, multiply, result
from microllm.ops.kernels.linear_choice import Matrix

_FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}


def suits(x: Tensor, codes: Tensor, scale: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether a group is whole blocks of 32 columns."""
    K, U = x.shape[1], scale.shape[1]
    return K > 0 and (U == 1 or K // U % 32 == 0), "one scale a row, or groups of a multiple of 32"


def run_int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Out, *, out: Outs = None) -> Tensor:
    """Run ``linear_int8``."""
    y = result(x, codes.shape[0], out)
    multiply(Operands(op="linear_int8", x=x, w=codes, bias=bias, scale=scale, format="int8"), Results(y=y))
    return y


def run_fp8(x: Tensor, codes: Tensor, scale: Tensor, bias: Out, *, out: Outs = None) -> Tensor:
    """Run ``linear_fp8``."""
    y, w = result(x, codes.shape[0], out), codes.view(torch.uint8)
    multiply(Operands(op="linear_fp8", x=x, w=w, bias=bias, scale=scale, format=_FP8[codes.dtype]), Results(y=y))
    return y


def run_int4(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Out, *, out: Outs = None) -> Tensor:
    """Run ``linear_int4``."""
    y = result(x, codes.shape[0], out)
    o = Operands(op="linear_int4", x=x, w=codes, bias=bias, scale=scale, minimum=minimum, format="int4")
    multiply(o, Results(y=y))
    return y


def _compiled() -> tuple[Compiled, ...]:
    N, K = 9728, 896
    int8 = Matrix("linear_int8", N, K, BF16, "int8")
    int4, fp8 = Matrix("linear_int4", N, K, BF16, "int4"), Matrix("linear_fp8", N, K, BF16, "e4m3fn")
    return (
        *(case(int8, M, "scale", w="*i8") for M in (1, 8, 512)),
        *(case(fp8, M, "scale", w="*u8") for M in (1, 8, 512)),
        *(case(int4, M, "scale", "minimum", w="*u8", group=64) for M in (1, 8, 512)),
        case(int8, 8, "scale", w="*i8", group=64),
        case(Matrix("linear_fp8", N, K, BF16, "e4m3fnuz"), 8, "scale", w="*u8"),
        case(Matrix("linear_int8", 896, 4864, BF16, "int8"), 1, "scale", w="*i8"),
        case(Matrix("linear_int8", 151936, K, BF16, "int8"), 1, "scale", w="*i8"),
    )


COMPILED = _compiled()
