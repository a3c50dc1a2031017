"""Codes: ties, saturation, NaN, every fp8 number, GGUF's order of half bytes; and the CPU's packed products."""

import gguf
import numpy as np
import pytest
import torch

from microllm import ops
from microllm.errors import OperatorError

ONE = torch.ones(1, 1)
interpreted_too = pytest.mark.interpreter


@interpreted_too
def test_int8_rounds_ties_to_even_saturates_and_takes_nan_for_zero():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -1e9, float("inf"), float("nan")]])
    assert ops.quantise_int8(x, ONE).tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -127, 127, 0]]


@interpreted_too
def test_int4_rounds_ties_to_even_saturates_and_takes_nan_for_zero():
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([0.5, 1.5, 2.5, 14.5, 15.5, -3.0, 99.0, float("nan")])
    codes = ops.quantise_int4(x, ONE, torch.zeros(1, 1))
    assert ops.dequantise_int4(codes, ONE, torch.zeros(1, 1))[0, :8].tolist() == [0, 2, 2, 14, 15, 0, 15, 0]


@interpreted_too
@pytest.mark.parametrize(
    ("dtype", "fnuz", "largest"), [(torch.float8_e4m3fn, False, 448), (torch.float8_e4m3fnuz, True, 240)]
)
def test_every_fp8_code_comes_back_and_what_is_larger_saturates(dtype, fnuz, largest):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 256)
    values = ops.dequantise_fp8(codes, ONE)
    assert values.nan_to_num(0).abs().max() == largest
    again = ops.quantise_fp8(values, ONE, fnuz=fnuz)
    number = ~values.isnan()
    assert torch.equal(again.view(torch.uint8)[number], codes.view(torch.uint8)[number])
    assert ops.dequantise_fp8(again, ONE).isnan().equal(values.isnan())
    huge = ops.quantise_fp8(torch.tensor([[1e9, -1e9, float("inf")]]), ONE, fnuz=fnuz)
    assert huge.float().tolist() == [[largest, -largest, largest]]
    between = ops.quantise_fp8(torch.tensor([[17.0, 19.0]]), ONE, fnuz=fnuz)  # the neighbours are 2 apart
    assert between.float().tolist() == [[16, 20]]


@interpreted_too
def test_int4_bytes_are_those_of_gguf():
    """A Q4_1 block: scale and minimum in fp16, then 16 bytes."""
    blocks = np.random.default_rng(0).integers(0, 256, (5, 4, 20), dtype=np.uint8)
    numbers = np.random.default_rng(1).random((5, 4, 2)).astype(np.float16)
    blocks[:, :, :4] = numbers.view(np.uint8)
    want = gguf.quants.dequantize(blocks.reshape(5, 80), gguf.GGMLQuantizationType.Q4_1)
    codes = torch.from_numpy(blocks[:, :, 4:].reshape(5, 64).copy())
    scale, minimum = torch.from_numpy(numbers.astype(np.float32)).unbind(dim=2)
    assert torch.equal(ops.dequantise_int4(codes, scale.contiguous(), minimum.contiguous()), torch.from_numpy(want))


@interpreted_too
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_error_of_int4_is_at_most_half_a_step(group):
    x = torch.randn(6, 128)
    low, high = x.unflatten(1, (-1, group)).aminmax(dim=2)
    scale = (high - low) / 15
    error = (ops.dequantise_int4(ops.quantise_int4(x, scale, low), scale, low) - x).abs()
    assert (error.unflatten(1, (-1, group)) <= scale[:, :, None] * 0.501).all()


def test_groups_that_cut_a_block_are_refused():
    with pytest.raises(OperatorError, match="K / U a multiple of 32"):
        ops.quantise_int4(torch.zeros(2, 64), torch.ones(2, 4), torch.zeros(2, 4))


def test_the_packed_int4_product_follows_its_codes():
    """torch's own packing is kept beside the codes: another scale, or codes changed in place, are packed anew."""
    x = torch.randn(3, 64).bfloat16()
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    scale, minimum = torch.full((16, 2), 0.02).bfloat16(), torch.full((16, 2), -0.15).bfloat16()

    def both(scale):
        results = []
        for level in ("vendor", "reference"):
            with ops.use(level, "linear_int4"):
                results.append(ops.linear_int4(x, codes, scale, minimum))
        torch.testing.assert_close(*results, atol=2e-2, rtol=1.6e-2)
        return results[0]

    first = both(scale)
    assert torch.equal(both(scale), first)
    assert not torch.equal(both(scale * 2), first)
    codes.copy_(255 - codes)
    assert not torch.equal(both(scale), first)
