"""Cross-entropy in fp32, loss = logsumexp(logits) - logits[target]: of logits, or of the head's product itself.

Of the product, logits exist for a chunk of tokens at a time, never for all. Where the weight of each token is known
beforehand (a sum, a mean), gradients are computed with the loss: three products in all. Else the backward pass
computes the logits again.

Axes:    N = tokens, D = model dim, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from microllm.ops.contract import (
    FP32,
    INT64,
    TRITON,
    Arg,
    Contract,
    Outs,
    Rule,
    Sizes,
    between,
    cases,
    flat,
    in_range,
    rounded,
    weight,
)
from microllm.ops.operator import Operator, saving

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
    loss, _ = CROSS_ENTROPY(logits, targets, ignore_index, reduction == "mean")
    return reduced(loss, targets, reduction, ignore_index)


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


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return CROSS_ENTROPY_BACKWARD.call(grad.contiguous(), *ctx.saved_tensors, ctx.scalars[0]), None, None, None


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
_SIZES = cases("N9 V101", "N1 V1", "N4 V1000", "N0 V3")
_LSE = Arg("lse", "N", between(5, 9), FP32)

CROSS_ENTROPY = Operator(Contract(
    name="cross_entropy", args=(Arg("logits", "NV"), TARGETS),
    results=(Arg("loss", "N", dtypes=FP32), Arg("lse", "N", dtypes=FP32)),
    scalars={"ignore_index": IGNORE, "need_valid": False}, rules=label_rules(1, lambda logits, *_: logits.shape[1]),
    reference=lambda logits, targets, ignore_index, need_valid: token_losses(logits, targets, ignore_index),
    autograd=(_backward, saving(0, 1, outputs=(1,), constant=True)), sizes=_SIZES, forward=flat(2e-5, 2e-5),
    backward=rounded(3e-5, 3e-5), levels=TRITON, invariant=("triton",), num_flops=lambda s: 4 * s["N"] * s["V"],
))  # fmt: skip

CROSS_ENTROPY_BACKWARD = Operator(Contract(
    name="cross_entropy_backward", args=(Arg("grad", "N", dtypes=FP32), Arg("logits", "NV"), TARGETS, _LSE),
    results=(Arg("d_logits", "NV"),), scalars={"ignore_index": IGNORE}, reference=_backward_reference, sizes=_SIZES,
    levels=TRITON, invariant=("triton",), forward=rounded(3e-5, 3e-5), num_flops=lambda s: 4 * s["N"] * s["V"],
))  # fmt: skip


CHUNK = 1 << 22
"""Logits that exist at a time: 16 MiB in fp32."""


def linear_cross_entropy(
    h: Tensor, w: Tensor, targets: Tensor, *, reduction: Reduction = "mean", ignore_index: int = IGNORE
) -> Tensor:
    """Return cross_entropy(linear(h, w), targets).

    Shapes:  h [N, D], w [V, D], targets [N] int64 -> [N] or a number, fp32
    Numbers: loss and the sum of w's gradient in fp32; whether logits are rounded to h's dtype is the level's; ignored
             tokens give exactly 0
    Raises:
        OperatorError: as ``cross_entropy``.
    """
    mean = reduction == "mean"
    if reduction != "none" and torch.is_grad_enabled() and (h.requires_grad or w.requires_grad):
        counted = (targets != ignore_index).float()
        return HEAD_GRADIENTS(h, w, targets, counted / counted.sum() if mean else counted, ignore_index, mean)[0]
    return reduced(HEAD(h, w, targets, ignore_index, mean), targets, reduction, ignore_index)


def linear_cross_entropy_gradients(
    h: Tensor, w: Tensor, targets: Tensor, weights: Tensor, *, ignore_index: int = IGNORE,
    out: Outs = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum of weights * losses, and its gradients by h and by w.

    Shapes:  h [N, D], w [V, D], targets [N] int64, weights [N] fp32 -> a number fp32, [N, D] like h, [V, D] fp32
    Numbers: as ``linear_cross_entropy``
    Raises:
        OperatorError: as ``cross_entropy``.
    """
    return HEAD_GRADIENTS(h, w, targets, weights, ignore_index, False, out=out)


