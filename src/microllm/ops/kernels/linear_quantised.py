"""Linears with weights of one byte or half a byte: the forms of ``linear``, whose codes are decoded in registers.

Place: operators of ``ops/linear_quantised.py`` and ``ops/linear_codes.py``. Up to 256 rows take the forms for few rows;
more take tiles, whose weights are decoded to x's dtype before the product. Inside ``batch_invariant`` every number of
rows takes the mma form.

Numbers: fp32 sums; a scale a row is applied to the sum, scales of groups to each weight, in the mma and tile forms
         rounded to x's dtype; fp8 codes are read as bytes on every target, so that all give the same values
Bytes:   N * K (int4: half of that) and the scales, once for each tile of rows
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from microllm.ops.contract import Out, Outs, Sink
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


def suits_codes(x: Tensor, *_: object) -> tuple[bool, str]:
    """Say that any number of rows will do."""
    return x.shape[-1] > 0, "K above 0"


def _coded(op: str, x: Tensor, codes: Tensor, scale: Tensor, minimum: Out, bias: Out) -> Operands:
    """Return the operands of a product by codes of any format; tuned entries know the operator by that too."""
    plain = {torch.int8: "int8", torch.uint8: "int4"}
    format, w = (plain[codes.dtype], codes) if codes.dtype in plain else (_FP8[codes.dtype], codes.view(torch.uint8))
    return Operands(op=f"{op}_{format}", x=x, w=w, bias=bias, scale=scale, minimum=minimum, format=format)


def run_norm(
    x: Tensor, norm_weight: Tensor, codes: Tensor, scale: Tensor, minimum: Out, bias: Out, eps: float, *,
    out: Outs = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Run ``norm_linear_codes``."""
    y = result(x, codes.shape[0], out)
    o = replace(_coded("norm_linear", x, codes, scale, minimum, bias), gain=norm_weight, eps=eps)
    if sink is not None:
        sink.update(normed=x.new_empty(x.shape))
    multiply(o, Results(y=y, normed=sink and sink["normed"]))
    return y


def run_residual(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Out, residual: Tensor, bias: Out, *, out: Outs = None,
    sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Run ``linear_residual_codes``."""
    y = result(x, codes.shape[0], out)
    o = replace(_coded("linear_residual", x, codes, scale, minimum, bias), residual=residual)
    if sink is not None:
        sink.update(projected=torch.empty_like(y))
    multiply(o, Results(y=y, first=sink and sink["projected"]))
    return y


def run_norm_swiglu(
    x: Tensor, norm_weight: Out, codes: Tensor, scale: Tensor, minimum: Out, bias: Out, eps: float, *,
    out: Outs = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Run ``norm_linear_swiglu_codes``."""
    y = result(x, codes.shape[0] // 2, out)
    o = _coded("norm_linear_swiglu", x, codes, scale, minimum, bias)
    o = replace(o, gain=norm_weight, eps=eps, swiglu=True)
    if sink is not None:
        sink.update(normed=x.clone() if norm_weight is None else x.new_empty(x.shape))
        sink.update(gate=torch.empty_like(y), up=torch.empty_like(y))
    multiply(o, Results(y=y, normed=sink and sink["normed"], first=sink and sink["gate"], second=sink and sink["up"]))
    return y


def _folded() -> tuple[Compiled, ...]:
    """Return the cases of Qwen2.5-0.5B's layer in each format, one row and eight."""
    found: list[Compiled] = []
    for format, kind, group in (("int8", "*i8", 0), ("int4", "*u8", 32), ("e4m3fn", "*u8", 0)):
        coded = ("scale", "minimum") if group else ("scale",)
        qkv = Matrix(f"norm_linear_{format}", 1152, 896, BF16, format, normed=True)
        gate_up = Matrix(f"norm_linear_swiglu_{format}", 9728, 896, BF16, format, swiglu=True, normed=True)
        down = Matrix(f"linear_residual_{format}", 896, 4864, BF16, format)
        for M in (1, 8):  # from two rows on, an engine norms before
            found += [
                case(qkv, M, *coded, "gain", "bias", w=kind, group=group),
                case(gate_up if M == 1 else gate_up._replace(normed=False), M, *coded, *("gain",) * (M == 1), w=kind,
                     group=group),
                case(down, M, *coded, "residual", w=kind, group=group),
            ]  # fmt: skip
    return tuple(found)


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
        *(case(Matrix("linear_int8", 151936, K, BF16, "int8"), M, "scale", w="*i8", group=64) for M in (1, 8)),
        *_folded(),
    )


COMPILED = _compiled()
