"""Row-wise argmax that a decoder can trust: the lowest index wins a tie, a non-finite row gives -1.

Axes:    A = active rows, V = vocabulary, D = model dim
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from microllm.ops.contract import EXACT, INT64, TRITON, Arg, Contract, Out, Rule, Sink, Sizes, between, cases
from microllm.ops.linear import MODE_B
from microllm.ops.operator import Operator


def argmax(logits: Tensor, *, out: Out = None) -> Tensor:
    """Return the index of each row's largest value; -1 where the row holds NaN or an infinity.

    A value of -inf is how a mask forbids a token, so it is allowed; a row with nothing else gives -1.

    Shapes:  logits [A, V] float -> [A] int64
    Numbers: exact
    Raises:
        OperatorError: logits are not a float matrix, or V is 0.
    """
    return ARGMAX(logits, out=out)


def lm_head_argmax(x: Tensor, w: Tensor, *, out: Out = None, sink: Sink = None) -> Tensor:
    """Return argmax(linear(x, w)) without keeping the logits.

    Shapes:  x [A, D], w [V, D] -> [A] int64
    Numbers: logits are rounded to x's dtype before they are compared, as two operators would
    Raises:
        OperatorError: sizes, dtypes or devices differ, or V is 0.
    """
    return LM_HEAD_ARGMAX(x, w, out=out, sink=sink)


def argmax_reference(logits: Tensor) -> Tensor:
    """Return each row's lowest index of its largest value, or -1."""
    return torch.where(logits.amax(dim=1).isfinite(), logits.argmax(dim=1), -1)  # torch takes the first of equals


def _argmax_vendor(logits: Tensor) -> Tensor:
    """Take numpy's argmax, which uses the processor's vectors where torch's does not; a NaN counts as the largest."""
    token = torch.from_numpy(logits.detach().numpy().argmax(axis=1))
    return torch.where(logits.gather(1, token[:, None])[:, 0].isfinite(), token, -1)


def _argmax_suits(logits: Tensor) -> tuple[bool, str]:
    return logits.dtype == torch.float32, "numpy's argmax, for fp32"


def _head_reference(x: Tensor, w: Tensor, sink: Sink = None) -> Tensor:
    logits = functional.linear(x, w)
    if sink is not None:
        sink.update(logits=logits)
    return argmax_reference(logits)


def _one_winner(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw rows of which one is far ahead for positive inputs, so that rounding decides no comparison."""
    w = 0.1 * torch.randn(shape, generator=generator)
    w[sizes["V"] // 2] = 1
    return w.to(dtype)


_TOKEN = (Arg("token", "A", dtypes=INT64),)

ARGMAX = Operator(Contract(
    name="argmax", args=(Arg("logits", "AV"),), results=_TOKEN,
    rules=(Rule("V above 0", lambda logits: logits.shape[1] > 0, ({"logits": torch.zeros(2, 0)},)),),
    reference=argmax_reference, vendor=_argmax_vendor, vendor_suits=_argmax_suits,
    levels={"cpu": ("vendor", "reference"), "cuda": ("triton", "reference")}, invariant=("triton",),
    sizes=cases("A4 V1000", "A1 V1", "A64 V3", "A0 V3"), forward=EXACT, num_flops=lambda s: s["A"] * s["V"],
))  # fmt: skip

LM_HEAD_ARGMAX = Operator(Contract(
    name="lm_head_argmax", args=(Arg("x", "AD", between(0.5, 1.5)), Arg("w", "VD", _one_winner)), results=_TOKEN,
    rules=(Rule("V above 0", lambda x, w: w.shape[0] > 0, ({"w": lambda c: c["w"][:0]},)),),
    reference=_head_reference, levels=TRITON, invariant=("triton",), mode_b=MODE_B, sink=("logits",),
    sizes=cases("A3 V101 D64", "A1 V1 D1", "A33 V7 D65"), forward=EXACT,
    num_flops=lambda s: 2 * s["A"] * s["V"] * s["D"],
))  # fmt: skip
