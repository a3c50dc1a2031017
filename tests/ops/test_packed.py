"""Packed weights: what they hold is what was stored, and one row, few rows and many rows agree."""

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

from microllm.errors import OperatorError
from microllm.ops.packed import (
    DenseWeight,
    Int4Weight,
    RefinedWeight,
    half_planes,
    int4_planes,
    q8_0_codes,
    quantised_planes,
    rounded,
)

N, K = 48, 96


def held(planes) -> torch.Tensor:
    """What the planes hold, read out by multiplying one-hot rows."""
    one = torch.zeros(1, K)
    product = Int4Weight(planes, torch.full((N, K), torch.nan)).bind(one)  # one row takes no wide weight
    columns = []
    for k in range(K):
        one.zero_()[0, k] = 1
        columns.append(product().float().clone()[0])
    return torch.stack(columns, dim=1)


def stored(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    w = np.random.default_rng(0).normal(size=(N, K)).astype(np.float32)
    ggml = gguf.GGMLQuantizationType[kind.upper()]
    blocks = gguf.quants.quantize(w, ggml)
    return torch.from_numpy(blocks), torch.from_numpy(gguf.quants.dequantize(blocks, ggml))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_blocks_of_a_file_are_held_to_the_rounding_of_their_scales(kind):
    blocks, w = stored(kind)
    planes = int4_planes(blocks, kind)
    assert len(planes[1]) == K // 32 * (2 if kind == "q8_0" else 1)
    group_largest = w.abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    assert ((held(planes) - w).abs() <= 2**-7 * group_largest).all()


@pytest.mark.parametrize(("bits", "step"), [(4, 1 / 15), (8, 1 / 127)])
def test_floats_round_to_the_nearest_step(bits, step):
    w = torch.randn(N, K)
    groups = w.unflatten(1, (-1, 32))
    span = groups.amax(-1) - groups.amin(-1) if bits == 4 else groups.abs().amax(-1)
    bound = (0.5 * step * span + 2**-7 * groups.abs().amax(-1))[..., None].expand(-1, -1, 32).flatten(1)
    error = (held(quantised_planes(w, bits)) - w).abs()
    assert (error <= bound).all()
    assert error.max() > 0
    assert (held(quantised_planes(w, bits)) - rounded(w, bits)).abs().max() <= 2**-8 * w.abs().max()


def test_constant_and_zero_groups_are_exact():
    w = torch.cat((torch.zeros(N, 32), torch.full((N, 32), 0.5), torch.full((N, 32), -2.0)), dim=1)
    for bits in (4, 8):
        assert torch.allclose(held(quantised_planes(w, bits)), w, atol=1e-2)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4_1", "q8_0"])
def test_any_number_of_rows_agrees_with_the_plain_product(kind, with_bias):
    bias = torch.randn(N) if with_bias else None
    if kind.startswith("q"):
        blocks, w = stored(kind)
        weight = Int4Weight(int4_planes(blocks, kind), w.bfloat16(), bias)
    else:
        w = torch.randn(N, K)
        weight = DenseWeight(w.to(getattr(torch, kind)), bias)
    tolerance = 1e-4 if kind == "float32" else 0.06 * w.std().item() * K**0.5
    for num_rows in (1, 2, 7, 8, 9, 33):
        x = torch.randn(num_rows, K)
        expected = functional.linear(x, w, bias)
        assert (weight(x).float() - expected).abs().max() <= tolerance
    one = torch.randn(1, K)
    product = weight.bind(one)
    for _ in range(2):
        one.copy_(torch.randn(1, K))
        assert (product().float() - functional.linear(one, w, bias)).abs().max() <= tolerance


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_bias", [False, True])
def test_swiglu_of_any_number_of_rows_agrees(bits, with_bias):
    w, bias = torch.randn(N, K) / K**0.5, torch.randn(N) if with_bias else None
    held_w = rounded(w, bits)
    weights = [Int4Weight(quantised_planes(w, bits), held_w.bfloat16(), bias, gated=True), DenseWeight(held_w, bias)]
    for num_rows in (1, 8, 9, 30):
        x = torch.randn(num_rows, K)
        gate, up = functional.linear(x, held_w, bias).chunk(2, dim=1)
        for weight in weights:
            assert (weight.swiglu(x).float() - functional.silu(gate) * up).abs().max() < 0.06


def test_without_onednn_or_bf16_torch_multiplies_and_says_so(monkeypatch):
    w, bias = torch.randn(N, K), torch.randn(N)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.3)):
        weight = DenseWeight(w.to(dtype), bias)
        assert weight.kernel == f"torch linear {str(dtype)[6:]}"
        x = torch.randn(3, K)
        assert (weight(x).float() - functional.linear(x, w, bias)).abs().max() < tolerance
        silu = DenseWeight(w.to(dtype), bias, silu=True)
        assert (silu(x).float() - functional.silu(functional.linear(x, w, bias))).abs().max() < tolerance


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [(torch.zeros(16, 20, dtype=torch.uint8), "q6_k"), (torch.zeros(15, 20, dtype=torch.uint8), "q4_1")],
)
def test_what_cannot_be_packed_is_refused(blocks, kind):
    with pytest.raises(OperatorError, match="pack it as floats"):
        int4_planes(blocks, kind)


