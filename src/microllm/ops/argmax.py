"""Row-wise argmax that a decoder can trust: the lowest index wins a tie, a non-finite row gives -1."""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import FLOATS, Arg, Contract, Refusal, Tolerance, changed, normal, require


def argmax(logits: Tensor) -> Tensor:
    """Return the index of each row's largest value; -1 where the row holds NaN or an infinity.

    A value of -inf is how a mask forbids a token, so it is allowed; a row with nothing else gives -1.

    Shapes:  logits [A, V] float -> [A] int64
    Numbers: exact
    Raises:
        OperatorError: logits are not a float matrix, or V is 0.
    """
    require(
        logits.dim() == 2 and logits.shape[1] > 0 and logits.dtype in FLOATS, "argmax",
        f"logits {tuple(logits.shape)} of {logits.dtype}", "a float matrix (A, V), V above 0",
    )  # fmt: skip
    best = logits.amax(dim=1, keepdim=True)
    index = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    token = torch.where(logits == best, index, logits.shape[1]).amin(dim=1)
    return torch.where(best.squeeze(1).isfinite(), token, -1)


def _oracle(logits: Tensor) -> Tensor:
    rows = [row.tolist() for row in logits]
    return torch.tensor([row.index(max(row)) for row in rows], dtype=torch.int64)


CONTRACT = Contract(
    name="argmax",
    call=argmax,
    oracle=_oracle,
    args=(Arg("logits", "AV", normal),),
    sizes=({"A": 1, "V": 1}, {"A": 4, "V": 1000}, {"A": 64, "V": 3}),
    refusals=(
        Refusal("an empty vocabulary", changed(logits=torch.zeros(2, 0))),
        Refusal("a vector", changed(logits=torch.zeros(3))),
        Refusal("whole numbers", changed(logits=torch.zeros(2, 3, dtype=torch.int64))),
    ),
    forward={d: Tolerance(0, 0) for d in FLOATS},
    num_bytes=lambda s, item: s["A"] * s["V"] * item + 8 * s["A"],
    num_flops=lambda s: s["A"] * s["V"],
    exact=True,
)
