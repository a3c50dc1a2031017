"""Every packed type against the ``gguf`` package's own dequantisation, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from microllm.io.gguf_dequant import FORMATS, REFUSED_TYPES, dequantize

PACKED = {number: fmt for number, fmt in FORMATS.items() if fmt.unpack is not None}


def random_blocks(number: int, num_blocks: int, seed: int) -> np.ndarray:
    """Return random blocks of one type; any byte may be anything, so half-precision scales may be inf or NaN."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_blocks, FORMATS[number].type_size), dtype=np.uint8)


@pytest.mark.parametrize("number", PACKED, ids=lambda n: FORMATS[n].name)
def test_equals_gguf_package_bit_for_bit(number):
    fmt = FORMATS[number]
    step = (1 << 17) // fmt.block_size
    raw = random_blocks(number, step + 37, seed=number)  # two runs, the second ragged
    got = dequantize(raw.reshape(-1), fmt)
    with np.errstate(all="ignore"):
        want = quants.dequantize(raw, GGMLQuantizationType(number)).reshape(-1)
    assert got.dtype == np.float32
    finite = np.isfinite(want)
    assert 0.5 < finite.mean() < 1
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(got[finite].view(np.uint32), want[finite].view(np.uint32))


@pytest.mark.parametrize("number", PACKED, ids=lambda n: FORMATS[n].name)
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_few_blocks(number, num_blocks):
    raw = random_blocks(number, num_blocks, seed=5)
    got = dequantize(raw.reshape(-1), FORMATS[number])
    assert got.shape == (num_blocks * FORMATS[number].block_size,)
    if num_blocks:
        with np.errstate(all="ignore"):
            want = quants.dequantize(raw, GGMLQuantizationType(number)).reshape(-1)
        np.testing.assert_array_equal(got, want)


def test_q4_1_by_hand():
    """One block written out: scale 0.5, minimum -1, byte i = low nibble of value i, high nibble of value i + 16."""
    header = np.array([0.5, -1.0], np.float16).view(np.uint8)
    nibbles = np.arange(16, dtype=np.uint8) | (np.arange(15, -1, -1, dtype=np.uint8) << 4)
    got = dequantize(np.concatenate([header, nibbles]), FORMATS[3])
    want = np.concatenate([np.arange(16) * 0.5 - 1, np.arange(15, -1, -1) * 0.5 - 1])
    np.testing.assert_array_equal(got, want.astype(np.float32))


def test_sizes_and_numbers_are_ggmls():
    for number, fmt in FORMATS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (fmt.block_size, fmt.type_size)
        ggml = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(fmt.name, fmt.name)
        assert GGMLQuantizationType(number).name.lower() == ggml.lower()
    for number, name in REFUSED_TYPES.items():
        assert GGMLQuantizationType(number).name == name
    assert not FORMATS.keys() & REFUSED_TYPES.keys()
