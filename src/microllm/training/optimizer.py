"""Optimizers over named parameters, and the learning rate of each step.

Place: the trainer calls ``step`` with gradients that it has checked; the checkpoint takes ``state``. Matrices decay;
norms and biases do not. The update itself is ``ops.adamw``: one launch for each of the two groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from microllm import ops
from microllm.training.config import OptimizerConfig, ScheduleConfig


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: a shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def learning_rate(step: int, num_steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the rate of ``step`` (from 0): a function of the step alone, so that resuming repeats nothing."""
    warmup = min(schedule.warmup_steps, num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    match schedule.schedule:
        case "constant":
            return peak
        case "wsd":
            begin = num_steps - max(1, round(schedule.decay_fraction * num_steps))
        case _:
            begin = warmup
    begin = max(begin, warmup)
    done = min(1.0, max(0.0, (step - begin) / max(1, num_steps - 1 - begin)))
    fall = (1 - math.cos(math.pi * done)) / 2 if schedule.schedule == "cosine" else done
    return peak * (1 - (1 - schedule.final_ratio) * fall)


class Optimizer(Protocol):
    """What the trainer needs of one."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the tensors that must be kept to go on, by name."""
        ...

    def step(self, rate: float, step: int) -> None:
        """Move every parameter by its gradient; ``step`` counts from 1."""
        ...


class AdamW:
    """AdamW with moments in fp32 or bf16."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, seed: int) -> None:
        self.config, self.seed = config, seed if config.stochastic_rounding else -1
        dtype = torch.float32 if config.moments == "fp32" else torch.bfloat16
        self.exp_avg = {n: torch.zeros_like(p, dtype=dtype) for n, p in parameters.items()}
        self.exp_avg_sq = {n: torch.zeros_like(p, dtype=dtype) for n, p in parameters.items()}
        self._groups = [
            _Group(decay, [n for n, p in parameters.items() if (p.dim() >= 2) == decays], parameters, self)
            for decays, decay in ((True, config.weight_decay), (False, 0.0))
        ]

    @property
    def state(self) -> dict[str, Tensor]:
        """Return both moments of every parameter."""
        return {f"{moment}.{name}": tensor for moment in ("exp_avg", "exp_avg_sq")
                for name, tensor in getattr(self, moment).items()}  # fmt: skip

    def step(self, rate: float, step: int) -> None:
        """Move every parameter by its gradient."""
        config = self.config
        for group in self._groups:
            if group.parameters:
                ops.adamw(
                    group.held, [local(_grad(p)) for p in group.parameters], group.exp_avgs, group.exp_avg_sqs,
                    lr=rate, beta1=config.beta1, beta2=config.beta2, eps=config.eps, weight_decay=group.decay,
                    step=step, seed=self.seed,
                )  # fmt: skip


class _Group:
    """Parameters of one decay, with what this rank holds of them and their moments: listed once, not every step."""

    def __init__(self, decay: float, names: list[str], parameters: Mapping[str, nn.Parameter], state: AdamW) -> None:
        self.decay, self.parameters = decay, [parameters[n] for n in names]
        self.held = [local(p.detach()) for p in self.parameters]
        self.exp_avgs = [local(state.exp_avg[n]) for n in names]
        self.exp_avg_sqs = [local(state.exp_avg_sq[n]) for n in names]


class SGD:
    """Plain gradient descent: what a test can follow by hand."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(parameters.values())

    @property
    def state(self) -> dict[str, Tensor]:
        """Return nothing: there is no state."""
        return {}

    def step(self, rate: float, step: int) -> None:
        """Move every parameter by its gradient."""
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, seed: int) -> Optimizer:
    """Return the optimizer that the config names."""
    return AdamW(parameters, config, seed) if config.optimizer == "adamw" else SGD(parameters)
