"""Weights in the formats that a scheme may choose: as they are, int8, int4, fp8; made from a host's floating weights.

Place: implementations hold a ``Matrix`` for each product. Scales and codes are made in ``ops.coding``, products in
``ops``.

    float   the host's dtype
    int8    one scale a row, or a group of columns
    int4    scale and minimum a group, the best of some shrunken ranges by squared error; GPTQ where a Gram is given
    fp8     e4m3 with a scale a row; the input in e4m3 too, by one static scale from calibration

Axes:    M = rows, K = in, N = out, U = groups a row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from microllm import ops
from microllm.errors import StructureError
from microllm.ops.coding import LARGEST_FP8, fp8_parts, int4_ranges, int8_parts
from microllm.ops.linear_codes import dequantised
from microllm.step import Matrix as StepMatrix

FormatName = Literal["float", "int8", "int4", "fp8"]
FORMATS: tuple[FormatName, ...] = ("float", "int8", "int4", "fp8")
_scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
_DAMPING = 0.01


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format. ``group``: columns that share a scale (0: a row has one). ``x_amax``: of fp8, the input's, or
    None where it stays in floating point.
    """

    name: FormatName = "float"
    group: int = 0
    x_amax: float | None = None

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise StructureError(f"got format {self.name!r}; need one of {', '.join(FORMATS)}")
        if self.x_amax is not None and not self.x_amax > 0:
            raise StructureError(f"got {self.name} with an input amax of {self.x_amax}; need a calibrated one above 0")

    @property
    def codes_input(self) -> bool:
        """Return whether the input is turned to codes too."""
        return self.name == "fp8" and self.x_amax is not None


FLOAT = Format()


class Matrix:
    """A matrix and its bias in one format; called with rows, it returns products in their dtype."""

    def __init__(
        self, w_NK: Tensor, bias_N: Tensor | None = None, format: Format = FLOAT, gram: Tensor | None = None
    ) -> None:  # fmt: skip
        num_in = w_NK.shape[1]
        group = format.group or num_in
        if num_in % group or (format.name == "int4" and group % 32):
            raise StructureError(
                f"got {tuple(w_NK.shape)} in groups of {group}; need K a multiple of it, of 32 in int4"
            )
        match format.name:
            case "float":
                parts: tuple[Tensor, ...] = (w_NK.detach().contiguous(),)
            case "int8":
                parts = int8_parts(w_NK.detach(), group)
            case "int4":
                parts = int4_parts(w_NK.detach(), group, None if gram is None else gram.to(w_NK.device))
            case _:
                parts = fp8_parts(w_NK.detach())
        self._hold(parts, bias_N, format, w_NK.dtype)

    @classmethod
    def of_parts(cls, parts: tuple[Tensor, ...], bias_N: Tensor | None, format: Format, dtype: torch.dtype) -> Matrix:
        """Return a matrix of codes and scales that somebody else made."""
        made = cls.__new__(cls)
        made._hold(parts, bias_N, format, dtype)
        return made

    def _hold(self, parts: tuple[Tensor, ...], bias_N: Tensor | None, format: Format, dtype: torch.dtype) -> None:
        self.parts, self.format, self.bias, self.dtype = parts, format, bias_N, dtype
        self.num_out, columns = parts[0].shape
        self.num_in = 2 * columns if format.name == "int4" else columns
        scale = max((format.x_amax or 0) / LARGEST_FP8, 1e-8)
        self._x_scale = torch.full((1, 1), scale, device=parts[0].device, dtype=torch.float32)
        self._tensor_cores = format.codes_input and self._takes_scaled_mm()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of codes, scales and minima."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    @property
    def weights(self) -> StepMatrix:
        """Return codes or floats as the fused operators take them; they leave the input in floating point."""
        w, *scales = self.parts
        return StepMatrix(w, self.bias, *scales)

    @property
    def kernel(self) -> str:
        """Return what multiplies."""
        return (
            "torch._scaled_mm"
            if self._tensor_cores
            else {"float": "linear"}.get(self.format.name, f"linear_{self.format.name}")
        )

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias: [M, N]."""
        return self._fp8(x_MK) if self.format.codes_input else self.weights.linear(x_MK)

    def plain(self, x_MK: Tensor) -> Tensor:
        """Return the same by torch's own call, where the weights are floats."""
        return functional.linear(x_MK, self.parts[0], self.bias) if self.format.name == "float" else self(x_MK)

    def dequantised(self) -> Tensor:
        """Return the values that the codes stand for: [N, K] in the host's dtype."""
        return self.parts[0] if self.format.name == "float" else dequantised(*self.parts).to(self.dtype)

    def _fp8(self, x_MK: Tensor) -> Tensor:
        w, w_scale = self.parts
        scale = self._x_scale.expand(len(x_MK), 1)
        codes = ops.quantise_fp8(x_MK.contiguous(), scale.contiguous())
        if self._tensor_cores:
            y_MN = _scaled_mm(
                codes, self.parts[0].T, scale_a=scale.contiguous(), scale_b=self.parts[1].float().T.contiguous(),
                out_dtype=torch.bfloat16,
            )  # fmt: skip
            return y_MN if self.bias is None else y_MN + self.bias
        return ops.linear_fp8((codes.float() * self._x_scale).to(x_MK.dtype), w, w_scale, self.bias)

    def _takes_scaled_mm(self) -> bool:
        """Try torch's fp8 product once, with an odd number of rows, against plain arithmetic."""
        codes, scale = self.parts
        if not codes.is_cuda or self.dtype != torch.bfloat16 or self.num_in % 16 or self.num_out % 16:
            return False
        x = torch.ones(5, self.num_in, device=codes.device).to(torch.float8_e4m3fn)
        one = torch.ones(5, 1, device=codes.device)
        try:
            y = _scaled_mm(x, codes.T, scale_a=one, scale_b=scale.float().T.contiguous(), out_dtype=torch.bfloat16)
        except RuntimeError:
            return False
        return torch.allclose(y.float(), x.float() @ dequantised(codes, scale).T, rtol=0.02, atol=0.5)


