"""Draw one token a row: temperature, top-k, top-p, min-p, and a counter-based generator.

The noise of a token depends on (seed, choice, position, token id) alone, so that a row's draw does not know its
batch or slot, and any device can draw it again.

Axes:    A = active rows, V = vocabulary
Source:  Philox-4x32-10: Salmon et al., SC 2011; Gumbel-max: a draw from softmax(x) is argmax(x + gumbel noise)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from microllm.ops.argmax import argmax
from microllm.ops.contract import (
    FLOATS,
    Arg,
    Contract,
    Draw,
    Refusal,
    Sizes,
    Tolerance,
    changed,
    normal,
    require,
)

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
    seed: Tensor, choice: Tensor, position: Tensor,
) -> Tensor:  # fmt: skip
    """Return one token a row; temperature 0 is the exact argmax, a non-finite row gives -1.

    Filters apply in the order top-k (0 = off), top-p (1 = off), min-p (0 = off), each on what the one before left.

    Shapes:  logits [A, V]; temperature, top_p, min_p [A] fp32; top_k, seed, choice, position [A] int64 -> [A] int64
    Numbers: fp32
    Raises:
        OperatorError: shapes or dtypes differ, or (on a CPU) a parameter is out of its range.
    """
    _check(logits, temperature, top_k, top_p, min_p, (seed, choice, position))
    greedy = argmax(logits)
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


def _check(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: tuple[Tensor, ...]
) -> None:
    require(
        logits.dim() == 2 and logits.dtype in FLOATS, "sample",
        f"logits {tuple(logits.shape)} of {logits.dtype}", "a float matrix (A, V)",
    )  # fmt: skip
    floats, whole = (temperature, top_p, min_p), (top_k, *keys)
    rows = logits.shape[:1]
    good = all(t.shape == rows and t.dtype == torch.float32 for t in floats)
    good &= all(t.shape == rows and t.dtype == torch.int64 for t in whole)
    got = [f"{tuple(t.shape)} of {t.dtype}" for t in floats + whole]
    require(
        good, "sample", f"temperature, top_p, min_p, top_k, seed, choice, position {', '.join(got)}",
        f"{tuple(rows)}: fp32 for the first three, int64 for the rest",
    )  # fmt: skip
    if logits.device.type == "cpu" and rows[0]:
        good = bool(((temperature >= 0) & temperature.isfinite()).all() and (top_k >= 0).all())
        good &= bool(((top_p > 0) & (top_p <= 1)).all() and ((min_p >= 0) & (min_p <= 1)).all())
        require(
            good,
            "sample",
            "a parameter out of range",
            "temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1",
        )


def _oracle(logits: Tensor, **row: Tensor) -> Tensor:
    columns = {name: value.tolist() for name, value in row.items()}
    return torch.tensor([
        _draw_row(values, {name: column[i] for name, column in columns.items()})
        for i, values in enumerate(logits.tolist())
    ])  # fmt: skip


def _draw_row(values: list[float], p: dict[str, Any]) -> int:
    """Draw one row's token with Python numbers alone."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if p["temperature"] == 0:
        return order[0]
    order = order[: p["top_k"] or None]
    scores = {i: values[i] / p["temperature"] for i in order}
    total = math.fsum(math.exp(s - scores[order[0]]) for s in scores.values())
    mass, kept = 0.0, []
    for i in order:
        probability = math.exp(scores[i] - scores[order[0]]) / total
        if (mass < p["top_p"] or not kept) and probability >= p["min_p"] / total:
            kept.append(i)
        mass += probability
    return max(kept, key=lambda i: scores[i] + _gumbel(i, p["position"], p["choice"], p["seed"]))


def _gumbel(token: int, position: int, choice: int, seed: int) -> float:
    c, k = [token, position, choice, 0], [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        high0, low0 = divmod(c[0] * _MULTIPLY[0], 1 << 32)
        high1, low1 = divmod(c[2] * _MULTIPLY[1], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + _WEYL[0]) & _MASK, (k[1] + _WEYL[1]) & _MASK]
    return -math.log(-math.log1p(-(c[0] + 0.5) / 2.0**32))


def _between(low: float, high: float, dtype: torch.dtype) -> Draw:
    def draw(shape: tuple[int, ...], sizes: Sizes, _: torch.dtype, generator: torch.Generator) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)

    return draw


CONTRACT = Contract(
    name="sample",
    call=sample,
    oracle=_oracle,
    args=(
        Arg("logits", "AV", normal),
        Arg("temperature", "A", _between(0.2, 2.0, torch.float32), is_float=False),
        Arg("top_k", "A", _between(0, 40, torch.int64), is_float=False),
        Arg("top_p", "A", _between(0.3, 1.0, torch.float32), is_float=False),
        Arg("min_p", "A", _between(0.0, 0.2, torch.float32), is_float=False),
        Arg("seed", "A", _between(-(2.0**62), 2.0**62, torch.int64), is_float=False),
        Arg("choice", "A", _between(0, 8, torch.int64), is_float=False),
        Arg("position", "A", _between(0, 9000, torch.int64), is_float=False),
    ),
    sizes=({"A": 1, "V": 1}, {"A": 50, "V": 101}, {"A": 3, "V": 2000}),
    refusals=(
        Refusal("a negative temperature", changed(temperature=lambda c: c["temperature"] * 0 - 1)),
        Refusal("temperature NaN", changed(temperature=lambda c: c["temperature"] * math.nan)),
        Refusal("top_p = 0", changed(top_p=lambda c: c["top_p"] * 0)),
        Refusal("top_k below 0", changed(top_k=lambda c: c["top_k"] * 0 - 1)),
        Refusal("a parameter of another length", changed(seed=torch.zeros(99, dtype=torch.int64))),
        Refusal("a float seed", changed(seed=lambda c: c["seed"].float())),
    ),
    forward={d: Tolerance(0, 0) for d in FLOATS},
    num_bytes=lambda s, item: s["A"] * s["V"] * item,
    num_flops=lambda s: 100 * s["A"] * s["V"],
    exact=True,
)
