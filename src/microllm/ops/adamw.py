"""AdamW over many tensors in one call, moments in fp32 or bf16.

Source:  arXiv:1711.05101; the order of operations is torch's, so that fp32 states are equal bit for bit
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import FP32, Arg, Contract, Draw, Rule, Sizes, Tolerance
from microllm.ops.operator import Operator
from microllm.ops.sample import philox

Tensors = Sequence[Tensor]


@torch.no_grad()
def adamw(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: int, seed: int = -1,
) -> None:  # fmt: skip
    """Take one AdamW step in place: p -= lr * (m / (sqrt(v) + eps) + weight_decay * p), m and v unbiased.

    ``step`` counts from 1. ``seed`` from 0 rounds bf16 moments up or down at random, by (seed, step, tensor, element);
    -1 rounds to nearest.

    Shapes:  four lists of tensors, equal shapes at equal places
    Numbers: fp32; moments fp32 or bf16, rounded once a step, after the parameter has seen them unrounded
    Raises:
        OperatorError: lists differ, a dtype is not one of these, a number is out of range.
    """
    ADAMW(list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), lr, beta1, beta2, eps, weight_decay, step, seed)


def _reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: int, seed: int,
) -> None:  # fmt: skip
    for number, (p, g, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        m, v = exp_avg.float(), exp_avg_sq.float()
        p.mul_(1 - lr * weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
        p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
        for which, (moment, exact) in enumerate(((exp_avg, m), (exp_avg_sq, v))):
            if moment.dtype != torch.float32:
                moment.copy_(exact if seed < 0 else _dithered(exact, (step, 2 * number + which), seed))


def _dithered(x: Tensor, key: tuple[int, int], seed: int) -> Tensor:
    """Return finite x cut to bf16's bits after a random part of the last one was added."""
    index = torch.arange(x.numel(), device=x.device)
    step, stream = (torch.full_like(index, k) for k in key)
    noise = philox((index & 0xFFFFFFFF, index >> 32, step, stream), torch.full_like(index, seed))[0] >> 16
    return ((x.view(torch.int32) + noise.view_as(x).int()) & -0x10000).view(torch.float32)


def _vendor(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: int, seed: int,
) -> None:  # fmt: skip
    steps = [torch.full((), float(step), device=params[0].device)] * len(params)
    torch.ops.aten._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay,
        eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def _vendor_suits(*v: Any) -> tuple[bool, str]:
    return all(t.dtype == torch.float32 for t in chain(v[2], v[3])), "torch's fused AdamW, which takes fp32 moments"


def _alike(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *_: float) -> bool:
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    return len(params) > 0 and len({tuple(t.shape for t in ts) for ts in lists}) == 1


def _draw(*, positive: bool = False) -> Draw:
    def draw(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        tensors = [torch.randn(shape, generator=generator) for shape in ((7, 33), (5,), (0,), ())]
        return [(t.square() if positive else t).to(dtype) for t in tensors]

    return draw


_MOMENT = (torch.float32, torch.bfloat16)
_RULES = (
    Rule("lists of one length above 0, equal shapes", _alike, ({"grads": lambda c: c["grads"][1:]}, {"params": []})),
    Rule("lr from 0", lambda *v: v[4] >= 0, ({"lr": -1.0}, {"lr": math.nan})),
    Rule("betas from 0 to below 1", lambda *v: 0 <= min(v[5:7]) <= max(v[5:7]) < 1, ({"beta1": 1.0}, {"beta2": -0.1})),
    Rule("eps from 0", lambda *v: v[7] >= 0, ({"eps": -1.0},)),
    Rule("weight_decay from 0", lambda *v: v[8] >= 0, ({"weight_decay": -0.1},)),
    Rule("step from 1", lambda *v: v[9] >= 1, ({"step": 0},)),
)

ADAMW = Operator(Contract(
    name="adamw",
    args=(
        Arg("params", "", _draw(), FP32, mutated=True, many=True), Arg("grads", "", _draw(), FP32, many=True),
        Arg("exp_avgs", "", _draw(), _MOMENT, mutated=True, many=True),
        Arg("exp_avg_sqs", "", _draw(positive=True), _MOMENT, mutated=True, many=True),
    ),
    scalars={"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3, "seed": -1},
    rules=_RULES, reference=_reference, vendor=_vendor, vendor_suits=_vendor_suits, sizes=({},),
    levels={"cpu": ("vendor", "reference"), "cuda": ("triton", "vendor", "reference")},
    forward={torch.float32: Tolerance(1e-6, 1e-6)}, traffic=lambda s, item: 28 * 237, num_flops=lambda s: 14 * 237,
))  # fmt: skip
