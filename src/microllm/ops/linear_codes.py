"""The fused linears over weights of one byte or half a byte: with RMSNorm before, a residual or SwiGLU after.

What ``linear`` folds in for floats, for the codes of ``quantise``, whose dtype says the format: int8, fp8 e4m3, or
uint8, two four-bit codes a byte. Any of them may have minima beside its scales.

Axes:    K = in, N = out, F = FFN dim, after any leading axes of x; J = columns of the codes: K, or K / 2 of int4;
         U = groups of a weight row
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from microllm.ops.contract import (
    Arg,
    Contract,
    Out,
    Rule,
    Sink,
    Sizes,
    between,
    cases,
    near_one,
    numel,
    rounded,
)
from microllm.ops.linear import MODE_B
from microllm.ops.linear_quantised import (
    LEVELS,
    int4_suits,
    int4_vendor,
    int8_suits,
    int8_vendor,
    linear_fp8,
    linear_int4,
    linear_int8,
)
from microllm.ops.operator import Operator
from microllm.ops.quantise import FP8, MINIMUM, SCALE, scaled, unpacked
from microllm.ops.rms_norm import EPS, norm_reference
from microllm.ops.swiglu import swiglu_reference


def linear_codes(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None = None, bias: Tensor | None = None, *,
    out: Out = None,
) -> Tensor:  # fmt: skip
    """Return x multiplied by the transpose of the quantised weight, plus bias: by the operator of its format.

    Shapes:  x [M, K], codes [N, J], scale and minimum [N, U] (int4 has minima, no other), bias [N] or None -> [M, N]

    Raises:
        OperatorError: as that operator.
    """
    if minimum is not None:
        return linear_int4(x, codes, scale, minimum, bias, out=out)
    return (linear_int8 if codes.dtype == torch.int8 else linear_fp8)(x, codes, scale, bias, out=out)


def norm_linear_codes(
    x: Tensor, norm_weight: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None = None,
    bias: Tensor | None = None, *, eps: float, out: Out = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return rms_norm(x) multiplied by the transpose of the quantised weight, plus bias.

    Shapes:  x [..., K], norm_weight [K], codes [N, J], scale and minimum [N, U], bias [N] or None -> [..., N]
    Numbers: fp32 accumulation; where the normed input is rounded is the level's
    Raises:
        OperatorError: sizes, dtypes or devices differ, groups are no multiples of 32 (one scale a row may be of any
            width), eps is not above 0, or (on a CPU) a scale is not valid.
    """
    return NORM_LINEAR_CODES(x, norm_weight, codes, scale, minimum, bias, eps, out=out, sink=sink)


