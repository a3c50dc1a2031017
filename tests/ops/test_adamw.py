"""AdamW: torch's bits in fp32, half the bytes in bf16, rounding at random that is even on average."""

import pytest
import torch

from microllm import ops

OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def state(dtype=torch.float32):
    params = [torch.randn(shape) for shape in ((33, 7), (5,), (2, 3, 4))]
    return (
        params,
        [torch.zeros_like(p, dtype=dtype) for p in params],
        [torch.zeros_like(p, dtype=dtype) for p in params],
    )


@pytest.mark.parametrize(("level", "fused"), [("reference", False), ("vendor", True)])
def test_ten_steps_are_torchs_bit_for_bit(level, fused):
    params, ms, vs = state()
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(theirs, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused, foreach=False)
    for step in range(1, 11):
        grads = [torch.randn_like(p) for p in params]
        lr = 1e-2 / step
        with ops.use(level):
            ops.adamw(params, grads, ms, vs, lr=lr, step=step, **OPTIONS)
        optimizer.param_groups[0]["lr"] = lr
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for p, m, v, q in zip(params, ms, vs, theirs, strict=True):
        assert torch.equal(p, q.detach())
        assert torch.equal(m, optimizer.state[q]["exp_avg"])
        assert torch.equal(v, optimizer.state[q]["exp_avg_sq"])


def test_parameters_that_require_grad_are_stepped_in_place():
    params, ms, vs = state()
    leaves = [p.requires_grad_() for p in params]
    before = [p.detach().clone() for p in leaves]
    ops.adamw(leaves, [torch.ones_like(p) for p in before], ms, vs, lr=0.1, step=1, **OPTIONS)
    assert all((p < b).all() for p, b in zip(leaves, before, strict=True))


def test_bf16_moments_are_rounded_once_a_step_and_the_parameter_sees_them_unrounded():
    params, ms, vs = state(torch.bfloat16)
    exact, exact_ms, exact_vs = [[t.float().clone() for t in ts] for ts in (params, ms, vs)]
    assert sum(m.nbytes for m in ms) * 2 == sum(m.nbytes for m in exact_ms)
    for step in (1, 2):
        grads = [torch.randn_like(p) for p in params]
        for m, e in zip((*ms, *vs), (*exact_ms, *exact_vs), strict=True):
            e.copy_(m)
        ops.adamw(params, grads, ms, vs, lr=1e-2, step=step, **OPTIONS)
        with ops.use("reference"):
            ops.adamw(exact, grads, exact_ms, exact_vs, lr=1e-2, step=step, **OPTIONS)
        for m, e in zip((*ms, *vs), (*exact_ms, *exact_vs), strict=True):
            assert torch.equal(m, e.bfloat16())
    assert all(torch.equal(p, e) for p, e in zip(params, exact, strict=True))


@pytest.mark.interpreter
def test_random_rounding_repeats_by_its_seed_and_is_even_on_average():
    def moment(seed, step=1):
        p, g = [torch.zeros(20_000)], [torch.full((20_000,), 1.0 + 2**-9)]
        m, v = [torch.zeros(20_000, dtype=torch.bfloat16)], [torch.zeros(20_000, dtype=torch.bfloat16)]
        ops.adamw(p, g, m, v, lr=0.0, step=step, seed=seed, **OPTIONS)
        return m[0]

    exact = 0.1 * (1 + 2**-9)
    drawn = moment(3)
    assert torch.equal(drawn, moment(3))
    assert not torch.equal(drawn, moment(4))
    assert not torch.equal(drawn, moment(3, step=2))
    assert len(drawn.unique()) == 2
    assert abs(float(drawn.double().mean()) - exact) < 2e-6 < abs(float(torch.tensor(exact).bfloat16()) - exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
@pytest.mark.parametrize("seed", [-1, 5])
def test_the_kernel_has_the_bits_of_torchs_operators_on_a_gpu(dtype, beta1, seed):
    shapes = ((300, 700), (5,), (1024,), ())
    states = {}
    for level in ("triton", "reference"):
        torch.manual_seed(0)
        params = [torch.randn(shape, device="cuda") for shape in shapes]
        ms, vs = ([torch.zeros(p.shape, dtype=dtype, device="cuda") for p in params] for _ in range(2))
        for step in range(1, 6):
            grads = [torch.randn_like(p) for p in params]
            with ops.use(level, "adamw"):
                ops.adamw(params, grads, ms, vs, lr=1e-2 / step, step=step, seed=seed, **OPTIONS | {"beta1": beta1})
        states[level] = [*params, *ms, *vs]
    assert all(torch.equal(a, b) for a, b in zip(*states.values(), strict=True))
