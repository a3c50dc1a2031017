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
_PIECE = 8192  # rows of a head that are widened at once

Product = Callable[[], Tensor]
Planes = tuple[Tensor, Tensor]
"""Packed four-bit codes, and the scale and zero of each group."""
# The quickest of its names: a decode step calls it over a hundred times.
_int4_product: Callable[..., Tensor] = torch._weight_int4pack_mm_for_cpu  # pyright: ignore[reportPrivateImportUsage]


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


def has_bf16() -> bool:
    """Return whether oneDNN has bf16 products for this CPU; on AVX-512 without bf16 they are emulated, and slow."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class DenseWeight:
    """A matrix of floats, reordered by oneDNN where torch has it, else as it is; silu of the result, if asked.

    Numbers: fp32 accumulation; the result in the weight's dtype
    """

    def __init__(self, w_NK: Tensor, bias_N: Tensor | None = None, *, silu: bool = False) -> None:
        self.dtype, self._bias = w_NK.dtype, None if bias_N is None else bias_N.to(w_NK.dtype)
        name = str(w_NK.dtype).removeprefix("torch.")
        if torch.backends.mkldnn.is_available() and (w_NK.dtype == torch.float32 or has_bf16()):
            self._product = torch.ops.mkldnn._linear_pointwise.default
            self._weight = torch.ops.mkldnn._reorder_linear_weight(w_NK.contiguous())
            self._tail, self.kernel = ("swish" if silu else "none", [], ""), f"oneDNN {name}"
        else:
            self._product, self._weight, self._tail = _linear_silu if silu else functional.linear, w_NK.contiguous(), ()
            self.kernel = f"torch linear {name}"

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias: [M, N] in the weight's dtype."""
        return self._product(x_MK.to(self.dtype), self._weight, self._bias, *self._tail)

    def swiglu(self, x_MK: Tensor) -> Tensor:
        """Return silu(gate) * up of a weight that stacks [gate; up]: [M, N / 2]."""
        return _swiglu(self(x_MK))

    def bind(self, x_1K: Tensor) -> Product:
        """Return a call that multiplies what ``x_1K`` (fp32) then holds."""
        product, weight, bias, tail = self._product, self._weight, self._bias, self._tail
        if self.dtype == torch.float32:
            return lambda: product(x_1K, weight, bias, *tail)
        row = torch.empty_like(x_1K, dtype=self.dtype)
        return lambda: product(row.copy_(x_1K), weight, bias, *tail)


