"""Weights packed for a CPU: each matrix once, in the form that torch's CPU libraries multiply fastest.

Place: the CPU's decode plan and structures hold these in place of plain matrices. A packed weight is called with any
number of rows; ``bind`` fixes one row's buffer, so that a decode step is a list of calls with nothing left to work
out. Does not know a model and reads no files. Inference only.

Axes:    M = rows, K = in, N = out
Source:  torch's own packed products: ATen ``_weight_int4pack_mm_for_cpu`` (groups of 32, activations in bf16: with
         fp32 ones it is 30 times slower), oneDNN's reordered weights through ``torch.ops.mkldnn``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from microllm.errors import OperatorError
from microllm.ops.quantise import unpacked

GROUP = 32
MAX_NARROW_ROWS = 8
"""Rows that an int4 product takes itself; more rows are quicker through a wide weight (measured: 2 x at 32 rows)."""

Product = Callable[[], Tensor]
Planes = tuple[Tensor, Tensor]
"""Packed four-bit codes, and the scale and zero of each group."""
_int4_product = torch._weight_int4pack_mm_for_cpu  # the quickest of its names: a decode step has over a hundred calls


class PackedWeight(Protocol):
    """A matrix and its bias, ready to be multiplied."""

    kernel: str
    """What multiplies one row, for reports."""

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias: [M, N], in the weight's own result dtype."""
        ...

    def bind(self, x_1K: Tensor) -> Product:
        """Return a call that multiplies what ``x_1K`` (fp32) then holds."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes that one row's product reads."""
        ...


def has_bf16() -> bool:
    """Return whether this CPU multiplies bf16 by itself, so that oneDNN's bf16 products are quick."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class DenseWeight:
    """A matrix of floats, reordered by oneDNN where torch has it (else as it is).

    Numbers: fp32 accumulation; the result in the weight's dtype
    """

    def __init__(self, w_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._dtype, self._bias = w_NK.dtype, None if bias_N is None else bias_N.to(w_NK.dtype)
        self._num_bytes = w_NK.numel() * w_NK.element_size()
        name = str(w_NK.dtype).removeprefix("torch.")
        if torch.backends.mkldnn.is_available() and (w_NK.dtype == torch.float32 or has_bf16()):
            self._product = torch.ops.mkldnn._linear_pointwise.default
            self._weight = torch.ops.mkldnn._reorder_linear_weight(w_NK.contiguous())
            self._tail, self.kernel = ("none", [], ""), f"oneDNN {name}"
        else:
            self._product, self._weight, self._tail = functional.linear, w_NK.contiguous(), ()
            self.kernel = f"torch linear {name}"

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias: [M, N] in the weight's dtype."""
        return self._product(x_MK.to(self._dtype), self._weight, self._bias, *self._tail)

    def bind(self, x_1K: Tensor) -> Product:
        """Return a call that multiplies what ``x_1K`` (fp32) then holds."""
        product, weight, bias, tail = self._product, self._weight, self._bias, self._tail
        if self._dtype == torch.float32:
            return lambda: product(x_1K, weight, bias, *tail)
        row = torch.empty_like(x_1K, dtype=self._dtype)
        return lambda: product(row.copy_(x_1K), weight, bias, *tail)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that one row's product reads."""
        return self._num_bytes


class Int4Weight:
    """A matrix of four-bit codes in groups of 32 along K, for torch's packed int4 product; or of eight-bit codes.

    A code's value is (code - 8) * scale + zero. Eight-bit codes are two four-bit ones, the high halves beside the low
    along K, with the row of activations written twice: exact, in one product. ``wide`` returns the same matrix in
    floats [N, K]; it is asked for once, at the first product of more than 8 rows.

    Numbers: scales, zeros, activations and result in bf16, fp32 accumulation
    """

    def __init__(self, planes: Planes, num_in: int, bias_N: Tensor | None, wide: Callable[[], Tensor]) -> None:
        self.planes, self._bias = planes, bias_N
        self._num_in, self._num_planes = num_in, GROUP * len(planes[1]) // num_in
        self._make_wide, self._wide = wide, None
        self.kernel = f"torch int{4 * self._num_planes}"

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias: [M, N]."""
        if len(x_MK) > MAX_NARROW_ROWS:
            if self._wide is None:
                self._wide = DenseWeight(self._make_wide(), self._bias)
            return self._wide(x_MK)
        y_MN = _int4_product(x_MK.to(torch.bfloat16).repeat(1, self._num_planes), self.planes[0], GROUP, self.planes[1])
        return y_MN if self._bias is None else y_MN + self._bias

    def bind(self, x_1K: Tensor) -> Product:
        """Return a call that multiplies what ``x_1K`` (fp32) then holds."""
        row = x_1K.new_empty(1, self._num_planes * self._num_in, dtype=torch.bfloat16)
        parts, bias, (codes, scales) = row.view(self._num_planes, -1), self._bias, self.planes

        def product() -> Tensor:
            parts.copy_(x_1K)
            return _int4_product(row, codes, GROUP, scales)

        return product if bias is None else lambda: product() + bias

    @property
    def num_bytes(self) -> int:
        """Return the bytes that one row's product reads."""
        return sum(t.numel() * t.element_size() for t in self.planes)


