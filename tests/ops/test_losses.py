"""Losses: reductions, labels that do not count, memory, and sums in fp32."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from microllm import ops
from microllm.errors import OperatorError

REDUCTIONS = ["none", "sum", "mean"]


def head(n=17, d=16, v=50, dtype=torch.float32):
    targets = torch.randint(v, (n,))
    targets[::5] = -100
    return torch.randn(n, d).to(dtype).requires_grad_(), torch.randn(v, d).to(dtype).requires_grad_(), targets


@pytest.mark.interpreter
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_both_losses_agree_with_torch_in_value_and_gradient(reduction):
    h, w, targets = head()
    wide = [t.detach().double().requires_grad_() for t in (h, w)]
    want = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, reduction=reduction)
    weights = torch.linspace(-1, 1, want.numel()).view(want.shape)
    want_grads = torch.autograd.grad((want * weights).sum(), wide)
    for loss in (
        ops.linear_cross_entropy(h, w, targets, reduction=reduction),
        ops.cross_entropy(ops.linear(h, w), targets, reduction=reduction),
    ):
        torch.testing.assert_close(loss.double(), want, atol=2e-5, rtol=2e-5)
        grads = torch.autograd.grad((loss * weights).sum(), (h, w))
        for got, expected in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(got.double(), expected, atol=3e-5, rtol=3e-5)
    with torch.no_grad():
        plain = ops.linear_cross_entropy(h, w, targets, reduction=reduction)
    torch.testing.assert_close(plain.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.interpreter
def test_tokens_that_do_not_count_leave_exact_zeros_even_where_logits_are_not_finite():
    h, w, targets = head()
    with torch.no_grad():
        h[::5] = float("inf")
    loss = ops.linear_cross_entropy(h, w, targets, reduction="sum")
    dh, dw = torch.autograd.grad(loss, (h, w))
    assert torch.equal(dh[::5], torch.zeros_like(dh[::5]))
    assert torch.isfinite(loss)
    logits = ops.linear(h.detach().nan_to_num(posinf=1e30), w.detach()).requires_grad_()
    (d_logits,) = torch.autograd.grad(ops.cross_entropy(logits, targets, reduction="sum"), logits)
    assert torch.equal(d_logits[::5], torch.zeros_like(d_logits[::5]))
    assert dw.shape == w.shape


@pytest.mark.interpreter
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_window_without_a_label_is_zero_and_has_no_mean(reduction):
    h, w, targets = head()
    nothing = torch.full_like(targets, -100)
    for loss in (ops.linear_cross_entropy, lambda h, w, *rest, **o: ops.cross_entropy(ops.linear(h, w), *rest, **o)):
        if reduction == "mean":
            with pytest.raises(OperatorError, match="a valid label for a mean"):
                loss(h, w, nothing, reduction=reduction)
        else:
            assert float(loss(h, w, nothing, reduction=reduction).detach().sum()) == 0


def test_no_tensor_of_all_logits_exists(monkeypatch):
    chunk = 1 << 10
    monkeypatch.setattr(sys.modules["microllm.ops.cross_entropy"], "CHUNK", chunk)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple | list) else (result,):
                self.numel = max(self.numel, t.numel() if isinstance(t, torch.Tensor) else 0)
            return result

    h, w, targets = (t.detach() for t in head(n=100, d=4, v=200))
    weights = torch.ones(100)
    with Largest() as seen:
        ops.CONTRACTS["linear_cross_entropy_gradients"].reference(h, w, targets, weights, -100, False)
        ops.CONTRACTS["linear_cross_entropy"].reference(h, w, targets, -100, False)
    assert 200 * 5 <= seen.numel <= chunk < 100 * 200


def test_the_gradient_of_a_bf16_head_is_summed_in_fp32():
    """In bf16 the sum over 4,096 tokens would stop growing; the operator's own result is fp32."""
    h, w, targets = (t.detach() for t in head(n=4096, d=2, v=3, dtype=torch.bfloat16))
    _, _, dw = ops.linear_cross_entropy_gradients(h, w, targets, torch.ones(4096))
    wide = [t.double().requires_grad_() for t in (h, w)]
    total = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, reduction="sum")
    assert dw.dtype == torch.float32
    torch.testing.assert_close(dw.double(), torch.autograd.grad(total, wide[1])[0], atol=1e-3, rtol=1e-4)
