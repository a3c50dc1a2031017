"""The head's loss in several chunks, and what a chunk and the weight's gradient may take together."""

import itertools

import pytest
import torch

from microllm import ops
from microllm.ops.kernels import linear_cross_entropy as head

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_chunks_add_up_to_the_whole(monkeypatch, reduction):
    """Eleven tokens in chunks of four: three products each, and a gradient of w that two of them add to."""
    monkeypatch.setattr(head, "STEP", 4)
    monkeypatch.setattr(head, "CHUNK", 4 * 50 * 4)
    h, w, targets = torch.randn(11, 24).requires_grad_(), (torch.randn(50, 24) / 5).requires_grad_(), torch.arange(11)
    targets[5] = -100
    assert [(part.start, part.stop) for part in head.chunks(11, 50, 24, 4)] == [(0, 4), (4, 8), (8, 11)]
    wide = [t.detach().double().requires_grad_() for t in (h, w)]
    want = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, reduction=reduction)
    got = ops.linear_cross_entropy(h, w, targets, reduction=reduction)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(got.sum(), (h, w)), torch.autograd.grad(want.sum(), wide), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


def test_the_mean_of_many_tokens_keeps_small_gradients_in_fp16():
    """A probability of 1/4096 over 4,000 tokens is below fp16's smallest number; relative to the weights it is not."""
    h, w = torch.zeros(1, 8, dtype=torch.float16), (torch.randn(4096, 8) / 3).half()
    weights = torch.full((1,), 1 / 4000)
    total, dh, dw = ops.linear_cross_entropy_gradients(h, w, torch.tensor([7]), weights)
    want = ((w.double().mean(0) - w[7].double()) / 4000)[None]
    torch.testing.assert_close(dh.double(), want, atol=5e-7, rtol=5e-3)
    torch.testing.assert_close(total, torch.tensor(4096.0).log() / 4000)
    assert float(dw.abs().max()) == 0  # h is zero


@pytest.mark.parametrize(("N", "V", "D"), [(8192, 151936, 896), (8192, 151936, 1536), (16384, 49152, 576), (5, 9, 3)])
def test_a_chunk_fits_beside_the_gradient(N, V, D):
    parts = list(head.chunks(N, V, D, 2))
    assert parts[0].start == 0
    assert parts[-1].stop == N
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    rows = max(part.stop - part.start for part in parts)
    assert 2 * rows * V + 4 * V * D + 2 * N * D <= 1.5e9
    assert rows == N or rows % 128 == 0
    assert len(parts) <= 6
