"""What torch does at the hardware's limit: rows so that choice, ledger and benchmarks cover a whole model.

Axes:    D = last axis, M, K, N = a product's, T = tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from microllm.ops.contract import VENDOR, Arg, Contract, Out, Sizes, Tolerance, cases, numel, rounded
from microllm.ops.linear import LINEAR_TOLERANCE
from microllm.ops.operator import Operator


def add(a: Tensor, b: Tensor, *, out: Out = None) -> Tensor:
    """Return a + b, both of one shape and dtype; nothing is broadcast."""
    return ADD(a, b, out=out)


def multiply(a: Tensor, b: Tensor, *, out: Out = None) -> Tensor:
    """Return a * b, both of one shape and dtype; nothing is broadcast."""
    return MULTIPLY(a, b, out=out)


def add_bias(x: Tensor, bias: Tensor, *, out: Out = None) -> Tensor:
    """Return x [..., D] + bias [D]."""
    return ADD_BIAS(x, bias, out=out)


def matmul(a: Tensor, b: Tensor, *, out: Out = None) -> Tensor:
    """Return a [..., M, K] times b [..., K, N], leading axes equal; fp32 accumulation, rounded once."""
    return MATMUL(a, b, out=out)


def softmax(x: Tensor, *, out: Out = None) -> Tensor:
    """Return the softmax over the last axis; reduced in fp32, rounded once."""
    return SOFTMAX(x, out=out)


def causal_softmax(x: Tensor, *, out: Out = None) -> Tensor:
    """Return the softmax of scores [..., T, T] over keys up to the query's own; later ones are exactly 0."""
    return CAUSAL_SOFTMAX(x, out=out)


def _masked(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -math.inf)


def _softmax_reference(x: Tensor) -> Tensor:
    e = (x.float() - x.float().amax(dim=-1, keepdim=True)).exp()
    return (e / e.sum(dim=-1, keepdim=True)).to(x.dtype)


def _operator(
    name: str, axes: tuple[tuple[str, str], ...], result: str, num_flops: Callable[[Sizes], int],
    forward: Mapping[torch.dtype, Tolerance], *functions: Callable[..., Tensor],
) -> Operator:  # fmt: skip
    reference, vendor = functions
    return Operator(Contract(
        name=name, args=tuple(Arg(n, a) for n, a in axes), results=(Arg("y", result),), reference=reference,
        vendor=vendor, vendor_takes_out=True, composite=True, levels=VENDOR, sizes=_SIZES, forward=forward,
        backward=rounded(1e-4, 1e-4, times=4, wide=1e-2), num_flops=num_flops,
    ))  # fmt: skip


_SIZES = cases("...3,2 D65 M7 K33 N9 T6", "... D1 M1 K1 N1 T1", "...5 D8 M2 K64 N128 T33")
_ELEMENTWISE, _SOFTMAX = rounded(1e-6, 1e-6), rounded(2e-6, 2e-5)
_PAIR = (("a", "...D"), ("b", "...D"))

ADD = _operator("add", _PAIR, "...D", lambda s: numel(s, "...D"), _ELEMENTWISE, lambda a, b: a + b, torch.add)
MULTIPLY = _operator("multiply", _PAIR, "...D", lambda s: numel(s, "...D"), _ELEMENTWISE, lambda a, b: a * b, torch.mul)
ADD_BIAS = _operator(
    "add_bias", (("x", "...D"), ("bias", "D")), "...D", lambda s: numel(s, "...D"), _ELEMENTWISE,
    lambda x, bias: (x.float() + bias.float()).to(x.dtype), torch.add,
)  # fmt: skip
MATMUL = _operator(
    "matmul", (("a", "...MK"), ("b", "...KN")), "...MN", lambda s: 2 * numel(s, "...MN") * s["K"], LINEAR_TOLERANCE,
    lambda a, b: (a.float() @ b.float()).to(a.dtype), torch.matmul,
)  # fmt: skip
SOFTMAX = _operator(
    "softmax", (("x", "...D"),), "...D", lambda s: 4 * numel(s, "...D"), _SOFTMAX,
    _softmax_reference, partial(torch.softmax, dim=-1),
)  # fmt: skip
CAUSAL_SOFTMAX = _operator(
    "causal_softmax", (("x", "...TT"),), "...TT", lambda s: 4 * numel(s, "...TT"), _SOFTMAX,
    lambda x: _softmax_reference(_masked(x)),
    lambda x, out=None: torch.softmax(_masked(x), dim=-1, out=out) if out is not None else _masked(x).softmax(-1),
)  # fmt: skip

ARITHMETIC = (ADD, MULTIPLY, ADD_BIAS, MATMUL, SOFTMAX, CAUSAL_SOFTMAX)
