"""ggml's stored types: block sizes, and vectorised numpy that turns packed blocks into float32.

Place: ``gguf_file`` takes sizes from ``FORMATS``; ``gguf`` calls ``dequantize``. Knows nothing of files or models.
Numpy on one core, in runs of blocks that stay in cache: it is faster here than torch's threads, and steady when
other processes hold the cores. Does not quantise.

Shapes:  b_NS = N packed blocks of S bytes; out_NB = N blocks of B float32 values
Source:  block layouts of ggml (ggml-common.h, ggml-quants.c), as the ``gguf`` package's ``quants.py`` states them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_RUN_ELEMENTS = 1 << 17
_LOW_NIBBLE, _ONE = np.uint8(15), np.uint8(1)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a stored type lays out values: ``block_size`` values in ``type_size`` bytes.

    ``torch_dtype`` is set for types that are plain numbers; ``unpack`` for those that are packed blocks.
    """

    name: str
    block_size: int
    type_size: int
    torch_dtype: torch.dtype | None = None
    unpack: Callable[[np.ndarray, np.ndarray], None] | None = None


def dequantize(raw: np.ndarray, block_format: BlockFormat) -> np.ndarray:
    """Return the float32 values of packed blocks.

    Shapes:  ``raw`` is flat uint8, a whole number of blocks; the result is flat float32
    Numbers: the products and sums are ggml's, in float32, in ggml's order: results are equal bit for bit
    """
    unpack = block_format.unpack
    assert unpack is not None, f"{block_format.name} is not packed"
    b_NS = raw.reshape(-1, block_format.type_size)
    out_NB = np.empty((len(b_NS), block_format.block_size), np.float32)
    step = _RUN_ELEMENTS // block_format.block_size
    with np.errstate(all="ignore"):  # a scale of inf or NaN gives what ggml gives
        for start in range(0, len(b_NS), step):
            unpack(b_NS[start : start + step], out_NB[start : start + step])
    return out_NB.reshape(-1)


def _halves(b_NS: np.ndarray, offset: int) -> np.ndarray:
    return b_NS[:, offset : offset + 2].view(np.float16).astype(np.float32)


