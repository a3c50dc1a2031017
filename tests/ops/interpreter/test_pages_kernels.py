"""The kernels over pages, interpreted: fp8 as bytes, the list of splits, verify rows, diagnostic scores."""

import math

import pytest
import torch
import triton
import triton.language as tl

from microllm import ops
from microllm.errors import OperatorError
from microllm.ops.kernels import attention_decode
from microllm.ops.kernels.fp8 import decode_e4m3, encode_e4m3

pytestmark = pytest.mark.interpreter
FORMATS = [(torch.float8_e4m3fn, 448), (torch.float8_e4m3fnuz, 240)]
FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


@triton.jit
def decode_kernel(code, value, FNUZ: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(value + i, decode_e4m3(tl.load(code + i), FNUZ))


@triton.jit
def encode_kernel(value, code, FNUZ: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(code + i, encode_e4m3(tl.load(value + i), FNUZ))


@pytest.mark.parametrize(("dtype", "largest"), FORMATS)
def test_all_256_codes_are_torchs_numbers(dtype, largest):
    codes, values = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    decode_kernel[(1,)](codes, values, dtype == torch.float8_e4m3fnuz)
    assert torch.equal(values.isnan(), codes.view(dtype).float().isnan())
    assert torch.equal(values.nan_to_num(7), codes.view(dtype).float().nan_to_num(7))
    assert values.nan_to_num(0).abs().max() == largest


@pytest.mark.parametrize(("dtype", "largest"), FORMATS)
def test_encoding_rounds_as_torch_does_and_saturates(dtype, largest):
    """Every fp16 number (all codes, all ties between two of them), and numbers near the ends of the range."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    values = torch.cat((every, every * (1 + 2**-12), torch.randn(2**16) * 2.0 ** torch.randint(-14, 12, (2**16,))))
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    encode_kernel[(values.numel() // 8192,)](values, codes, dtype == torch.float8_e4m3fnuz, 8192)
    want = values.clamp(-largest, largest).to(dtype)
    number = ~values.isnan()
    assert torch.equal(codes[number], want.view(torch.uint8)[number])
    assert codes.view(dtype).float().isnan().equal(values.isnan())


def case(*, lengths, T=1, H=6, G=2, D=16, S=8, dtype=torch.float32, pages_dtype=None):
    """Return a call of rows with ``lengths`` tokens, NaN wherever nothing is stored; 0 is an idle row."""
    A, N = len(lengths), -(-max(lengths) // S) + 1
    table = torch.randperm(A * N + 2)[: A * N].view(A, N).int()
    k_pages, v_pages = torch.full((2, A * N + 2, S, G, D), math.nan).to(pages_dtype or dtype)
    for a, length in enumerate(lengths):
        if length:
            positions = torch.arange(length)[None]
            k, v = torch.randn(2, 1, length, G, D).to(dtype)
            ops.kv_store_paged(k_pages, v_pages, k, v, table[a : a + 1], positions)
    last = torch.tensor(lengths)[:, None] - T + torch.arange(T)
    return torch.randn(A, T, H, D).to(dtype), k_pages, v_pages, table, last.clamp(min=-1)


def reference(operator, call, split=16, **more):
    with ops.use("reference"):
        return operator(*call, scale=0.25, split=split, **more)


def test_any_number_of_programs_gives_the_same_bits_and_leaves_its_counters_at_zero(monkeypatch):
    call = case(lengths=[37, 0, 3, 16, 17], T=2)
    want = ops.attention_decode(*call, scale=0.25, split=16)
    torch.testing.assert_close(want, reference(ops.attention_decode, call), atol=2e-5, rtol=2e-5)
    for count in (1, 3):
        monkeypatch.setattr(attention_decode, "NUM_PROGRAMS", count)
        assert torch.equal(ops.attention_decode(*call, scale=0.25, split=16), want)
    assert not attention_decode.zeros(torch.device("cpu"), 0, 16).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_verify_rows_of_many_tiles_have_the_bits_of_decode_rows(dtype):
    """Eight tokens of seven heads a group are four tiles; a token alone is one."""
    q, *pages, positions = case(lengths=[27, 9], T=8, H=14, dtype=dtype)
    many = ops.attention_decode(q, *pages, positions, scale=0.25, split=16)
    for t in (0, 3, 7):
        here = slice(t, t + 1)
        assert torch.equal(
            ops.attention_decode(q[:, here], *pages, positions[:, here], scale=0.25, split=16), many[:, here]
        )


@pytest.mark.parametrize("operator", [ops.attention_decode, ops.attention_prefill])
@pytest.mark.parametrize("pages_dtype", [*FP8, torch.float32])
def test_pages_of_another_dtype_are_read_as_the_numbers_they_hold(operator, pages_dtype):
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 1e-3)):
        call = case(lengths=[19, 3], dtype=dtype, pages_dtype=pages_dtype)
        got, want = operator(*call, scale=0.25, split=16), reference(operator, call)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("pages_dtype", FP8)
def test_fp8_pages_hold_what_torch_rounds_to(pages_dtype):
    k, v = torch.randn(2, 2, 5, 2, 16) * 100
    table, positions = torch.tensor([[2], [0]], dtype=torch.int32), torch.tensor([[0, 3, -1, 7, 5]]).repeat(2, 1)
    stored = []
    for level in ("triton", "reference"):
        pages = torch.zeros(2, 3, 8, 2, 16).to(pages_dtype)
        with ops.use(level):
            ops.kv_store_paged(pages[0], pages[1], k, v, table, positions)
        stored.append(pages.view(torch.uint8))
    assert torch.equal(*stored)


@pytest.mark.parametrize("operator", [ops.attention_decode, ops.attention_prefill])
def test_the_diagnostic_scores_are_the_references(operator):
    call = case(lengths=[19, 40, 0], T=3)
    got, want = {}, {}
    operator(*call, scale=0.25, split=16, sink=got)
    reference(operator, call, sink=want)
    assert torch.equal(got["scores"] == -math.inf, want["scores"] == -math.inf)
    torch.testing.assert_close(got["scores"], want["scores"], atol=2e-5, rtol=2e-5)


def test_pools_that_lie_differently_are_refused():
    q, k_pages, v_pages, table, positions = case(lengths=[9])
    with pytest.raises(OperatorError, match="lie differently"):
        ops.attention_decode(q, k_pages, torch.cat((v_pages, v_pages), 3)[..., :16], table, positions, scale=0.25)
