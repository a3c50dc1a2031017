"""Sampling: what the filters leave of a row is found by bisection, then drawn from by many programs; and penalties.

``cut_kernel`` finds, without sorting, the least score that top-k and top-p leave and how far ties at it go: each step
looks at all scores and halves the range of those that may be it. ``draw_kernel`` adds the noise to what is left and
keeps each block's largest; ``argmax.pick_kernel`` picks. Noise depends on (seed, choice, position, token)
alone, so that neither rows nor blocks change a draw.

Axes:    A = rows, V = vocabulary
Numbers: scores are divided as torch divides; masses are sums of exp in fp32, so a token whose mass before it is within
         rounding of top_p may fall on the other side than in the reference
Bytes:   logits twice, and once more for each step of a bisection (about log2 V of them; none with the filters off)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Outs
from microllm.ops.kernels.argmax import partials, pick, tall
from microllm.ops.kernels.launch import Compiled, overlapping, pdl, row_stride, scratch, stream_of
from microllm.ops.kernels.linear_forms import first_largest

CUT, DRAW = 8192, 1024
"""Tokens that a program of either kernel looks at in one go."""


@triton.jit
def _key(score):
    """Return integers that compare as scores do."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score(key):
    """Return the score of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _scores(logits_ptr, row, stride, ok, start, heat, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return tokens [1, BLOCK], which of them there are, and their scores, -inf where there is none."""
    v = start + tl.arange(0, BLOCK)[None, :]
    there = ok & (v < V)
    x = tl.load(logits_ptr + row * stride + v, mask=there, other=float("-inf")).to(tl.float32)
    return v, there, tl.div_rn(x, heat)