def _chunks(h: Tensor, w: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of tokens with their inputs and logits in fp32."""
    w32, rows = w.float(), max(1, CHUNK // w.shape[0])
    for start in range(0, h.shape[0], rows):
        part = slice(start, start + rows)
        x = h[part].float()
        yield part, x, x @ w32.T


def _losses_reference(h: Tensor, w: Tensor, targets: Tensor, ignore_index: int, need_valid: bool) -> Tensor:
    loss = torch.empty(h.shape[0], device=h.device)
    for part, _, logits in _chunks(h, w):
        loss[part] = token_losses(logits, targets[part], ignore_index)[0]
    return loss


def _gradients_reference(
    h: Tensor, w: Tensor, targets: Tensor, weights: Tensor, ignore_index: int, need_valid: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total, dh = torch.zeros((), device=h.device), torch.empty(h.shape, dtype=h.dtype, device=h.device)
    w32, dw = w.float(), torch.zeros(w.shape, device=w.device)
    for part, x, logits in _chunks(h, w32):
        loss, lse = token_losses(logits, targets[part], ignore_index)
        total += (loss * weights[part]).sum()
        d_logits = logit_gradients(logits, targets[part], lse, weights[part], ignore_index)
        dh[part] = (d_logits @ w32).to(h.dtype)
        dw.addmm_(d_logits.T, x)
    return total, dh, dw


def _losses_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    h, w, targets = ctx.saved_tensors
    _, dh, dw = HEAD_GRADIENTS.call(h, w, targets, grad.contiguous(), *ctx.scalars)
    return dh, dw.to(w.dtype), None, None, None


def _gradients_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    w, dh, dw = ctx.saved_tensors
    scaled = torch.mul(dw, grad, out=torch.empty_like(w))  # no second [V, D] in fp32
    return dh * grad.to(dh.dtype), scaled, None, None, None, None


_ARGS = (Arg("h", "ND"), Arg("w", "VD", weight), TARGETS)
_SCALARS = {"ignore_index": IGNORE, "need_valid": False}
_HEAD_GRADIENT = rounded(1e-4, 1e-4, times=2, wide=2e-2)  # a level may round logits and their gradients
_HEAD_SIZES = cases("N9 V101 D64", "N1 V1 D1", "N0 V3 D5", "N33 V7 D13")

HEAD = Operator(Contract(
    name="linear_cross_entropy", args=_ARGS, results=(Arg("loss", "N", dtypes=FP32),), scalars=_SCALARS,
    rules=label_rules(2, lambda h, w, *_: w.shape[0]), reference=_losses_reference,
    autograd=(_losses_backward, saving(0, 1, 2)), levels=TRITON, sizes=_HEAD_SIZES,
    forward=rounded(1e-4, 2e-5, times=0, wide=2e-2), backward=_HEAD_GRADIENT,
    num_flops=lambda s: 2 * s["N"] * s["V"] * s["D"],
))  # fmt: skip

HEAD_GRADIENTS = Operator(Contract(
    name="linear_cross_entropy_gradients", args=(*_ARGS, Arg("weights", "N", between(0, 1), FP32)),
    results=(Arg("total", "", dtypes=FP32), Arg("dh", "ND"), Arg("dw", "VD", dtypes=FP32)), scalars=_SCALARS,
    rules=label_rules(2, lambda h, w, *_: w.shape[0]), reference=_gradients_reference,
    autograd=(_gradients_backward, saving(1, outputs=(1, 2), constant=True)), sizes=_HEAD_SIZES,
    levels=TRITON, forward=_HEAD_GRADIENT, backward=_HEAD_GRADIENT, num_flops=lambda s: 6 * s["N"] * s["V"] * s["D"],
))  # fmt: skip

LOSSES = (CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, HEAD, HEAD_GRADIENTS)
