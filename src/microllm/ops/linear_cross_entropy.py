"""The head's product and its cross-entropy in one: logits exist for a chunk of tokens at a time, never for all.

Place: the loss of training. Where the weight of each token is known beforehand (a sum, a mean), the gradients are
computed with the loss: three products in all. Else the backward pass computes the logits again.

Axes:    N = tokens, D = model dim, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from microllm.ops.contract import FLOATS, FP32, Arg, Contract, Tolerance, between, rounded
from microllm.ops.cross_entropy import (
    IGNORE,
    TARGETS,
    Reduction,
    label_rules,
    logit_gradients,
    reduced,
    token_losses,
)
from microllm.ops.operator import Operator

CHUNK = 1 << 22
"""Logits that exist at a time: 16 MiB in fp32."""


def linear_cross_entropy(
    h: Tensor, w: Tensor, targets: Tensor, *, reduction: Reduction = "mean", ignore_index: int = IGNORE
) -> Tensor:
    """Return cross_entropy(linear(h, w), targets).

    Shapes:  h [N, D], w [V, D], targets [N] int64 -> [N] or a number, fp32
    Numbers: logits, loss and the sum of w's gradient in fp32; ignored tokens give exactly 0
    Raises:
        OperatorError: as ``cross_entropy``.
    """
    mean = reduction == "mean"
    if reduction != "none" and torch.is_grad_enabled() and (h.requires_grad or w.requires_grad):
        counted = (targets != ignore_index).float()
        return GRADIENTS(h, w, targets, counted / counted.sum() if mean else counted, ignore_index, mean)[0]
    return reduced(LOSSES(h, w, targets, ignore_index, mean), targets, reduction, ignore_index)


def linear_cross_entropy_gradients(
    h: Tensor, w: Tensor, targets: Tensor, weights: Tensor, *, ignore_index: int = IGNORE,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum of weights * losses, and its gradients by h and by w.

    Shapes:  h [N, D], w [V, D], targets [N] int64, weights [N] fp32 -> a number fp32, [N, D] like h, [V, D] fp32
    Numbers: as ``linear_cross_entropy``
    Raises:
        OperatorError: as ``cross_entropy``.
    """
    return GRADIENTS(h, w, targets, weights, ignore_index, False, out=out)


def _chunks(h: Tensor, w: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of tokens with their inputs and logits in fp32."""
    w32, rows = w.float(), max(1, CHUNK // w.shape[0])
    for start in range(0, h.shape[0], rows):
        part = slice(start, start + rows)
        x = h[part].float()
        yield part, x, x @ w32.T


def _losses_reference(h: Tensor, w: Tensor, targets: Tensor, ignore_index: int, need_valid: bool) -> Tensor:  # noqa: FBT001
    loss = torch.empty(h.shape[0], device=h.device)
    for part, _, logits in _chunks(h, w):
        loss[part] = token_losses(logits, targets[part], ignore_index)[0]
    return loss


def _gradients_reference(
    h: Tensor, w: Tensor, targets: Tensor, weights: Tensor, ignore_index: int, need_valid: bool  # noqa: FBT001
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


def _losses_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - torch's context
    h, w, targets, ctx.ignore_index, _ = inputs
    ctx.save_for_backward(h, w, targets)


def _losses_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    h, w, targets = ctx.saved_tensors
    _, dh, dw = GRADIENTS.call(h, w, targets, grad.contiguous(), ctx.ignore_index, False)
    return dh, dw.to(w.dtype), None, None, None


def _gradients_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    ctx.w_dtype = inputs[1].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _gradients_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    dh, dw = ctx.saved_tensors
    scaled = torch.mul(dw, grad, out=torch.empty_like(dw, dtype=ctx.w_dtype))  # no third [V, D] in fp32
    return dh * grad.to(dh.dtype), scaled, None, None, None, None


_ARGS = (Arg("h", "ND"), Arg("w", "VD"), TARGETS)
_SCALARS = {"ignore_index": IGNORE, "need_valid": False}
_SIZES = ({"N": 9, "V": 101, "D": 64}, {"N": 1, "V": 1, "D": 1}, {"N": 0, "V": 3, "D": 5}, {"N": 33, "V": 7, "D": 13})
_LOSS = {dtype: Tolerance(1e-4, 2e-5) for dtype in FLOATS}

LOSSES = Operator(Contract(
    name="linear_cross_entropy", args=_ARGS, results=(Arg("loss", "N", dtypes=FP32),), scalars=_SCALARS,
    rules=label_rules(2, lambda h, w, *_: w.shape[0]), reference=_losses_reference,
    autograd=(_losses_backward, _losses_setup), sizes=_SIZES, forward=_LOSS, backward=rounded(1e-4, 1e-4),
    num_flops=lambda s: 2 * s["N"] * s["V"] * s["D"],
))  # fmt: skip

GRADIENTS = Operator(Contract(
    name="linear_cross_entropy_gradients", args=(*_ARGS, Arg("weights", "N", between(0, 1), FP32)),
    results=(Arg("total", "", dtypes=FP32), Arg("dh", "ND"), Arg("dw", "VD", dtypes=FP32)), scalars=_SCALARS,
    rules=label_rules(2, lambda h, w, *_: w.shape[0]), reference=_gradients_reference, backward=rounded(1e-4, 1e-4),
    autograd=(_gradients_backward, _gradients_setup), sizes=_SIZES, forward=rounded(1e-4, 1e-4),
    num_flops=lambda s: 6 * s["N"] * s["V"] * s["D"],
))  # fmt: skip

OPERATORS = (LOSSES, GRADIENTS)
