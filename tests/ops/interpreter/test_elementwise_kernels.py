"""What the contracts' small examples leave out of a kernel: many tiles, whole chunks, rows that fill no block."""

import math

import numpy as np
import pytest
import torch

from microllm import ops
from microllm.errors import OperatorError
from microllm.ops.kernels import KERNELS

pytestmark = pytest.mark.interpreter
OPTIONS = {"beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "lr": 1e-2}


@pytest.mark.parametrize("D", [1, 16, 96, 4097])
def test_a_norm_of_many_tiles(D):
    x, residual, w = torch.randn(max(2, 9000 // D), D), torch.randn(max(2, 9000 // D), D), torch.rand(D) + 0.5
    leaves = [t.double().requires_grad_() for t in (x, residual, w)]
    want = leaves[0] + leaves[1]
    want_normed = torch.nn.functional.rms_norm(want, (D,), leaves[2], 1e-5)
    ours = [t.clone().requires_grad_() for t in (x, residual, w)]
    total, normed = ops.add_rms_norm(*ours, eps=1e-5)
    torch.testing.assert_close(total, x + residual, atol=0, rtol=0)
    torch.testing.assert_close(normed.double(), want_normed, atol=1e-5, rtol=1e-5)
    weights = torch.randn(2, *x.shape)
    got = torch.autograd.grad((total * weights[0] + normed * weights[1]).sum(), ours)
    expected = torch.autograd.grad((want * weights[0] + want_normed * weights[1]).sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-4, rtol=2e-4)


def test_a_norms_gradient_has_the_same_bits_every_time():
    x, w, dy = torch.randn(70, 96), torch.rand(96), torch.randn(70, 96)
    first, again = (ops.OPERATORS["rms_norm_backward"](dy, x, w, None, 1e-5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_row_that_is_too_long_for_registers_is_not_taken():
    x, w = torch.randn(1, 8193), torch.ones(8193)
    with pytest.raises(OperatorError, match="rows of 1 to 8192"):
        ops.rms_norm(x, w, eps=1e-5)


def test_a_loss_over_several_blocks_and_over_masked_tokens():
    logits = 30 * torch.randn(3, 9000)
    logits[0, :8192] = -math.inf  # the first two blocks of a row hold nothing but masked tokens
    logits[1, 5000:] = -math.inf
    targets = torch.tensor([8999, 17, -100])
    ours, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = ops.cross_entropy(ours, targets, reduction="sum")
    want = torch.nn.functional.cross_entropy(wide, targets, reduction="sum")
    torch.testing.assert_close(loss.double(), want, atol=2e-5, rtol=2e-5)
    got, expected = torch.autograd.grad(loss, ours)[0], torch.autograd.grad(want, wide)[0]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def stepped(p, g, m, v, beta1, step):
    """One step in fp32, in the kernel's order; numpy fuses no product with a sum, and its root is rounded once."""
    weight, square = torch.tensor(1 - beta1), torch.tensor(1 - OPTIONS["beta2"])
    p = p * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
    m = (m - g) * (1 - weight) + g if weight > 0.5 else (g - m) * weight + m
    v = square * (g * g) + v * torch.tensor(OPTIONS["beta2"])
    inverse = 1 / torch.tensor((1 - OPTIONS["beta2"] ** step) ** 0.5)
    denominator = torch.as_tensor(np.sqrt(v.numpy())) * inverse + OPTIONS["eps"]
    return m / denominator * torch.tensor(-OPTIONS["lr"] / (1 - beta1**step)) + p, m, v


@pytest.mark.parametrize("beta1", [0.9, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_steps_whole_chunks_and_rests_in_torchs_order(beta1, dtype):
    params = [torch.randn(shape) for shape in ((3, 700), (5,), (0,), (1024,), ())]
    ms, vs = ([torch.zeros(p.shape, dtype=dtype) for p in params] for _ in range(2))
    for step in (1, 2):
        grads = [torch.randn(p.shape) for p in params]
        want = [
            stepped(p, g, m.float(), v.float(), beta1, step) for p, g, m, v in zip(params, grads, ms, vs, strict=True)
        ]
        ops.adamw(params, grads, ms, vs, beta1=beta1, step=step, **OPTIONS)
        for got, (p, m, v) in zip(zip(params, ms, vs, strict=True), want, strict=True):
            assert torch.equal(got[0], p)
            assert torch.equal(got[1], m.to(dtype))
            assert torch.equal(got[2], v.to(dtype))


def test_random_rounding_draws_the_references_bits():
    grads = [torch.randn(shape) for shape in ((1500,), (3,))]
    moments = []
    for level in ("triton", "reference"):
        params = [torch.zeros_like(g) for g in grads]
        ms, vs = ([torch.zeros(g.shape, dtype=torch.bfloat16) for g in grads] for _ in range(2))
        with ops.use(level, "adamw"):
            ops.adamw(params, grads, ms, vs, beta1=0.0, step=7, seed=2**40 + 3, **OPTIONS)
        moments.append(torch.cat(ms))
    assert torch.equal(*moments)  # with beta1 0 the first moment is the gradient itself, whatever is fused


def test_adamw_takes_contiguous_tensors_only():
    p = torch.zeros(4, 6)[:, ::2]
    rest = [[torch.zeros(4, 3)] for _ in range(3)]
    suits = KERNELS["adamw"].suits
    assert suits([p], *rest) == (False, "contiguous tensors, each moment of one dtype")
    assert suits([p.contiguous()], *rest)[0]


@pytest.mark.parametrize("fnuz", [False, True])
def test_every_fp16_number_gets_the_fp8_code_that_torch_gives_it(fnuz):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(torch.float16).view(16, 4096)
    x = x.nan_to_num(nan=0.0, posinf=65504.0, neginf=-65504.0)
    dtype, largest = (torch.float8_e4m3fnuz, 240) if fnuz else (torch.float8_e4m3fn, 448)
    got = ops.quantise_fp8(x, torch.ones(16, 1, dtype=torch.float16), fnuz=fnuz)
    want = x.float().clamp(-largest, largest).to(dtype)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