def int4_parts(w_NK: Tensor, group: int, gram_KK: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes [N, K / 2], scales and minima [N, U]; with the inputs' Gram matrix, by GPTQ."""
    importance = None if gram_KK is None else gram_KK.diagonal()
    scale, minimum = int4_ranges(w_NK, group, importance)
    w = w_NK if gram_KK is None else gptq(w_NK, scale, minimum, gram_KK)
    return ops.quantise_int4(w.to(w_NK.dtype).contiguous(), scale, minimum), scale, minimum


def gptq(w_NK: Tensor, scale_NU: Tensor, minimum_NU: Tensor, gram_KK: Tensor) -> Tensor:
    """Return weights on the grid that scales and minima span, each column's error passed on to columns still to come.

    Columns go in the order of their inputs' energy; a group keeps its own scale whatever the order.

    Numbers: fp32 (the inverse of the damped Gram matrix by Cholesky in fp64)
    Source:  arXiv:2210.17323
    """
    K = w_NK.shape[1]
    energy = gram_KK.diagonal().double()
    order = energy.argsort(descending=True)
    damped = gram_KK.double()[order][:, order]
    damped.diagonal().add_(_DAMPING * energy.mean().clamp(min=1e-12))
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    group_of = torch.arange(K, device=w_NK.device)[order] // (K // scale_NU.shape[1])
    w, done = w_NK.float()[:, order].clone(), torch.empty_like(w_NK, dtype=torch.float32)
    for i in range(K):
        step, start = scale_NU[:, group_of[i]].float(), minimum_NU[:, group_of[i]].float()
        kept = ((w[:, i] - start) / step).round().clamp(0, 15) * step + start
        error = (w[:, i] - kept) / factor[i, i]
        w[:, i:] -= error[:, None] * factor[i, i:]
        done[:, i] = kept
    return done[:, order.argsort()]


def hollow(data: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device that takes one element of memory: NaN everywhere."""
    return data.new_full((1,), torch.nan).expand(data.shape)


def stack(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices or biases one under the other."""
    return torch.cat([m.detach() for m in matrices])
