"""What torch does at the hardware's limit: rows so that choice, ledger and benchmarks cover a whole model.

Axes:    D = last axis, M, K, N = a product's, T = tokens
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from microllm.ops.contract import VENDOR, Arg, Contract, Out, Sizes, cases, numel, rounded
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


def _flops(s: Sizes) -> int:
    return numel(s, "...D")


_SIZES = cases("...3,2 D65 M7 K33 N9 T6", "... D1 M1 K1 N1 T1", "...5 D8 M2 K64 N128 T33")
_ELEMENTWISE, _SOFTMAX = rounded(1e-6, 1e-6), rounded(2e-6, 2e-5)
_A, _B, _X, _Y = Arg("a", "...D"), Arg("b", "...D"), Arg("x", "...D"), (Arg("y", "...D"),)
_row = partial(
    Contract, results=_Y, vendor_takes_out=True, composite=True, levels=VENDOR, sizes=_SIZES, forward=_ELEMENTWISE,
    backward=rounded(1e-4, 1e-4, times=4, wide=1e-2), num_flops=_flops,
)  # fmt: skip

ARITHMETIC = (
    ADD := Operator(_row(name="add", args=(_A, _B), reference=lambda a, b: a + b, vendor=torch.add)),
    MULTIPLY := Operator(_row(name="multiply", args=(_A, _B), reference=lambda a, b: a * b, vendor=torch.mul)),
    ADD_BIAS := Operator(_row(
        name="add_bias", args=(_X, Arg("bias", "D")), vendor=torch.add,
        reference=lambda x, bias: (x.float() + bias.float()).to(x.dtype),
    )),
    MATMUL := Operator(_row(
        name="matmul", args=(Arg("a", "...MK"), Arg("b", "...KN")), results=(Arg("y", "...MN"),), vendor=torch.matmul,
        reference=lambda a, b: (a.float() @ b.float()).to(a.dtype), forward=LINEAR_TOLERANCE,
        num_flops=lambda s: 2 * numel(s, "...MN") * s["K"],
    )),
    SOFTMAX := Operator(_row(
        name="softmax", args=(_X,), reference=_softmax_reference, vendor=partial(torch.softmax, dim=-1),
        forward=_SOFTMAX, num_flops=lambda s: 4 * numel(s, "...D"),
    )),
    CAUSAL_SOFTMAX := Operator(_row(
        name="causal_softmax", args=(Arg("x", "...TT"),), results=(Arg("y", "...TT"),), forward=_SOFTMAX,
        reference=lambda x: _softmax_reference(_masked(x)), num_flops=lambda s: 4 * numel(s, "...TT"),
        vendor=lambda x, out=None: torch.softmax(_masked(x), -1, out=out),
    )),
)  # fmt: skip