@pytest.mark.parametrize("num_refined", [2, 8, 48])
def test_a_refined_heads_largest_is_exact_and_its_others_below(num_refined, monkeypatch):
    monkeypatch.setattr(RefinedWeight, "NUM_REFINED", num_refined)
    blocks, w = stored("q8_0")
    codes, scale = q8_0_codes(blocks)
    assert torch.equal((codes.float().unflatten(1, (-1, 32)) * scale[..., None]).flatten(1), w)
    head, one = RefinedWeight(half_planes(blocks), lambda ids: w[ids]), torch.zeros(1, K)
    product, top = head.bind(one), head.bind_top(one)
    for _ in range(40):
        one.copy_(torch.randn(1, K))
        exact = functional.linear(one, w)
        assert torch.allclose(head.exact(one), exact, atol=1e-4)
        assert (product() - exact).abs().max() < 0.03 * exact.std()
        assert (head(one) - exact).abs().max() < 0.03 * exact.std()
        found = top()
        assert found.argmax() == exact.argmax()
        assert product().argmax() == head(one).argmax() == exact.argmax()
        assert (found - exact).abs().max() < 0.5 * exact.std()
    many = torch.randn(9, K)
    assert torch.allclose(head(many), functional.linear(many, w), atol=1e-4)
    assert not head(one.fill_(torch.nan)).isfinite().any()
    assert not top().isfinite().any()


def test_large_logits_close_together_are_told_apart():
    """As a decoded token's may be: 37.7 against 37.5, where bf16 has steps of a quarter."""
    blocks, w = stored("q8_0")
    head, x = RefinedWeight(half_planes(blocks), lambda ids: w[ids]), torch.randn(60, K)
    x *= 37 / functional.linear(x, w).amax(1, keepdim=True)
    for row in x:
        one, exact = row[None].clone(), functional.linear(row[None], w)
        for found in (head.bind(one)(), head.bind_top(one)(), head(one)):
            assert found.argmax() == exact.argmax()
            assert (found.amax() - exact.amax()).abs() < 1e-3


def test_a_logit_that_the_low_halves_lift_to_the_top_is_found(monkeypatch):
    """Row 5 is 20 high halves and the largest low ones: by its high half it is not among the two that are refined."""
    monkeypatch.setattr(RefinedWeight, "NUM_REFINED", 2)
    codes = torch.zeros(16, 32, dtype=torch.int16)
    codes[:5], codes[5] = 32, 31
    codes[6:] = 16
    blocks = torch.cat((torch.full((16, 1), 0.01).half().view(torch.uint8), codes.to(torch.int8).view(torch.uint8)), 1)
    w = codes.float() * torch.tensor(0.01).half().float()
    one = torch.full((1, 32), 1.0)
    head = RefinedWeight(half_planes(blocks), lambda ids: w[ids])
    assert torch.allclose(head.bind_top(one)(), functional.linear(one, w), rtol=0.02)
