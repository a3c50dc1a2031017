"""Linear with weights of one byte or half a byte: int8, fp8 e4m3 and int4, dequantised on the way in.

Codes, scales and minima are those of ``quantise``. Activations stay in floating point.

Axes:    M = rows, K = in (2 J for int4), N = out, U = groups of a weight row
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from microllm.ops.contract import TRITON, VENDOR_ON_CPU, Arg, Contract, Out, Sizes, between, cases, rounded
from microllm.ops.linear import MODE_B
from microllm.ops.operator import Operator
from microllm.ops.quantise import FP8_CODES, INT4, INT8, MINIMUM, SCALE, scale_rules, scaled, unpacked


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, out: Out = None) -> Tensor:
    """Return x multiplied by the transpose of the int8 weight, plus bias.

    Shapes:  x [M, K], codes int8 [N, K], scale [N, U], bias [N] or None -> [M, N]
    Numbers: fp32 accumulation, rounded once; torch's packed product (CPU) rounds the sum before the bias
    Raises:
        OperatorError: sizes, dtypes or devices differ, K is no multiple of U, or (on a CPU) a scale is not valid.
    """
    return LINEAR_INT8(x, codes, scale, bias, out=out)


def linear_fp8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, out: Out = None) -> Tensor:
    """Return x multiplied by the transpose of the fp8 e4m3 weight (either format), plus bias.

    Shapes:  x [M, K], codes fp8 [N, K], scale [N, U], bias [N] or None -> [M, N]
    Numbers: fp32 accumulation, rounded once
    Raises:
        OperatorError: as ``linear_int8``.
    """
    return LINEAR_FP8(x, codes, scale, bias, out=out)


def linear_int4(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None, *, out: Out = None
) -> Tensor:
    """Return x multiplied by the transpose of the int4 weight, plus bias.

    Shapes:  x [M, 2 J], codes uint8 [N, J], scale and minimum [N, U], bias [N] or None -> [M, N]
    Numbers: fp32 accumulation, rounded once; torch's packed product (CPU) rounds the sum before the bias
    Raises:
        OperatorError: as ``linear_int8``; groups are multiples of 32.
    """
    return LINEAR_INT4(x, codes, scale, minimum, bias, out=out)


def _reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x.float(), scaled(codes, scale), None if bias is None else bias.float()).to(x.dtype)


def _int4_reference(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None) -> Tensor:
    w = scaled(unpacked(codes), scale, minimum)
    return functional.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)


def int8_vendor(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by torch's packed int8 product."""
    y = torch.ops.aten._weight_int8pack_mm(x, codes, scale[:, 0])
    return y if bias is None else y + bias


def int8_suits(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[bool, str]:
    """Say whether that takes a call."""
    if x.dtype != torch.bfloat16 or scale.dtype != x.dtype:
        return False, "torch's packed int8 product is fast with x and scale in bf16 only"
    suits = scale.shape[1] == 1 and x.shape[1] % 32 == 0 and x.is_contiguous()  # other K read past the end
    return suits, "torch's packed int8 product, for one scale a row, K a multiple of 32, contiguous x"


_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Codes -> what they were packed from, torch's packing, its scales and zeros: a second copy, dropped with the codes."""


def int4_vendor(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by torch's packed int4 product, packing codes at the first call."""
    stamp = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in (codes, scale, minimum)]
    if codes not in _packed or _packed[codes][0] != stamp:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpacked(codes).int(), 1)
        _packed[codes] = stamp, packed, torch.stack((scale, minimum + 8 * scale), dim=-1).transpose(0, 1).contiguous()
    _, packed, scale_and_zero = _packed[codes]
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, x.shape[1] // scale.shape[1], scale_and_zero)
    return y if bias is None else y + bias


def int4_suits(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None) -> tuple[bool, str]:
    """Say whether that takes a call."""
    if x.dtype != torch.bfloat16 or scale.dtype != x.dtype or minimum.dtype != x.dtype:
        return False, "torch's packed int4 product is fast with x, scale and minimum in bf16 only"
    if codes.shape[0] % 16 or x.shape[1] // scale.shape[1] not in (32, 64, 128) or not x.is_contiguous():
        return False, "torch's packed int4 product takes N a multiple of 16, groups of 32, 64 or 128, contiguous x"
    return True, "torch's packed int4 product, weights packed at the first call"


LEVELS = {**VENDOR_ON_CPU, "cuda": ("triton", "reference")}
_TOLERANCE = rounded(2e-5, 2e-5, times=2, wide=2e-2)
_INT8_SCALE, _FP8_SCALE = replace(SCALE, draw=between(1e-3, 2e-3)), replace(SCALE, draw=between(0.05, 0.1))
_X, _BIAS, _Y = Arg("x", "MK"), Arg("bias", "N", optional=True), (Arg("y", "MN"),)


def _flops(s: Sizes) -> int:
    return 2 * s["M"] * s["N"] * (s["K"] if "K" in s else 2 * s["J"])


_SIZES = cases("M7 K128 N33 U4", "M1 K1 N1 U1", "M65 K192 N48 U3", "M0 K8 N4 U1", "M3 K577 N5 U1", "M5 K96 N7 U1")

LINEAR_INT8 = Operator(Contract(
    name="linear_int8", args=(_X, INT8, _INT8_SCALE, _BIAS), results=_Y, rules=scale_rules(1), reference=_reference,
    vendor=int8_vendor, vendor_suits=int8_suits, levels=LEVELS, invariant=("triton",), mode_b=MODE_B, sizes=_SIZES,
    forward=_TOLERANCE, num_flops=_flops,
))  # fmt: skip
LINEAR_FP8 = Operator(Contract(
    name="linear_fp8", args=(_X, FP8_CODES, _FP8_SCALE, _BIAS), results=_Y, rules=scale_rules(1),
    reference=_reference, levels=TRITON, invariant=("triton",), mode_b=MODE_B, sizes=_SIZES, forward=_TOLERANCE,
    num_flops=_flops,
))  # fmt: skip
LINEAR_INT4 = Operator(Contract(
    name="linear_int4", args=(Arg("x", "M 2J"), INT4, SCALE, MINIMUM, _BIAS), results=_Y,
    rules=scale_rules(1, packed=2, block=32), reference=_int4_reference, vendor=int4_vendor,
    vendor_suits=int4_suits, levels=LEVELS, invariant=("triton",), mode_b=MODE_B,
    sizes=cases("M7 J64 N32 U4", "M1 J16 N1 U1", "M65 J128 N48 U2"),
    forward=_TOLERANCE, num_flops=_flops,
))  # fmt: skip
