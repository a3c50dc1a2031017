"""Optimizers and rates: torch's AdamW bit for bit, half the bytes in bf16, schedules by their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from microllm.errors import ConfigError
from microllm.training import OptimizerConfig, ScheduleConfig
from microllm.training.optimizer import SGD, AdamW, learning_rate


def parameters():
    draw = torch.Generator().manual_seed(0)
    shapes = {"matrix": (7, 5), "table": (33, 5), "norm": (5,), "bias": (3,)}
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


def give_gradients(params, step):
    draw = torch.Generator().manual_seed(100 + step)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=draw)


def test_adamw_equals_torchs_over_steps():
    ours, theirs = parameters(), parameters()
    config = OptimizerConfig(weight_decay=0.1)
    optimizer = AdamW(ours, config, seed=0)
    groups = [
        {"params": [p for p in theirs.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(1, 6):
        rate = 1e-2 / step
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(rate, step)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for name, p in ours.items():
        assert p.equal(theirs[name]), name
        assert optimizer.exp_avg[name].equal(reference.state[theirs[name]]["exp_avg"]), name
        assert optimizer.exp_avg_sq[name].equal(reference.state[theirs[name]]["exp_avg_sq"]), name


def test_bf16_moments_take_half_the_bytes_and_rounding_follows_the_seed():
    def run(seed, *, stochastic=True):
        params = parameters()
        optimizer = AdamW(params, OptimizerConfig(moments="bf16", stochastic_rounding=stochastic), seed=seed)
        for step in range(1, 4):
            give_gradients(params, step)
            optimizer.step(1e-2, step)
        return params, optimizer

    def size(optimizer):
        return sum(t.numel() * t.element_size() for t in optimizer.state.values())

    assert 2 * size(run(0)[1]) == size(AdamW(parameters(), OptimizerConfig(), 0))
    assert all(p.equal(run(0)[0][name]) for name, p in run(0)[0].items())
    assert not all(p.equal(run(1)[0][name]) for name, p in run(0)[0].items())
    assert all(p.equal(run(1, stochastic=False)[0][name]) for name, p in run(0, stochastic=False)[0].items())


def test_sgd_is_a_step_along_the_gradient():
    params = parameters()
    before = {name: p.detach().clone() for name, p in params.items()}
    give_gradients(params, 1)
    SGD(params).step(0.5, 1)
    assert all(torch.allclose(p, before[name] - 0.5 * p.grad) for name, p in params.items())


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.871429, 0.742857, 0.614286, 0.485714, 0.357143, 0.228571, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.955436, 0.830570, 0.650134, 0.449866, 0.269430, 0.144564, 0.1]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55, 0.1]),
    ],
)
def test_schedules(schedule, want):
    config = ScheduleConfig(schedule=schedule, warmup_steps=2, decay_fraction=0.3)
    rates = [learning_rate(step, 10, 1.0, config) for step in range(10)]
    assert rates == pytest.approx(want, abs=1e-6)


def test_a_warm_up_longer_than_the_run_and_one_step_runs():
    assert learning_rate(0, 1, 1.0, ScheduleConfig(warmup_steps=50)) == 1.0
    assert learning_rate(0, 1, 1.0, ScheduleConfig()) == 1.0
    with pytest.raises(ConfigError):
        ScheduleConfig(final_ratio=2.0)
    with pytest.raises(ConfigError):
        OptimizerConfig(learning_rate=0)