def _fields(packed: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Split bytes into ``bits``-wide fields: for each run of ``width`` bytes all lowest fields, then the next."""
    per_byte = 8 // bits
    runs = packed.reshape(len(packed), -1, 1, width)
    fields = np.empty((len(packed), runs.shape[1], per_byte, width), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for index in range(per_byte):
        np.right_shift(runs[:, :, 0], np.uint8(index * bits), out=fields[:, :, index])
    np.bitwise_and(fields, mask, out=fields)
    return fields.reshape(len(packed), -1)


def _bits32(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, axis=1, bitorder="little")


def _unpack_q8_0(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    out_NB[...] = b_NS[:, 2:].view(np.int8)
    out_NB *= _halves(b_NS, 0)


def _unpack_q4_0(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    out_NB[...] = _fields(b_NS[:, 2:], 16, 4).view(np.int8) - np.int8(8)
    out_NB *= _halves(b_NS, 0)


def _unpack_q4_1(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    out_NB[...] = _fields(b_NS[:, 4:], 16, 4)
    out_NB *= _halves(b_NS, 0)
    out_NB += _halves(b_NS, 2)


def _unpack_q5_0(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    codes = _fields(b_NS[:, 6:], 16, 4) | (_bits32(b_NS[:, 2:6]) << np.uint8(4))
    out_NB[...] = codes.view(np.int8) - np.int8(16)
    out_NB *= _halves(b_NS, 0)


def _unpack_q5_1(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    out_NB[...] = _fields(b_NS[:, 8:], 16, 4) | (_bits32(b_NS[:, 4:8]) << np.uint8(4))
    out_NB *= _halves(b_NS, 0)
    out_NB += _halves(b_NS, 2)


def _scale_runs(out_NB: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> None:
    """Multiply each of a super-block's runs by its scale, in place, and take its minimum off."""
    out = out_NB.reshape(*scale.shape, -1)
    out *= scale[:, :, None]
    if minimum is not None:
        out -= minimum[:, :, None]


def _scales_and_minima(b_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 8 scales and 8 minima of Q4_K and Q5_K: 6 bits each, in 12 bytes after the two halves."""
    low, high, mixed = b_NS[:, 4:8], b_NS[:, 8:12], b_NS[:, 12:16]
    scale = np.concatenate([low & 63, (mixed & 15) | ((low >> 2) & 48)], axis=1)
    minimum = np.concatenate([high & 63, (mixed >> 4) | ((high >> 2) & 48)], axis=1)
    return _halves(b_NS, 0) * scale.astype(np.float32), _halves(b_NS, 2) * minimum.astype(np.float32)


def _unpack_q2_k(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    packed = b_NS[:, :16]
    scale = _halves(b_NS, 80) * (packed & _LOW_NIBBLE).astype(np.float32)
    minimum = _halves(b_NS, 82) * (packed >> np.uint8(4)).astype(np.float32)
    out_NB[...] = _fields(b_NS[:, 16:80], 32, 2)
    _scale_runs(out_NB, scale, minimum)


def _unpack_q3_k(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    low, high = _fields(b_NS[:, 96:104], 8, 4), _fields(b_NS[:, 104:108], 4, 2)
    scale = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    absent = _fields(b_NS[:, :32], 32, 1) ^ _ONE  # a clear bit takes 4 off
    out_NB[...] = _fields(b_NS[:, 32:96], 32, 2).view(np.int8) - (absent << np.uint8(2)).view(np.int8)
    _scale_runs(out_NB, _halves(b_NS, 108) * scale.astype(np.float32))


def _unpack_q4_k(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    out_NB[...] = _fields(b_NS[:, 16:], 32, 4)
    _scale_runs(out_NB, *_scales_and_minima(b_NS))


def _unpack_q5_k(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    out_NB[...] = _fields(b_NS[:, 48:], 32, 4) | (_fields(b_NS[:, 16:48], 32, 1) << np.uint8(4))
    _scale_runs(out_NB, *_scales_and_minima(b_NS))


def _unpack_q6_k(b_NS: np.ndarray, out_NB: np.ndarray) -> None:
    codes = _fields(b_NS[:, :128], 64, 4) | (_fields(b_NS[:, 128:192], 32, 2) << np.uint8(4))
    out_NB[...] = codes.view(np.int8) - np.int8(32)
    _scale_runs(out_NB, _halves(b_NS, 208) * b_NS[:, 192:208].view(np.int8).astype(np.float32))


FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("float32", 1, 4, torch.float32),
    1: BlockFormat("float16", 1, 2, torch.float16),
    2: BlockFormat("q4_0", 32, 18, unpack=_unpack_q4_0),
    3: BlockFormat("q4_1", 32, 20, unpack=_unpack_q4_1),
    6: BlockFormat("q5_0", 32, 22, unpack=_unpack_q5_0),
    7: BlockFormat("q5_1", 32, 24, unpack=_unpack_q5_1),
    8: BlockFormat("q8_0", 32, 34, unpack=_unpack_q8_0),
    10: BlockFormat("q2_k", 256, 84, unpack=_unpack_q2_k),
    11: BlockFormat("q3_k", 256, 110, unpack=_unpack_q3_k),
    12: BlockFormat("q4_k", 256, 144, unpack=_unpack_q4_k),
    13: BlockFormat("q5_k", 256, 176, unpack=_unpack_q5_k),
    14: BlockFormat("q6_k", 256, 210, unpack=_unpack_q6_k),
    30: BlockFormat("bfloat16", 1, 2, torch.bfloat16),
}
"""Every stored type that is read, by ggml's number."""

REFUSED_TYPES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Types that ggml has and this project refuses, so that an error can call them by name."""