def linear_residual_codes(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, residual: Tensor, bias: Tensor | None = None, *,
    out: Out = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return residual + (x multiplied by the transpose of the quantised weight, plus bias).

    Shapes:  x [..., K], codes [N, J], scale and minimum [N, U], residual [..., N], bias [N] or None -> [..., N]
    Numbers: fp32 accumulation, rounded once
    Raises:
        OperatorError: as ``norm_linear_codes``.
    """
    return LINEAR_RESIDUAL_CODES(x, codes, scale, minimum, residual, bias, out=out, sink=sink)


def norm_linear_swiglu_codes(
    x: Tensor, norm_weight: Tensor | None, codes: Tensor, scale: Tensor, minimum: Tensor | None = None,
    bias: Tensor | None = None, *, eps: float, out: Out = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return swiglu(gate, up) of the product of rms_norm(x): the first F rows make the gate, the last F rows up.

    Without a norm_weight x is taken as it is: it is normed already.

    Shapes:  x [..., K], norm_weight [K] or None, codes [2 F, J], scale and minimum [2 F, U], bias [2 F] or None ->
             [..., F]
    Numbers: fp32 accumulation; gate and up are not rounded before SwiGLU
    Raises:
        OperatorError: as ``norm_linear_codes``.
    """
    return NORM_LINEAR_SWIGLU_CODES(x, norm_weight, codes, scale, minimum, bias, eps, out=out, sink=sink)


def dequantised(codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """Return what codes of any format stand for: [N, K] fp32."""
    return scaled(unpacked(codes) if codes.dtype == torch.uint8 else codes, scale, minimum)


def _product(x: Tensor, codes: Tensor, scale: Tensor, minimum: Out, bias: Out) -> Tensor:
    return functional.linear(x.float(), dequantised(codes, scale, minimum), None if bias is None else bias.float())


def _norm_reference(
    x: Tensor, g: Out, codes: Tensor, scale: Tensor, minimum: Out, bias: Out, eps: float, sink: Sink = None
) -> Tensor:
    normed = x if g is None else norm_reference(x, g, eps)
    if sink is not None:
        sink.update(normed=normed)
    return _product(normed, codes, scale, minimum, bias).to(x.dtype)


def _residual_reference(
    x: Tensor, codes: Tensor, scale: Tensor, minimum: Out, residual: Tensor, bias: Out, sink: Sink = None
) -> Tensor:
    projected = _product(x, codes, scale, minimum, bias)
    if sink is not None:
        sink.update(projected=projected.to(x.dtype))
    return (residual.float() + projected).to(x.dtype)


def _swiglu_reference(
    x: Tensor, g: Out, codes: Tensor, scale: Tensor, minimum: Out, bias: Out, eps: float, sink: Sink = None
) -> Tensor:
    normed = x if g is None else norm_reference(x, g, eps)
    gate, up = _product(normed, codes, scale, minimum, bias).chunk(2, dim=-1)
    if sink is not None:
        sink.update(normed=normed, gate=gate.to(x.dtype), up=up.to(x.dtype))
    return swiglu_reference(gate, up).to(x.dtype)


def _packed_product(x: Tensor, codes: Tensor, scale: Tensor, minimum: Out, bias: Out) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = int8_vendor(rows, codes, scale, bias) if minimum is None else int4_vendor(rows, codes, scale, minimum, bias)
    return y.view(*x.shape[:-1], codes.shape[0])


def _packed_suits(x: Tensor, codes: Tensor, scale: Tensor, minimum: Out) -> tuple[bool, str]:
    rows = x.reshape(-1, x.shape[-1])
    if codes.dtype == torch.int8 and minimum is None:
        return int8_suits(rows, codes, scale, None)
    if codes.dtype == torch.uint8 and minimum is not None:
        return int4_suits(rows, codes, scale, minimum, None)
    return False, "torch packs int8 without minima, and int4 with them"


def _norm_vendor(x: Tensor, g: Out, codes: Tensor, scale: Tensor, minimum: Out, bias: Out, eps: float) -> Tensor:
    return _packed_product(x if g is None else norm_reference(x, g, eps), codes, scale, minimum, bias)


def _norm_suits(x: Tensor, g: Out, *rest: Any) -> tuple[bool, str]:
    return _packed_suits(x, *rest[:3])


def _residual_vendor(x: Tensor, codes: Tensor, scale: Tensor, minimum: Out, residual: Tensor, bias: Out) -> Tensor:
    return residual + _packed_product(x, codes, scale, minimum, bias)


def _swiglu_vendor(x: Tensor, *rest: Any) -> Tensor:
    return swiglu_reference(*_norm_vendor(x, *rest).chunk(2, dim=-1))


def _draw_codes(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw codes of the format that the sizes tell: half as many as columns are int4, E of fp8's formats, else int8."""
    if 2 * shape[1] == sizes["K"]:
        return between(0, 256)(shape, sizes, torch.uint8, generator)
    return between(-127, 128)(shape, sizes, FP8[sizes["E"]] if "E" in sizes else torch.int8, generator)


def _draw_scale(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    low = 1e-2 if 2 * sizes["J"] == sizes["K"] else 1e-3
    return between(low, 2 * low)(shape, sizes, dtype, generator)


def _draw_minimum(
    shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator
) -> Tensor | None:
    return between(-0.15, -0.1)(shape, sizes, dtype, generator) if 2 * sizes["J"] == sizes["K"] else None


def _rules(at: int) -> tuple[Rule, ...]:
    """Return the rules on codes, of which argument ``at`` is the first; scale and minimum come next."""

    def columns(codes: Tensor) -> int:
        return codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)

    def grouped(*v: Any) -> bool:
        whole = v[at + 1].shape[1] == 1 and v[at + 2] is None and v[at].dtype != torch.uint8
        return columns(v[at]) % ((1 if whole else 32) * v[at + 1].shape[1]) == 0

    wrong = {name: lambda c: c["scale"].new_ones(c["scale"].shape[0], 7) for name in ("scale", "minimum")}
    invalid = tuple({"scale": lambda c, f=f: c["scale"] * f} for f in (0.0, -1.0, math.nan, math.inf))
    return (
        Rule("as many codes a row as x has columns (half as many bytes of int4)",
             lambda *v: columns(v[at]) == v[0].shape[-1], ({"codes": lambda c: c["codes"][:, :16].contiguous()},)),
        Rule("one scale a row, or groups of a multiple of 32 columns", grouped, (wrong,)),
        Rule("finite scales above 0", lambda *v: bool(((v[at + 1] > 0) & v[at + 1].isfinite()).all()), invalid,
             by_value=True),
    )  # fmt: skip


def _weight_bytes(s: Sizes, num_rows: int, itemsize: int) -> int:
    minima = 2 if 2 * s["J"] == s["K"] else 1
    return num_rows * (s["J"] + itemsize * (minima * s["U"] + 1))


def _rows_bytes(s: Sizes, columns: int, itemsize: int) -> int:
    return prod(s["..."]) * columns * itemsize


_X, _BIAS, _Y = Arg("x", "...K"), Arg("bias", "N", optional=True), (Arg("y", "...N"),)
_NORM = Arg("norm_weight", "K", near_one)
_CODES = Arg("codes", "NJ", _draw_codes, (torch.int8, torch.uint8, *FP8))
_SCALE, _MINIMUM = replace(SCALE, draw=_draw_scale), replace(MINIMUM, draw=_draw_minimum, optional=True)
_SIZES = cases(
    "...7 K64 J32 N18 U2", "...17 K192 J96 N33 U3", "... K32 J16 N1 U1", "...7 K65 J65 N33 U1", "... K1 J1 N1 U1",
    "...0 K8 J8 N4 U1", "...2,3 K96 J96 N34 U3", "...3 K96 J96 N7 U1 E0", "...3 K96 J96 N7 U3 E1",
    "...2 K64 J64 N32 U1", "...2 K128 J64 N32 U2",
)  # fmt: skip
_TOLERANCE = rounded(2e-5, 2e-5, times=3, wide=3e-2)

NORM_LINEAR_CODES = Operator(Contract(
    name="norm_linear_codes", args=(_X, _NORM, _CODES, _SCALE, _MINIMUM, _BIAS), results=_Y, scalars={"eps": 1e-5},
    rules=(EPS, *_rules(2)), reference=_norm_reference, vendor=_norm_vendor, vendor_suits=_norm_suits,
    levels=LEVELS, invariant=("triton",), mode_b=MODE_B,
    sink=("normed",), sizes=_SIZES, forward=_TOLERANCE, num_flops=lambda s: 2 * numel(s, "...N") * s["K"],
    traffic=lambda s, i: _weight_bytes(s, s["N"], i) + _rows_bytes(s, s["K"] + s["N"], i) + i * s["K"],
))  # fmt: skip

LINEAR_RESIDUAL_CODES = Operator(Contract(
    name="linear_residual_codes", args=(_X, _CODES, _SCALE, _MINIMUM, Arg("residual", "...N"), _BIAS), results=_Y,
    rules=_rules(1), reference=_residual_reference, vendor=_residual_vendor,
    vendor_suits=lambda *v: _packed_suits(*v[:4]), levels=LEVELS, invariant=("triton",), mode_b=MODE_B,
    sink=("projected",), sizes=_SIZES, forward=_TOLERANCE, num_flops=lambda s: 2 * numel(s, "...N") * s["K"],
    traffic=lambda s, i: _weight_bytes(s, s["N"], i) + _rows_bytes(s, s["K"] + 2 * s["N"], i),
))  # fmt: skip

NORM_LINEAR_SWIGLU_CODES = Operator(Contract(
    name="norm_linear_swiglu_codes", args=(
        _X, replace(_NORM, optional=True), replace(_CODES, axes="2F J"), replace(_SCALE, axes="2F U"),
        replace(_MINIMUM, axes="2F U"), Arg("bias", "2F", optional=True),
    ),
    results=(Arg("y", "...F"),), scalars={"eps": 1e-5}, rules=(EPS, *_rules(2)), reference=_swiglu_reference,
    vendor=_swiglu_vendor, vendor_suits=_norm_suits, levels=LEVELS, invariant=("triton",), mode_b=MODE_B,
    sink=("normed", "gate", "up"), forward=_TOLERANCE,
    sizes=tuple({"F": s["N"], **s} for s in _SIZES), num_flops=lambda s: 4 * numel(s, "...F") * s["K"],
    traffic=lambda s, i: _weight_bytes(s, 2 * s["F"], i) + _rows_bytes(s, s["K"] + s["F"], i) + i * s["K"],
))  # fmt: skip

CODED_LINEARS = (NORM_LINEAR_CODES, LINEAR_RESIDUAL_CODES, NORM_LINEAR_SWIGLU_CODES)
