"""Quantise and dequantise: int8, fp8 and int4 codes with a scale for each group of a row.

A row of K values is cut into U equal groups (U = 1: one scale an output channel), each with a scale, int4 with a
minimum too: value = code * scale (+ minimum). Four-bit codes are stored two a byte, in blocks of 32 along K: byte j
of a block holds code j in its low half and code 16 + j in its high half, which is GGUF's order.

Axes:    N = rows, K = columns, J = K / 2 bytes, U = groups a row
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from microllm.ops.contract import EXACT, FLOATS, TRITON, Arg, Contract, Out, Rule, Sizes, between, cases, rounded
from microllm.ops.operator import Operator

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def quantise_int8(x: Tensor, scale: Tensor, *, out: Out = None) -> Tensor:
    """Return round(x / scale) as int8, ties to even, saturated at -127 and 127; NaN gives 0.

    Shapes:  x [N, K], scale [N, U] -> [N, K]

    Raises:
        OperatorError: K is no multiple of U, or (on a CPU) a scale is not finite and above 0.
    """
    return QUANTISE_INT8(x, scale, out=out)


def dequantise_int8(codes: Tensor, scale: Tensor, *, out: Out = None) -> Tensor:
    """Return codes * scale in scale's dtype.

    Shapes:  codes int8 [N, K], scale [N, U] -> [N, K]

    Raises:
        OperatorError: as ``quantise_int8``.
    """
    return DEQUANTISE_INT8(codes, scale, out=out)


def quantise_fp8(x: Tensor, scale: Tensor, *, fnuz: bool = False, out: Out = None) -> Tensor:
    """Return x / scale as fp8 e4m3, ties to even, saturated at the format's largest number; NaN stays NaN.

    Shapes:  x [N, K], scale [N, U] -> [N, K]
    Numbers: largest 448 (e4m3fn), or 240 with ``fnuz`` (the format of AMD's gfx942)

    Raises:
        OperatorError: as ``quantise_int8``.
    """
    return (QUANTISE_FP8_FNUZ if fnuz else QUANTISE_FP8)(x, scale, out=out)


def dequantise_fp8(codes: Tensor, scale: Tensor, *, out: Out = None) -> Tensor:
    """Return codes * scale in scale's dtype; the codes may be of either e4m3 format.

    Shapes:  codes fp8 [N, K], scale [N, U] -> [N, K]

    Raises:
        OperatorError: as ``quantise_int8``.
    """
    return DEQUANTISE_FP8(codes, scale, out=out)


def quantise_int4(x: Tensor, scale: Tensor, minimum: Tensor, *, out: Out = None) -> Tensor:
    """Return round((x - minimum) / scale) as packed codes, ties to even, saturated at 0 and 15; NaN gives 0.

    Shapes:  x [N, 2 J], scale and minimum [N, U] -> uint8 [N, J]

    Raises:
        OperatorError: 2 J is no multiple of U or of 32, or (on a CPU) a scale is not finite and above 0.
    """
    return QUANTISE_INT4(x, scale, minimum, out=out)


def dequantise_int4(codes: Tensor, scale: Tensor, minimum: Tensor, *, out: Out = None) -> Tensor:
    """Return codes * scale + minimum in scale's dtype.

    Shapes:  codes uint8 [N, J], scale and minimum [N, U] -> [N, 2 J]

    Raises:
        OperatorError: as ``quantise_int4``.
    """
    return DEQUANTISE_INT4(codes, scale, minimum, out=out)


def unpacked(codes: Tensor) -> Tensor:
    """Return four-bit codes one a byte: uint8 [N, J] -> uint8 [N, 2 J]."""
    blocks = codes.unflatten(1, (-1, 16))
    return torch.cat((blocks & 15, blocks >> 4), dim=2).flatten(1)


def _packed(codes: Tensor) -> Tensor:
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 32)).chunk(2, dim=2)
    return (low | high << 4).flatten(1)


def grouped(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in fp32 as [N, U, K / U], and scale in fp32 as [N, U, 1]."""
    return x.float().unflatten(1, (scale.shape[1], -1)), scale.float().unsqueeze(2)


def scaled(codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """Return codes * scale (+ minimum) in fp32: [N, K] -> [N, K]."""
    values, factor = grouped(codes, scale)
    values = values * factor
    return (values if minimum is None else values + minimum.float().unsqueeze(2)).flatten(1)


def _divided(x: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    values, factor = grouped(x, scale)
    return ((values if minimum is None else values - minimum.float().unsqueeze(2)) / factor).flatten(1)


def _to_fp8(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    largest = torch.finfo(dtype).max
    return lambda x, scale: _divided(x, scale).clamp(-largest, largest).to(dtype)


def _to_int8(x: Tensor, scale: Tensor) -> Tensor:
    return _divided(x, scale).round().clamp(-127, 127).nan_to_num(0).to(torch.int8)


def _to_int4(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return _packed(_divided(x, scale, minimum).round().clamp(0, 15).nan_to_num(0))


SCALE = Arg("scale", "NU", between(0.01, 0.02), FLOATS)
MINIMUM = Arg("minimum", "NU", between(-0.15, -0.1), FLOATS)
INT8 = Arg("codes", "NK", between(-127, 128), (torch.int8,))
INT4 = Arg("codes", "NJ", between(0, 256), (torch.uint8,))
FP8_CODES = Arg("codes", "NK", dtypes=FP8)
_X, _SIZES = Arg("x", "NK"), cases("N6 K64 U2", "N1 K1 U1", "N5 K99 U3")
_X4, _SIZES4 = Arg("x", "N 2J"), cases("N6 J64 U2", "N1 J16 U1")


def scale_rules(first: int, *, packed: int = 1, block: int = 1) -> tuple[Rule, ...]:
    """Return the rules on scales: argument ``first`` has N rows of K / ``packed`` elements, the next is the scale."""
    wrong = {"scale": lambda c: c["scale"].new_ones(c["scale"].shape[0], 7)}
    wrong = wrong if block == 1 else {**wrong, "minimum": wrong["scale"]}
    infinite = tuple({"scale": lambda c, f=f: c["scale"] * f} for f in (0.0, -1.0, math.nan, math.inf))
    words = "K a multiple of U" if block == 1 else f"K / U a multiple of {block}"
    return (
        Rule(words, lambda *v: packed * v[first].shape[1] % (block * v[first + 1].shape[1]) == 0, (wrong,)),
        Rule("finite scales above 0", lambda *v: _all_valid(v[first + 1]), infinite, by_value=True),
    )


def _all_valid(scale: Tensor) -> bool:
    return bool(((scale > 0) & scale.isfinite()).all())


def _flops(s: Sizes) -> int:
    return 2 * s["N"] * (s["K"] if "K" in s else 2 * s["J"])


def _quantiser(name: str, reference: Callable[..., Tensor], dtype: torch.dtype) -> Operator:
    return Operator(Contract(
        name=name, args=(_X, SCALE), results=(Arg("codes", "NK", dtypes=(dtype,)),), rules=scale_rules(0),
        reference=reference, levels=TRITON, invariant=("triton",), sizes=_SIZES, forward=EXACT, num_flops=_flops,
    ))  # fmt: skip


def _dequantiser(name: str, codes: Arg, scale: Arg) -> Operator:
    return Operator(Contract(
        name=name, args=(codes, replace(scale, dtypes=())), results=(Arg("x", "NK"),), rules=scale_rules(0),
        reference=lambda codes, scale: scaled(codes, scale).to(scale.dtype), sizes=_SIZES,
        levels=TRITON, invariant=("triton",), forward=rounded(1e-7, 1e-7), num_flops=_flops,
    ))  # fmt: skip


QUANTISE_INT8 = _quantiser("quantise_int8", _to_int8, torch.int8)
QUANTISE_FP8 = _quantiser("quantise_fp8", _to_fp8(FP8[0]), FP8[0])
QUANTISE_FP8_FNUZ = _quantiser("quantise_fp8_fnuz", _to_fp8(FP8[1]), FP8[1])
DEQUANTISE_INT8 = _dequantiser("dequantise_int8", INT8, SCALE)
DEQUANTISE_FP8 = _dequantiser("dequantise_fp8", FP8_CODES, SCALE)
QUANTISE_INT4 = Operator(Contract(
    name="quantise_int4", args=(_X4, SCALE, MINIMUM), results=(Arg("codes", "NJ", dtypes=(torch.uint8,)),),
    rules=scale_rules(0, block=32), reference=_to_int4, sizes=_SIZES4, forward=EXACT, num_flops=_flops,
    levels=TRITON, invariant=("triton",),
))  # fmt: skip
DEQUANTISE_INT4 = Operator(Contract(
    name="dequantise_int4", args=(INT4, replace(SCALE, dtypes=()), replace(MINIMUM, dtypes=())),
    results=(Arg("x", "N 2J"),), rules=scale_rules(0, packed=2, block=32),
    reference=lambda codes, scale, minimum: scaled(unpacked(codes), scale, minimum).to(scale.dtype), sizes=_SIZES4,
    levels=TRITON, invariant=("triton",), forward=rounded(1e-6, 1e-6), num_flops=_flops,
))  # fmt: skip

QUANTISERS = (
    QUANTISE_INT8, QUANTISE_FP8, QUANTISE_FP8_FNUZ, QUANTISE_INT4, DEQUANTISE_INT8, DEQUANTISE_FP8, DEQUANTISE_INT4,
)  # fmt: skip
