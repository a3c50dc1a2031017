"""Cross-entropy of logits against labels, in fp32: loss = logsumexp(logits) - logits[target].

Axes:    N = tokens, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from microllm.ops.contract import FLOATS, FP32, INT64, Arg, Contract, Rule, Sizes, Tolerance, between, in_range, rounded
from microllm.ops.operator import Operator

Reduction = Literal["none", "sum", "mean"]
IGNORE = -100
"""The label of a token that is not counted."""


def cross_entropy(
    logits: Tensor, targets: Tensor, *, reduction: Reduction = "mean", ignore_index: int = IGNORE
) -> Tensor:
    """Return the loss of each token, or their sum, or their mean over the tokens that are not ignored.

    Shapes:  logits [N, V], targets [N] int64 -> [N] or a number, fp32
    Numbers: fp32; an ignored token's loss and gradient are exactly 0; on a GPU a label out of range gives NaN
    Raises:
        OperatorError: sizes or dtypes differ, or (on a CPU) a label is out of range, or a mean has no valid label.
    """
    return reduced(CROSS_ENTROPY(logits, targets, ignore_index, reduction == "mean")[0], targets, reduction, ignore_index)


def reduced(loss_N: Tensor, targets: Tensor, reduction: Reduction, ignore_index: int) -> Tensor:
    """Return the losses as they are, their sum, or their mean over the labels that are not ignored."""
    if reduction == "none":
        return loss_N
    return loss_N.sum() if reduction == "sum" else loss_N.sum() / (targets != ignore_index).sum()


def token_losses(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return each token's loss and the logsumexp of its logits, fp32."""
    x, V = logits.float(), logits.shape[1]
    lse = x.logsumexp(dim=1)
    picked = x.gather(1, targets.clamp(0, V - 1)[:, None]).squeeze(1)
    loss = torch.where((targets >= 0) & (targets < V), lse - picked, torch.nan)
    return torch.where(targets == ignore_index, 0.0, loss), lse


def logit_gradients(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, ignore_index: int) -> Tensor:
    """Return (softmax - one hot) * grad in fp32, 0 for tokens ignored, NaN for labels out of range."""
    V = logits.shape[1]
    p = (logits.float() - lse[:, None]).exp() - (targets[:, None] == torch.arange(V, device=logits.device)).float()
    factor = torch.where((targets >= 0) & (targets < V), grad, torch.nan)
    return torch.where(targets[:, None] == ignore_index, 0.0, p * factor[:, None])


def _backward_reference(grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    return logit_gradients(logits, targets, lse, grad, ignore_index).to(logits.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 - torch's context
    logits, targets, ctx.ignore_index, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, targets, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    return BACKWARD.call(grad.contiguous(), *ctx.saved_tensors, ctx.ignore_index), None, None, None


def draw_targets(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw labels, every fourth one ignored."""
    targets = torch.randint(sizes["V"], shape, generator=generator)
    targets[3::4] = IGNORE
    return targets


def label_rules(targets: int, num_classes: Callable[..., int]) -> tuple[Rule, ...]:
    """Return the rules on labels: argument ``targets``, then ignore_index and need_valid last of all."""

    def valid(*v: Any) -> Tensor:
        return v[targets][v[targets] != v[-2]]

    return (
        Rule(
            "labels from 0 to V - 1, or ignore_index", lambda *v: in_range(valid(*v), 0, num_classes(*v)),
            ({"targets": lambda c: c["targets"] * 0 - 1}, {"targets": lambda c: c["targets"] * 0 + 10**6}),
            by_value=True,
        ),
        Rule(
            "a valid label for a mean", lambda *v: not v[-1] or valid(*v).numel() > 0,
            ({"targets": lambda c: c["targets"] * 0 + IGNORE, "need_valid": True},), by_value=True,
        ),
    )  # fmt: skip


TARGETS = Arg("targets", "N", draw_targets, INT64)
_SIZES = ({"N": 9, "V": 101}, {"N": 1, "V": 1}, {"N": 4, "V": 1000}, {"N": 0, "V": 3})
_LSE = Arg("lse", "N", between(5, 9), FP32)

CROSS_ENTROPY = Operator(Contract(
    name="cross_entropy", args=(Arg("logits", "NV"), TARGETS),
    results=(Arg("loss", "N", dtypes=FP32), Arg("lse", "N", dtypes=FP32)),
    scalars={"ignore_index": IGNORE, "need_valid": False}, rules=label_rules(1, lambda logits, *_: logits.shape[1]),
    reference=lambda logits, targets, ignore_index, need_valid: token_losses(logits, targets, ignore_index),
    autograd=(_backward, _setup), sizes=_SIZES, forward={dtype: Tolerance(2e-5, 2e-5) for dtype in FLOATS},
    backward=rounded(3e-5, 3e-5), num_flops=lambda s: 4 * s["N"] * s["V"],
))  # fmt: skip

BACKWARD = Operator(Contract(
    name="cross_entropy_backward", args=(Arg("grad", "N", dtypes=FP32), Arg("logits", "NV"), TARGETS, _LSE),
    results=(Arg("d_logits", "NV"),), scalars={"ignore_index": IGNORE}, reference=_backward_reference, sizes=_SIZES,
    forward=rounded(3e-5, 3e-5), num_flops=lambda s: 4 * s["N"] * s["V"],
))  # fmt: skip

OPERATORS = (CROSS_ENTROPY, BACKWARD)
