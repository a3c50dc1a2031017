"""The head's loss and its gradients, a chunk of tokens at a time: vendor products around the loss's own kernels.

The logits of a chunk are written in h's dtype by the vendor's product, read for the loss, and overwritten by their
gradient; two more products take that to dh and, in fp32, to dw. Chosen over a fused product and softmax because the
vendor's products run at 0.6-0.7 of the dense peak, which a kernel of ours would have to meet in all three; what is left
to win is one writing and three readings of a chunk. Many tokens a chunk matter more: each chunk reads and writes dw.

Place: operators of ``ops/cross_entropy.py``; the kernels are those of ``cross_entropy``.

Axes:    N = tokens, D = model dim, V = vocabulary
Numbers: logits are rounded to h's dtype; loss and dw in fp32; fp16 gradients are taken relative to the largest weight
Memory:  at most ``ROOM`` besides dh: dw in fp32 and one chunk, which is allocated in the call
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from microllm.ops.contract import Outs
from microllm.ops.kernels import cross_entropy

ROOM = 1_440_000_000
"""Bytes of dw and a chunk together."""
CHUNK = 640 * 2**20
"""Bytes of a chunk at most."""
STEP = 128
"""Tokens are chunked in multiples of this: the rows of a product's tile."""


def suits(h: Tensor, w: Tensor, *_: object) -> tuple[bool, str]:
    """Say yes where there is anything to multiply."""
    return h.shape[1] > 0 and w.shape[0] > 0, "vendor products around the loss's kernels, a chunk at a time"


def chunks(N: int, V: int, D: int, itemsize: int) -> Iterator[slice]:
    """Yield N tokens in few equal parts whose logits fit beside dw."""
    most = max(STEP, min(CHUNK, ROOM - 4 * V * D) // (V * itemsize) // STEP * STEP)
    parts = -(-N // most)
    size = -(-N // max(1, parts) // STEP) * STEP
    for start in range(0, N, max(1, size)):
        yield slice(start, min(N, start + size))


def run(h: Tensor, w: Tensor, targets: Tensor, ignore_index: int, need_valid: bool, *, out: Outs = None) -> Tensor:
    """Run ``linear_cross_entropy``."""
    loss = h.new_empty(h.shape[0], dtype=torch.float32) if out is None else out[0]
    _losses(h, w, targets, ignore_index, loss, None)
    return loss


def run_gradients(
    h: Tensor, w: Tensor, targets: Tensor, weights: Tensor, ignore_index: int, need_valid: bool, *, out: Outs = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``linear_cross_entropy_gradients``."""
    total, dh, dw = (
        (h.new_empty((), dtype=torch.float32), h.new_empty(h.shape), h.new_empty(w.shape, dtype=torch.float32))
        if out is None else out
    )  # fmt: skip
    loss = h.new_empty(h.shape[0], dtype=torch.float32)
    if h.shape[0] == 0:
        dw.zero_()
    elif h.dtype == torch.float16:  # a mean's weights times a probability would be below what fp16 holds
        largest = weights.abs().amax().clamp(min=1e-30)
        _losses(h, w, targets, ignore_index, loss, (weights / largest, dh, dw))
        dh.mul_(largest)
        dw.mul_(largest)
    else:
        _losses(h, w, targets, ignore_index, loss, (weights, dh, dw))
    torch.sum(loss * weights, dim=0, out=total)
    return total, dh, dw


def _losses(
    h: Tensor, w: Tensor, targets: Tensor, ignore_index: int, loss: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Fill ``loss``, and with (weights, dh, dw) those two."""
    (N, D), V = h.shape, w.shape[0]
    lse = torch.empty_like(loss)
    logits = None
    for part in chunks(N, V, D, h.element_size()):
        x, rows = h[part], part.stop - part.start
        logits = h.new_empty((rows, V)) if logits is None else logits[:rows]
        torch.mm(x, w.T, out=logits)
        cross_entropy.run(logits, targets[part], ignore_index, False, out=(loss[part], lse[part]))
        if gradients is not None:
            weights, dh, dw = gradients
            cross_entropy.run_backward(weights[part], logits, targets[part], lse[part], ignore_index, out=(logits,))
            torch.mm(logits, w, out=dh[part])
            _add_product(dw, logits, x, beta=min(part.start, 1))


def _add_product(dw: Tensor, d_logits: Tensor, x: Tensor, *, beta: int) -> None:
    """Add d_logits^T x to beta * dw, in fp32 whatever the operands are; with beta 0 dw is not read."""
    if x.is_cuda and x.dtype != dw.dtype:
        torch.addmm(dw, d_logits.T, x, out_dtype=torch.float32, beta=beta, out=dw)
    else:
        dw.addmm_(d_logits.T.float(), x.float(), beta=beta)