class Int4Weight:
    """A matrix of four-bit codes in groups of 32 along K, for torch's packed int4 product; or of eight-bit codes.

    A code's value is (code - 8) * scale + zero. Eight-bit codes are two four-bit ones, the high halves beside the low
    along K, with the row of activations written twice: exact, in one product. ``wide`` is the same matrix in floats
    [N, K] (``gated``: two, whose products are silu(gate) * up), for products of more than 8 rows.

    Numbers: scales, zeros, activations and result in bf16, fp32 accumulation; of more rows as the wide matrix says
    """

    def __init__(
        self, planes: Planes, wide_NK: Tensor | None, bias_N: Tensor | None = None, *, gated: bool = False
    ) -> None:
        self.planes, self._bias = planes, bias_N
        num_coded = GROUP * len(planes[1])
        self._num_planes = 1 if wide_NK is None else num_coded // wide_NK.shape[1]
        self._num_in = num_coded // self._num_planes
        self.kernel = f"torch int{4 * self._num_planes}"
        self._wide: DenseWeight | None = None
        self._halves: tuple[DenseWeight, DenseWeight] | None = None
        if wide_NK is not None and gated:
            (gate, up), biases = wide_NK.chunk(2), (None, None) if bias_N is None else bias_N.chunk(2)
            self._halves = DenseWeight(gate, biases[0], silu=True), DenseWeight(up, biases[1])
        elif wide_NK is not None:
            self._wide = DenseWeight(wide_NK, bias_N)

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias: [M, N]."""
        if len(x_MK) > MAX_NARROW_ROWS and self._wide is not None:
            return self._wide(x_MK)
        y_MN = _int4_product(x_MK.to(torch.bfloat16).repeat(1, self._num_planes), self.planes[0], GROUP, self.planes[1])
        return y_MN if self._bias is None else y_MN + self._bias

    def swiglu(self, x_MK: Tensor) -> Tensor:
        """Return silu(gate) * up of a weight that stacks [gate; up]: [M, N / 2]."""
        if len(x_MK) <= MAX_NARROW_ROWS or self._halves is None:
            return _swiglu(self(x_MK).float())
        gate, up = self._halves
        x_MK = x_MK.to(gate.dtype)
        return gate(x_MK).mul_(up(x_MK))

    def bind(self, x_1K: Tensor) -> Product:
        """Return a call that multiplies what ``x_1K`` (fp32) then holds."""
        row = x_1K.new_empty(1, self._num_planes * self._num_in, dtype=torch.bfloat16)
        parts, bias, (codes, scales) = row.view(self._num_planes, -1), self._bias, self.planes

        def product() -> Tensor:
            parts.copy_(x_1K)
            return _int4_product(row, codes, GROUP, scales)

        return product if bias is None else lambda: product() + bias


class RefinedWeight:
    """A head of eight-bit codes in two products: by their high halves and by their low ones.

    The ``NUM_REFINED`` largest logits are multiplied again by whole rows of ``table``: a product's bf16 has steps of a
    quarter at logits of 32, which would choose between tokens. Where the largest alone is asked for (``bind_top``), the
    high halves find them, and the low halves are multiplied only if they could change which is largest. ``exact``
    multiplies by all rows, a piece of the vocabulary at a time.

    Numbers: refined and exact logits are fp32 of the stored codes; the others a sum of two products in bf16
    """

    NUM_REFINED = 128

    def __init__(self, halves: tuple[Planes, Planes], table: Callable[[Tensor], Tensor]) -> None:
        self._high, self._low = (Int4Weight(planes, None) for planes in halves)
        self._table, self._num_rows = table, halves[0][1].shape[1]
        self.kernel = "torch int4 twice"

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight: [M, N] fp32."""
        if len(x_MK) > MAX_NARROW_ROWS:
            return self.exact(x_MK)
        y_MN = self._high(x_MK).float().add_(self._low(x_MK))
        for x_K, y_N in zip(x_MK.float(), y_MN, strict=True):
            self._refine(x_K, y_N)
        return y_MN

    def exact(self, x_MK: Tensor) -> Tensor:
        """Return x times the transposed weight, every result exact: [M, N] fp32."""
        pieces = torch.arange(self._num_rows).split(_PIECE)
        return torch.cat([functional.linear(x_MK.float(), self._table(ids)) for ids in pieces], dim=1)

    def bind(self, x_1K: Tensor) -> Product:
        """Return a call that multiplies what ``x_1K`` (fp32) then holds."""
        high, low = self._high.bind(x_1K), self._low.bind(x_1K)
        return lambda: self._refine(x_1K[0], high().float().add_(low())[0]).unsqueeze(0)

    def bind_top(self, x_1K: Tensor) -> Product:
        """Return a call whose largest result is that of ``bind``; the others are coarse, and below it.

        What the low halves can add is judged by what they add to the refined: where twice the most of it could lift
        another result past the best, they are multiplied.
        """
        high, low, x_K = self._high.bind(x_1K), self._low.bind(x_1K), x_1K[0]

        def product() -> Tensor:
            y_1N = high().float()
            coarse, largest = self._largest(y_1N[0])
            exact = torch.mv(self._table(largest), x_K)
            best, least = exact.amax(), coarse[-1]
            if not best - least > 2 * (exact - coarse).abs().amax():
                return self._refine(x_K, y_1N.add_(low())[0]).unsqueeze(0)
            y_1N[0].clamp_(max=least).index_copy_(0, largest, exact)
            return y_1N

        return product

    def _largest(self, y_N: Tensor) -> tuple[Tensor, Tensor]:
        return y_N.topk(min(self.NUM_REFINED, len(y_N)))

    def _refine(self, x_K: Tensor, y_N: Tensor) -> Tensor:
        """Put exact results in the place of the largest, in place; return the row."""
        largest = self._largest(y_N)[1]
        return y_N.index_copy_(0, largest, torch.mv(self._table(largest), x_K))