@triton.jit
def _ends(logits_ptr, row, stride, ok, heat, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows' largest logits, the first tokens that have them (-1: not finite), and the least scores' keys."""
    largest = tl.full(heat.shape, float("-inf"), tl.float32)
    greedy = tl.full(heat.shape, 2147483647, tl.int32)
    low = tl.full(heat.shape, 2147483647, tl.int32)
    for start in tl.range(0, V, BLOCK):
        v, there, x = _scores(logits_ptr, row, stride, ok, start, tl.full(heat.shape, 1.0, tl.float32), V, BLOCK)
        best, index = first_largest(x, v, 1)
        best, index = best[:, None], index[:, None]
        greedy = tl.where(best > largest, index, tl.where(best == largest, tl.minimum(greedy, index), greedy))
        largest = tl.maximum(largest, best)
        keys = tl.where(there, _key(tl.div_rn(x, heat)), 2147483647)
        low = tl.minimum(low, tl.min(keys, 1, keep_dims=True))
    return largest, tl.where(largest == float("-inf"), -1, greedy), low


@triton.jit
def _look(logits_ptr, row, stride, ok, heat, top, key, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Return the weight of scores above ``key``, the number at it, and the nearest keys: at or below it, and above."""
    weight = tl.zeros_like(heat)
    ties = tl.zeros_like(key)
    below = tl.full(key.shape, -2147483648, tl.int32)
    above = tl.full(key.shape, 2147483647, tl.int32)
    for start in tl.range(0, V, BLOCK):
        _, there, score = _scores(logits_ptr, row, stride, ok, start, heat, V, BLOCK)
        keys = _key(score)
        is_above = (keys > key) & there
        one = tl.full(score.shape, 1.0, tl.float32) if COUNT else tl.exp(score - top)
        weight += tl.sum(tl.where(is_above, one, 0.0), 1, keep_dims=True)
        ties += tl.sum(((keys == key) & there).to(tl.int32), 1, keep_dims=True)
        not_above = there & (keys <= key)
        below = tl.maximum(below, tl.max(tl.where(not_above, keys, -2147483648), 1, keep_dims=True))
        above = tl.minimum(above, tl.min(tl.where(is_above, keys, 2147483647), 1, keep_dims=True))
    return weight, ties, below, above


@triton.jit
def _bisect(logits_ptr, row, stride, ok, heat, top, limit, low, high,
            V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Return the least key in [low, high] whose weight above is below ``limit``, that weight and the ties at it.

    Both ends move to keys that there are, so that the steps are as many as halvings of what lies between.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while tl.max(tl.max(high - low, 1), 0) > 0:
        middle = (low + high) >> 1
        weight, _, below, above = _look(
            logits_ptr, row, stride, ok, heat, top, middle.to(tl.int32), V, BLOCK, COUNT
        )  # fmt: skip
        fits = (weight < limit) | (low == high)
        high = tl.where(fits, tl.maximum(low, below.to(tl.int64)), high)
        low = tl.where(fits, low, above.to(tl.int64))
    key = high.to(tl.int32)
    weight, ties, _, _ = _look(logits_ptr, row, stride, ok, heat, top, key, V, BLOCK, COUNT)
    return key, weight, ties


@triton.jit
def _end_of_ties(logits_ptr, row, stride, ok, heat, key, keep, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the token before which the first ``keep`` scores at ``key`` lie."""
    end = tl.zeros_like(key)
    seen = tl.zeros_like(key)
    for start in tl.range(0, V, BLOCK):
        v, there, score = _scores(logits_ptr, row, stride, ok, start, heat, V, BLOCK)
        tie = ((_key(score) == key) & there).to(tl.int32)
        rank = seen + tl.cumsum(tie, 1)
        end = tl.maximum(end, tl.max(tl.where((tie > 0) & (rank <= keep), v + 1, 0), 1, keep_dims=True))
        seen += tl.sum(tie, 1, keep_dims=True)
    return end


@triton.jit(do_not_specialize=["A"])
def cut_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, top_ptr, key_ptr, end_ptr, greedy_ptr, A, stride,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave a row's largest score, the key that top-k and top-p leave, its last tie, and the greedy token.

    Grid (ceil(A / ROWS),).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    ok = a < A
    row = a.to(tl.int64)
    temperature = tl.load(temperature_ptr + a, mask=ok, other=0.0)
    heat = tl.where(temperature == 0.0, 1.0, temperature)
    largest, greedy, low = _ends(logits_ptr, row, stride, ok, heat, V, BLOCK)
    warm = ok & (temperature != 0.0) & (greedy >= 0)  # of other rows nothing is looked for
    top = tl.where(warm, tl.div_rn(largest, heat), 0.0)
    high = _key(top)
    low = tl.where(warm, low, high)
    k = tl.load(top_k_ptr + a, mask=ok, other=0)
    p = tl.load(top_p_ptr + a, mask=ok, other=1.0)
    key = low
    keep = tl.full([ROWS, 1], V, tl.int32)
    cut_k = warm & (k > 0) & (k < V)
    if tl.max(tl.max(cut_k.to(tl.int32), 1), 0) > 0:
        limit = tl.where(cut_k, k.to(tl.float32), float("inf"))
        key, above, _ = _bisect(logits_ptr, row, stride, warm, heat, top, limit, low, high, V, BLOCK, True)
        keep = tl.minimum(limit - above, V).to(tl.int32)
    cut_p = warm & (p < 1.0)
    if tl.max(tl.max(cut_p.to(tl.int32), 1), 0) > 0:
        mass, ties, _, _ = _look(logits_ptr, row, stride, warm, heat, top, key, V, BLOCK, False)
        first = key
        limit = p * (mass + tl.minimum(keep, ties).to(tl.float32) * tl.exp(_score(key) - top))
        limit = tl.where(cut_p, limit, float("inf"))
        key, above, _ = _bisect(logits_ptr, row, stride, warm, heat, top, limit, first, high, V, BLOCK, False)
        fit = tl.ceil(tl.minimum((limit - above) / tl.exp(_score(key) - top), V)).to(tl.int32)
        keep = tl.where(key == first, tl.minimum(keep, fit), fit)
    end = tl.full([ROWS, 1], V, tl.int32)
    if tl.max(tl.max((cut_k | cut_p).to(tl.int32), 1), 0) > 0:
        end = _end_of_ties(logits_ptr, row, stride, warm, heat, key, keep, V, BLOCK)
    tl.store(top_ptr + a, top, mask=ok)
    tl.store(key_ptr + a, key, mask=ok)
    tl.store(end_ptr + a, end, mask=ok)
    tl.store(greedy_ptr + a, greedy, mask=ok)


@triton.jit
def _noise(token, position, choice, seed):
    """Return standard Gumbel noise: Philox-4x32-10's first word, as ``ops.sample`` defines it."""
    c0 = token.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + choice.to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        low = c2.to(tl.uint64) * 0xCD9E8D57
        high = c0.to(tl.uint64) * 0xD2511F53
        c0 = (low >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = low.to(tl.uint32)
        c2 = (high >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = high.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    # (word + 1/2) / 2^32, rounded once: 1.16e-10 is 2^-33
    uniform = (2 * c0.to(tl.int64) + 1).to(tl.float32) * 1.1641532182693481e-10
    # -log(1 - u): a short series of atanh where the logarithm would be of a number near one
    z = uniform / (2.0 - uniform)
    z2 = z * z
    series = 2.0 * z * (1.0 + z2 * (0.33333334 + z2 * (0.2 + z2 * (0.14285715 + z2 * 0.11111111))))
    rest = 1.0 - uniform
    waited = tl.where(uniform < 0.25, series, tl.where(rest > 0, -tl.log(tl.maximum(rest, 1e-37)), float("inf")))
    return -tl.log(waited)


@triton.jit(do_not_specialize=["A"])
def draw_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, seed_ptr, choice_ptr, position_ptr, top_ptr, key_ptr, end_ptr, best_ptr,
    index_ptr, A, stride, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave the largest score plus noise of what the filters left of BLOCK tokens; grid (blocks of V, of A)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    ok = a < A
    temperature = tl.load(temperature_ptr + a, mask=ok, other=0.0)
    heat = tl.where(temperature == 0.0, 1.0, temperature)
    start = tl.program_id(0) * BLOCK
    v, there, score = _scores(logits_ptr, a.to(tl.int64), stride, ok, start, heat, V, BLOCK)
    key = tl.load(key_ptr + a, mask=ok, other=0)
    keys = _key(score)
    left = (keys > key) | ((keys == key) & (v < tl.load(end_ptr + a, mask=ok, other=0)))
    probability = tl.exp(score - tl.load(top_ptr + a, mask=ok, other=0.0))
    left &= (probability >= tl.load(min_p_ptr + a, mask=ok, other=0.0)) & there
    noise = _noise(
        v, tl.load(position_ptr + a, mask=ok, other=0), tl.load(choice_ptr + a, mask=ok, other=0),
        tl.load(seed_ptr + a, mask=ok, other=0),
    )  # fmt: skip
    best, index = first_largest(tl.where(left, score + noise, float("-inf")), v, 1)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + at, best, mask=rows < A)
    tl.store(index_ptr + at, index, mask=rows < A)


@triton.jit(do_not_specialize=["A"])
def penalise_kernel(
    logits_ptr, seen_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, y_ptr, A,
    logits_stride, seen_stride, counts_stride, y_stride, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write penalised logits; grid (blocks of V, of A)."""
    a = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    row = a.to(tl.int64)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (a < A) & (v < V)
    x = tl.load(logits_ptr + row * logits_stride + v, mask=there, other=0).to(tl.float32)
    seen = tl.load(seen_ptr + row * seen_stride + v, mask=there, other=0) != 0
    count = tl.load(counts_ptr + row * counts_stride + v, mask=there, other=0)
    factor = tl.load(repetition_ptr + a, mask=a < A, other=1.0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    x -= tl.load(frequency_ptr + a, mask=a < A, other=0.0) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence_ptr + a, mask=a < A, other=0.0), 0.0)
    tl.store(y_ptr + row * y_stride + v, x, mask=there)


def run(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, choice: Tensor, position: Tensor, *, out: Outs = None,
) -> Tensor:  # fmt: skip
    """Run ``sample``."""
    A, V = logits.shape
    token = logits.new_empty(A, dtype=torch.int64) if out is None else out[0]
    if A:
        overlap, stride, padded, rows = pdl(logits.device), row_stride(logits), triton.next_power_of_2(V), tall(logits)
        kept = scratch(logits.device, stream_of(logits), "sample", 4 * A).view(4, A)
        top, (key, end, greedy) = kept[0], kept[1:].view(torch.int32)
        cut, block = min(CUT, padded), min(DRAW, padded)
        cut_kernel[(triton.cdiv(A, rows),)](
            logits, temperature, top_k, top_p, top, key, end, greedy, A, stride,
            V=V, ROWS=rows, BLOCK=cut, PDL=overlap, num_warps=8 if cut == CUT else 4, **overlapping(overlap),
        )  # fmt: skip
        best, index = partials(logits, "sample", A, triton.cdiv(V, block))
        draw_kernel[(triton.cdiv(V, block), triton.cdiv(A, rows))](
            logits, temperature, min_p, seed, choice, position, top, key, end, best, index, A, stride,
            V=V, ROWS=rows, BLOCK=block, PDL=overlap, **overlapping(overlap),
        )  # fmt: skip
        pick(best, index, token, greedy=greedy, temperature=temperature)
    return token


def run_penalise(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor, *,
    out: Outs = None,
) -> Tensor:  # fmt: skip
    """Run ``penalise``."""
    A, V = logits.shape
    y = logits.new_empty((A, V), dtype=torch.float32) if out is None else out[0]
    if y.numel():
        block, rows = min(DRAW, triton.next_power_of_2(V)), tall(logits)
        penalise_kernel[(triton.cdiv(V, block), triton.cdiv(A, rows))](
            logits, seen, counts, repetition, presence, frequency, y, A,
            row_stride(logits), row_stride(seen), row_stride(counts), row_stride(y), V=V, ROWS=rows, BLOCK=block,
        )  # fmt: skip
    return y


_ROW = {
    "temperature_ptr": "*fp32", "top_ptr": "*fp32", "key_ptr": "*i32", "end_ptr": "*i32", "A": "i32",
    "stride": "i32:16",
}  # fmt: skip
_DRAWN = {"min_p_ptr": "*fp32", "seed_ptr": "*i64", "choice_ptr": "*i64", "position_ptr": "*i64"}
COMPILED = (
    Compiled(
        cut_kernel, {"logits_ptr": "*bf16", **_ROW, "top_k_ptr": "*i64", "top_p_ptr": "*fp32", "greedy_ptr": "*i32"},
        {"V": 151936, "ROWS": 1, "BLOCK": CUT, "PDL": True}, num_warps=8, uses=("pdl",),
    ),
    Compiled(
        draw_kernel, {"logits_ptr": "*bf16", **_ROW, **_DRAWN, "best_ptr": "*fp32", "index_ptr": "*i32"},
        {"V": 151936, "ROWS": 1, "BLOCK": DRAW, "PDL": True}, uses=("pdl",),
    ),
    Compiled(
        penalise_kernel, {
            "logits_ptr": "*bf16", "seen_ptr": "*i1", "counts_ptr": "*i32", "repetition_ptr": "*fp32",
            "presence_ptr": "*fp32", "frequency_ptr": "*fp32", "y_ptr": "*fp32", "A": "i32",
            **dict.fromkeys(("logits_stride", "seen_stride", "counts_stride", "y_stride"), "i32:16"),
        },
        {"V": 151936, "ROWS": 1, "BLOCK": DRAW},
    ),
)  # fmt: skip
