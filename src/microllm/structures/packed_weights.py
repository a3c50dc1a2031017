"""Weights that others quantised, as our matrices: compressed-tensors' int8, fp8, nvfp4, GGUF's q8_0, q4_0, q4_1.

Place: ``adopt`` reads a model's stored tensors through these. Codes are kept where we have the same grid (int8, fp8,
and GGUF's); nvfp4's are not evenly spaced, and become int8 in groups of 32. The conversion's error is reported a layer.

Axes:    N = out, K = in
Source:  compressed-tensors' stored names (weight, weight_packed, weight_scale, weight_global_scale); ggml's blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from microllm.errors import StructureError
from microllm.ops.packed import q8_0_codes
from microllm.structures.formats import Format, Matrix

GROUP = 32
_HEADS = {"q4_0": 2, "q4_1": 4}
"""Bytes of a block before its codes: the scale, and q4_1's minimum."""
_LEAST_SCALE = 1e-7
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of nvfp4's codes; its highest bit is the sign."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One weight as a file holds it: ours, and the values that its own format stands for [N, K] fp32."""

    matrix: Matrix
    values: Tensor

    @property
    def relative_l2(self) -> float:
        """Return the conversion's error over the size of the values."""
        error = self.matrix.dequantised().float() - self.values
        return float(error.norm() / self.values.norm().clamp(min=1e-30))


def from_compressed_tensors(name: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Stored:
    """Return a weight from compressed-tensors' parts.

    Raises:
        StructureError: their dtypes and shapes are of no format that is known here.
    """
    bias, scale = parts.get("bias"), parts.get("weight_scale")
    if scale is None:
        raise StructureError(f"{name}: got parts {sorted(parts)}; need weight_scale beside a packed weight")
    if "weight_packed" in parts:
        values = _nvfp4(name, parts)
        return Stored(Matrix(values.to(dtype), bias, Format("int8", GROUP)), values)
    codes = parts["weight"]
    scale = scale.float().reshape(len(scale) if scale.dim() else 1, -1).expand(len(codes), -1).contiguous()
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn) or codes.shape[1] % scale.shape[1]:
        raise StructureError(
            f"{name}: got codes {codes.dtype} {tuple(codes.shape)} with scales {tuple(scale.shape)}; need int8 or e4m3"
        )
    values = (codes.float().unflatten(1, (scale.shape[1], -1)) * scale[:, :, None]).flatten(1)
    kind = "int8" if codes.dtype == torch.int8 else "fp8"
    format = Format(kind, codes.shape[1] // scale.shape[1] if scale.shape[1] > 1 else 0)
    return Stored(Matrix.of_parts((codes, scale.to(dtype)), bias, format, dtype), values)


def from_gguf(name: str, blocks: Tensor, stored: str, bias: Tensor | None, dtype: torch.dtype) -> Stored:
    """Return a weight from GGUF's blocks [N, bytes of a row].

    Raises:
        StructureError: another type.
    """
    if stored == "q8_0":
        codes, scale = q8_0_codes(blocks)
        values = (codes.float().unflatten(1, (-1, GROUP)) * scale.view(len(codes), -1, 1)).flatten(1)
        parts = codes, scale.view(len(codes), -1).to(dtype)
        return Stored(Matrix.of_parts(parts, bias, Format("int8", GROUP), dtype), values)
    if stored not in _HEADS:
        raise StructureError(f"{name}: got blocks of {stored}; need q8_0, {' or '.join(_HEADS)}")
    units = blocks.unflatten(1, (-1, _HEADS[stored] + GROUP // 2))
    head = units[..., : _HEADS[stored]].contiguous().view(torch.float16).float()
    codes = units[..., _HEADS[stored] :]
    scale, minimum = head[..., 0], -8 * head[..., 0] if stored == "q4_0" else head[..., 1]
    whole = torch.cat((codes & 15, codes >> 4), dim=2).float()
    values = (whole * scale[:, :, None] + minimum[:, :, None]).flatten(1)
    turned = scale < 0  # ggml's q4_0 may be; ours are above 0: codes from the other end, on the same values
    codes, minimum = torch.where(turned[:, :, None], codes ^ 0xFF, codes), torch.where(turned, 7 * scale, minimum)
    scale = scale.abs().clamp(min=_LEAST_SCALE)
    parts = codes.flatten(1).contiguous(), scale.to(dtype).contiguous(), minimum.to(dtype).contiguous()
    return Stored(Matrix.of_parts(parts, bias, Format("int4", GROUP), dtype), values)


def _nvfp4(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    packed, scale = parts["weight_packed"], parts["weight_scale"].float()
    total = parts.get("weight_global_scale")
    if packed.dtype != torch.uint8 or total is None or packed.shape[1] * 2 != scale.shape[1] * 16:
        raise StructureError(
            f"{name}: got {packed.dtype} {tuple(packed.shape)}, scales {tuple(scale.shape)}; need nvfp4: two codes a "
            "byte, a scale for 16, and weight_global_scale"
        )
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    values = table[codes.long()].unflatten(1, (-1, 16))
    return (values * (scale / total.float())[:, :, None]).flatten(1)