def int4_planes(blocks_NB: Tensor, stored: str) -> Planes:
    """Return GGUF blocks (q4_0, q4_1, q8_0) as planes for ``Int4Weight``.

    Shapes:  uint8 [N, bytes of a row] -> packed codes, and scales and zeros bf16 [groups, N, 2]
    Numbers: codes exact; scale and zero round to bf16 (2e-3 of a group's step)

    Raises:
        OperatorError: another type, or N is no multiple of 16.
    """
    N = len(blocks_NB)
    if stored not in _SPLIT or N % 16:
        raise OperatorError(
            f"got {stored} with {N} rows; need one of {', '.join(_SPLIT)}, with a multiple of 16; pack it as floats"
        )
    return _SPLIT[stored](blocks_NB)


def quantised_planes(w_NK: Tensor, bits: int) -> Planes:
    """Return a float matrix rounded group by group: to 16 even steps from least to largest, or to 255 about 0."""
    codes, scale, offset = _quantised(w_NK, bits)
    if bits == 8:
        return _two_planes(codes.to(torch.int16).flatten(1), scale)
    return _planes(codes.flatten(1), scale, offset + 8 * scale)


def rounded(w_NK: Tensor, bits: int) -> Tensor:
    """Return what ``quantised_planes`` holds of a float matrix: [N, K] fp32."""
    codes, scale, offset = _quantised(w_NK, bits)
    return (codes * scale[..., None] + offset[..., None]).flatten(1)


def _quantised(w_NK: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, U, 32], and the scale and offset of each group [N, U]."""
    groups = w_NK.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    steps, offset = (15, low) if bits == 4 else (127, torch.zeros_like(low))
    span = high - low if bits == 4 else torch.maximum(high, -low)
    scale = (span / steps).clamp(min=torch.finfo(torch.float32).tiny)
    return ((groups - offset[..., None]) / scale[..., None]).round_(), scale, offset


def _planes(codes_NK: Tensor, scale_NU: Tensor, zero_NU: Tensor) -> Planes:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK.int().contiguous(), 1)
    return packed, torch.stack((scale_NU, zero_NU), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()


def _half(blocks: Tensor, offset: int) -> Tensor:
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0].float()


def _split_q4_0(blocks_NB: Tensor) -> Planes:
    blocks = blocks_NB.unflatten(1, (-1, 18))
    scale = _half(blocks, 0)
    return _planes(unpacked(blocks[..., 2:].flatten(1)), scale, torch.zeros_like(scale))


def _split_q4_1(blocks_NB: Tensor) -> Planes:
    blocks = blocks_NB.unflatten(1, (-1, 20))
    scale = _half(blocks, 0)
    return _planes(unpacked(blocks[..., 4:].flatten(1)), scale, _half(blocks, 2) + 8 * scale)


def _split_q8_0(blocks_NB: Tensor) -> Planes:
    blocks = blocks_NB.unflatten(1, (-1, 34))
    codes = blocks[..., 2:].contiguous().view(torch.int8).to(torch.int16)
    return _two_planes(codes.flatten(1), _half(blocks, 0))


def _two_planes(codes_NK: Tensor, scale_NU: Tensor) -> Planes:
    """Split code + 128 = 16 high + low; the low zero makes up for 128 and for the offset of 8 in each half."""
    shifted = codes_NK + 128
    codes = torch.cat((shifted >> 4, shifted & 15), dim=1)
    zeros = torch.cat((torch.zeros_like(scale_NU), 8 * scale_NU), dim=1)
    return _planes(codes, torch.cat((16 * scale_NU, scale_NU), dim=1), zeros)


_SPLIT: dict[str, Callable[[Tensor], Planes]] = {"q4_0": _split_q4_0, "q4_1": _split_q4_1, "q8_0": _split_q8_0}
