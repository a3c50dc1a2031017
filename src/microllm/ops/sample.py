"""Draw one token a row: temperature, top-k, top-p, min-p, and a counter-based generator.

The noise of a token depends on (seed, choice, position, token id) alone, so that a row's draw does not know its
batch or slot, and any device can draw it again.

Axes:    A = active rows, V = vocabulary
Source:  Philox-4x32-10: Salmon et al., SC 2011; Gumbel-max: a draw from softmax(x) is argmax(x + gumbel noise)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from microllm.ops.argmax import argmax_reference
from microllm.ops.contract import EXACT, FP32, INT64, TRITON, Arg, Contract, Out, Rule, between, cases, flat
from microllm.ops.operator import Operator

_MASK = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words for each 128-bit counter under a 64-bit seed.

    Shapes:  four int64 tensors of values below 2^32 and int64 seeds, all broadcastable -> four int64 tensors
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        low, high = c2 * _MULTIPLY[1], c0 * _MULTIPLY[0]
        c0, c1, c2, c3 = (
            ((low >> 32) & _MASK) ^ c1 ^ k0, low & _MASK, ((high >> 32) & _MASK) ^ c3 ^ k1, high & _MASK,
        )  # fmt: skip
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(token_ids: Tensor, seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """Return standard Gumbel noise for tokens of rows.

    Shapes:  token_ids [A, K], seed, choice and position [A], all int64 -> [A, K] fp32
    Numbers: all 32 bits of a word make the uniform number, exact near zero, so that the noise reaches 22
    """
    zero = torch.zeros_like(token_ids)
    words = philox((token_ids, position[:, None], choice[:, None], zero), seed[:, None])[0]
    uniform = (words.double() + 0.5).mul_(2.0**-32).float()
    return -torch.log(-torch.log1p(-uniform))


def sample(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, choice: Tensor, position: Tensor, out: Out = None,
) -> Tensor:  # fmt: skip
    """Return one token a row; temperature 0 is the exact argmax, a non-finite row gives -1.

    Filters apply in the order top-k (0 = off), top-p (1 = off), min-p (0 = off), each on what the one before left.

    Shapes:  logits [A, V]; temperature, top_p, min_p [A] fp32; top_k, seed, choice, position [A] int64 -> [A] int64
    Numbers: fp32
    Raises:
        OperatorError: shapes or dtypes differ, or (on a CPU) a parameter is out of its range.
    """
    return SAMPLE(logits, temperature, top_k, top_p, min_p, seed, choice, position, out=out)


def penalise(
    logits: Tensor, seen: Tensor, counts: Tensor, *, repetition: Tensor, presence: Tensor, frequency: Tensor,
    out: Out = None,
) -> Tensor:  # fmt: skip
    """Return the logits in fp32, with the penalties on tokens that prompt or output hold.

    ``seen``: the prompt or the output holds the token: a positive logit is divided by ``repetition``, another
    multiplied. ``counts``: how often the output holds it: minus frequency * count, minus presence where it does.

    Shapes:  logits [A, V]; seen [A, V] bool, counts [A, V] int32; repetition, presence, frequency [A] fp32
             -> [A, V] fp32
    Numbers: fp32
    Raises:
        OperatorError: shapes or dtypes differ, or (on a CPU) a repetition penalty is not above 0.
    """
    return PENALISE(logits, seen, counts, repetition, presence, frequency, out=out)


def _reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, choice: Tensor, position: Tensor,
) -> Tensor:  # fmt: skip
    greedy = argmax_reference(logits)
    cold = temperature == 0
    scaled = logits.float() / torch.where(cold, 1.0, temperature)[:, None]
    scores, ids = scaled.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    scores = scores.masked_fill(rank >= limit, -math.inf)
    probabilities = scores.softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    outside = (before >= top_p[:, None]) & (rank > 0)
    outside |= probabilities < min_p[:, None] * probabilities[:, :1]
    noise = gumbel_noise(ids, seed, choice, position)
    best = (scores.masked_fill(outside, -math.inf) + noise).argmax(dim=1, keepdim=True)
    drawn = ids.gather(1, best).squeeze(1)
    return torch.where(cold | (greedy < 0), greedy, drawn)


def _penalise_reference(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    x, factor = logits.float(), repetition[:, None]
    x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    return x - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def _column(name: str, low: float, high: float, dtype: torch.dtype = torch.float32) -> Arg:
    return Arg(name, "A", between(low, high), (dtype,))


def _range(need: str, place: int, holds: Callable[[Tensor], Tensor], *bad: float) -> Rule:
    """Return the rule that every value of argument ``place``, named first in ``need``, holds; ``bad`` values do not."""
    name = need.split()[0]
    breaks = tuple({name: lambda c, value=value: torch.full_like(c[name], value)} for value in bad)
    return Rule(need, lambda *values: bool(holds(values[place]).all()), breaks, by_value=True)


SAMPLE = Operator(Contract(
    name="sample", args=(
        Arg("logits", "AV"), _column("temperature", 0.2, 2.0), _column("top_k", 0, 40, torch.int64),
        _column("top_p", 0.3, 1.0), _column("min_p", 0.0, 0.2), _column("seed", -(2.0**62), 2.0**62, torch.int64),
        _column("choice", 0, 8, torch.int64), _column("position", 0, 9000, torch.int64),
    ),
    results=(Arg("token", "A", dtypes=INT64),), rules=(
        Rule("V above 0", lambda logits, *_: logits.shape[1] > 0, ({"logits": lambda c: c["logits"][:, :0]},)),
        _range("temperature from 0", 1, lambda t: (t >= 0) & t.isfinite(), -1, math.nan),
        _range("top_k from 0", 2, lambda k: k >= 0, -1),
        _range("top_p above 0, at most 1", 3, lambda p: (p > 0) & (p <= 1), 0, 1.5, math.nan),
        _range("min_p from 0 to 1", 4, lambda p: (p >= 0) & (p <= 1), -0.1, 1.1, math.nan),
    ),
    reference=_reference, sizes=cases("A50 V101", "A1 V1", "A3 V2000"), forward=EXACT, levels=TRITON,
    invariant=("reference", "triton"), num_flops=lambda s: 100 * s["A"] * s["V"],
))  # fmt: skip

PENALISE = Operator(Contract(
    name="penalise", args=(
        Arg("logits", "AV"), Arg("seen", "AV", between(0, 2), (torch.bool,)),
        Arg("counts", "AV", between(0, 3), (torch.int32,)), _column("repetition", 0.5, 2),
        _column("presence", -2, 2), _column("frequency", -2, 2),
    ),
    results=(Arg("y", "AV", dtypes=FP32),),
    rules=(_range("repetition above 0", 3, lambda r: (r > 0) & r.isfinite(), 0, -1, math.nan),),
    reference=_penalise_reference, sizes=cases("A5 V101", "A1 V1", "A0 V7"), forward=flat(1e-6, 1e-6),
    levels=TRITON, invariant=("reference", "triton"), num_flops=lambda s: 6 * s["A"] * s["V"],
))  # fmt: skip
