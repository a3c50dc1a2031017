"""What torch has for each operator: how a person would write it, eager or through torch.compile.

Place: the peers of ``bench ops``. A linear's is cuBLAS, through ``torch.nn.functional``; a quantised linear's is the
product with the weight as it was before, in x's dtype; attention's has keys and values in one piece. An operator that
torch has nothing for has its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from microllm import ops
from microllm.evidence.timing import Action
from microllm.ops.linear_codes import dequantised


def _norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, w.shape, w, eps)


def _norm_linear(x: Tensor, gain: Tensor, w: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.linear(_norm(x, gain, eps), w, bias)


def _norm_linear_swiglu(x: Tensor, gain: Tensor, w: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    gate, up = _norm_linear(x, gain, w, bias, eps).chunk(2, dim=-1)
    return F.silu(gate) * up


def _add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _norm(total, w, eps)


def _head_loss(h: Tensor, w: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(F.linear(h, w).float(), targets, reduction="none")
    return (losses * weights).sum()


WRITTEN: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "linear_one_tiling": F.linear,
    "linear_residual": lambda x, w, residual, bias: residual + F.linear(x, w, bias),
    "norm_linear": _norm_linear,
    "norm_linear_swiglu": _norm_linear_swiglu,
    "rms_norm": _norm,
    "add_rms_norm": _add_rms_norm,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "argmax": lambda logits: logits.argmax(dim=1),
    "lm_head_argmax": lambda x, w: F.linear(x, w).argmax(dim=1),
    "cross_entropy": lambda logits, targets, *_: F.cross_entropy(logits, targets, reduction="none"),
    "linear_cross_entropy_gradients": _head_loss,
    "attention_decode": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "linear_int8": F.linear,
    "linear_fp8": F.linear,
    "linear_int4": F.linear,
}
"""The operators that torch has words for."""


@cache
def _compiled(op: str) -> Callable[..., Any]:
    return torch.compile(WRITTEN.get(op, ops.CONTRACTS[op].reference), dynamic=False)


def peer(op: str, values: Sequence[Any], *, compiled: bool) -> Action:
    """Return a call of torch's own form with the operands of a call of ours."""
    if op.endswith("_codes"):
        at = next(i for i, v in enumerate(values) if isinstance(v, Tensor) and v.element_size() == 1)
        w = dequantised(*values[at : at + 3]).to(values[0].dtype)
        return peer(op.removesuffix("_codes"), [*values[:at], w, *values[at + 3 :]], compiled=compiled)
    function = _compiled(op) if compiled else WRITTEN.get(op, ops.CONTRACTS[op].reference)
    if op in ("linear_int8", "linear_fp8", "linear_int4"):
        x, *coded, bias = values
        w = getattr(ops, op.replace("linear", "dequantise"))(*coded).to(x.dtype)
        return lambda: function(x, w, bias)
    if op == "linear_cross_entropy_gradients":
        h, w, targets, weights = values[:4]
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        return lambda: torch.autograd.grad(function(h, w, targets, weights), (h, w))
    if op == "attention_decode":
        q, k_pages, v_pages, table = values[:4]
        k, v = (pages[table.long()].flatten(1, 2).transpose(1, 2).contiguous() for pages in (k_pages, v_pages))
        return lambda: function(q.transpose(1, 2), k, v)
    return lambda: function(*values)