def _linear_silu(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return functional.silu(functional.linear(x_MK, w_NK, bias_N))


def _swiglu(gate_up_MN: Tensor) -> Tensor:
    gate, up = gate_up_MN.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)


def int4_planes(blocks_NB: Tensor, stored: str) -> Planes:
    """Return GGUF blocks (q4_0, q4_1, q8_0) as planes for ``Int4Weight``.

    Shapes:  uint8 [N, bytes of a row] -> packed codes, and scales and zeros bf16 [groups, N, 2]
    Numbers: codes exact; scale and zero round to bf16, which moves a value by up to 2^-8 of its group's largest

    Raises:
        OperatorError: another type, or N is no multiple of 16.
    """
    N = len(blocks_NB)
    if stored not in _SPLIT or N % 16:
        raise OperatorError(
            f"got {stored} with {N} rows; need one of {', '.join(_SPLIT)}, with a multiple of 16; pack it as floats"
        )
    return _SPLIT[stored](blocks_NB)


def half_planes(blocks_NB: Tensor) -> tuple[Planes, Planes]:
    """Return the high and the low halves of q8_0 codes as planes for ``RefinedWeight``; the low ones have mean 0."""
    codes, scale = q8_0_codes(blocks_NB)
    shifted = codes.to(torch.int16) + 128
    high = _planes(shifted >> 4, 16 * scale, 7.5 * scale)
    return high, _planes(shifted & 15, scale, 0.5 * scale)


def q8_0_codes(blocks_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Return GGUF's q8_0 blocks as int8 codes [N, K] and fp32 scales [N, K / 32]."""
    blocks = blocks_NB.unflatten(1, (-1, 34))
    return blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0)


def quantised_planes(w_NK: Tensor, bits: int) -> Planes:
    """Return a float matrix rounded group by group: to 16 even steps from least to largest, or to 255 about 0."""
    codes, scale, zero = _quantised(w_NK, bits)
    codes = codes.flatten(1).to(torch.int16)
    return _two_planes(codes, scale) if bits == 8 else _planes(codes + 8, scale, zero)


def rounded(w_NK: Tensor, bits: int) -> Tensor:
    """Return what ``quantised_planes`` holds of a float matrix: [N, K] fp32."""
    codes, scale, zero = _quantised(w_NK, bits)
    return (codes * scale[..., None] + zero[..., None]).flatten(1)


def _quantised(w_NK: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return signed codes [N, U, 32], and each group's scale and zero [N, U] as bf16 holds them."""
    groups = w_NK.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    span, steps = (high - low, 15) if bits == 4 else (torch.maximum(high, -low), 127)
    scale = (span / steps).clamp(min=torch.finfo(torch.float32).tiny).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float() if bits == 4 else torch.zeros_like(low)
    least, most = (-8, 7) if bits == 4 else (-127, 127)
    codes = ((groups - zero[..., None]) / scale[..., None]).round_().clamp_(least, most)
    return codes, scale, zero


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
    codes, scale = q8_0_codes(blocks_NB)
    return _two_planes(codes.to(torch.int16), scale)


def _two_planes(codes_NK: Tensor, scale_NU: Tensor) -> Planes:
    """Split code + 128 = 16 high + low; the low zero makes up for 128 and for the offset of 8 in each half."""
    shifted = codes_NK + 128
    codes = torch.cat((shifted >> 4, shifted & 15), dim=1)
    zeros = torch.cat((torch.zeros_like(scale_NU), 8 * scale_NU), dim=1)
    return _planes(codes, torch.cat((16 * scale_NU, scale_NU), dim=1), zeros)


_SPLIT: dict[str, Callable[[Tensor], Planes]] = {"q4_0": _split_q4_0, "q4_1": _split_q4_1, "q8_0": _split_q8_0}
