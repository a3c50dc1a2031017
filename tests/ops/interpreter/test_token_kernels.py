"""From logits to a token over several blocks: ties, what is not finite, filters that cut inside ties, noise."""

import math

import pytest
import torch
import triton
import triton.language as tl

from microllm import ops
from microllm.ops.kernels import argmax, sample
from microllm.ops.sample import gumbel_noise

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks of a short row."""
    monkeypatch.setattr(argmax, "BLOCK", 64)
    monkeypatch.setattr(argmax, "PICKED", 2)
    monkeypatch.setattr(sample, "CUT", 64)
    monkeypatch.setattr(sample, "DRAW", 32)


def odd_rows(V=150):
    logits = torch.randn(8, V)
    logits[0, [70, 130, 140]] = 9  # a tie over two blocks: the lowest wins
    logits[1, V - 1] = math.nan
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    logits[4, :] = -math.inf
    logits[4, 113] = -3
    logits[5] = 0
    logits[6, 5] = -math.inf
    return logits


def test_argmax_of_ties_and_of_what_is_not_finite():
    logits = odd_rows()
    with ops.use("reference"):
        want = ops.argmax(logits)
    assert want[:6].tolist() == [70, -1, -1, -1, 113, 0]
    assert torch.equal(ops.argmax(logits), want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy of infinities
def test_the_heads_argmax_over_several_tiles():
    x, w = torch.randn(5, 40), torch.randn(300, 40)
    w[[90, 210]] = w[[20, 20]] = 3 * x[0] / x[0].norm()
    x[1, 0], x[2, 0] = math.nan, math.inf
    x[3] = 0
    assert ops.lm_head_argmax(x, w).tolist()[:4] == [20, -1, -1, 0]


def draw(logits, *, level="triton", **changes):
    A = logits.shape[0]
    columns = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 0, "choice": 0} | changes
    values = {n: torch.full((A,), v) for n, v in columns.items() if not torch.is_tensor(v)}
    values |= {n: v for n, v in columns.items() if torch.is_tensor(v)}
    with ops.use(level):
        return ops.sample(logits, **values, position=torch.arange(A))


FILTERS = [
    {}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 149}, {"top_k": 5000}, {"top_p": 0.1}, {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7, "seed": -(2**61) + 12345, "choice": 3},
]  # fmt: skip


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_draws_are_the_references(changes):
    logits = torch.cat((odd_rows(), 2 * torch.randn(12, 150)))
    want = draw(logits, level="reference", **changes)
    assert want[1:4].tolist() == [-1] * 3
    assert torch.equal(draw(logits, **changes), want)


def test_rows_with_parameters_of_their_own():
    logits = 2 * torch.randn(48, 150)
    parameters = {
        "temperature": torch.rand(48).mul(2).round(decimals=1), "top_k": torch.randint(0, 60, (48,)),
        "top_p": torch.rand(48) * 0.9 + 0.1, "min_p": torch.rand(48) / 10, "seed": torch.randint(2**60, (48,)),
    }  # fmt: skip
    assert torch.equal(draw(logits, **parameters), draw(logits, level="reference", **parameters))


def test_a_cut_inside_ties_keeps_the_lowest_tokens():
    """150 equal logits: top-k leaves the first k tokens, top-p the first share of them."""
    logits = torch.zeros(64, 150)
    for changes, last in (({"top_k": 70}, 70), ({"top_p": 0.5}, 75), ({"top_k": 100, "top_p": 0.5}, 50)):
        tokens = draw(logits, **changes)
        assert int(tokens.max()) < last
        assert int(tokens.max()) >= 0.8 * last
        assert len(set(tokens.tolist())) > 20


@triton.jit
def noise_kernel(noise_ptr, position, choice, seed, V: tl.constexpr):
    """Write what draws add to V scores."""
    v = tl.arange(0, V)
    tl.store(noise_ptr + v, sample._noise(v, tl.zeros_like(v) + position, tl.zeros_like(v) + choice, seed))


def test_noise_is_the_references_at_both_ends_of_its_range():
    V, seed = 1 << 17, torch.tensor([-(2**62) + 7])
    noise = torch.empty(V)
    noise_kernel[(1,)](noise, 2**31 + 5, 3, seed.item(), V)
    want = gumbel_noise(torch.arange(V)[None], seed, torch.tensor([3]), torch.tensor([2**31 + 5]))[0]
    assert want.max() > 11
    assert want.min() < -2.4
    torch.testing.assert_close(noise, want, atol=2e-6, rtol=2e-6)


def test_penalties_over_several_blocks():
    logits, seen, counts = torch.randn(3, 100), torch.rand(3, 100) < 0.5, torch.randint(0, 4, (3, 100)).int()
    columns = {"repetition": torch.tensor([1.0, 1.3, 0.7]), "presence": torch.rand(3), "frequency": torch.rand(3)}
    with ops.use("reference"):
        want = ops.penalise(logits, seen, counts, **columns)
    torch.testing.assert_close(ops.penalise(logits, seen, counts, **columns), want, atol=1e-6, rtol=1e-6)
