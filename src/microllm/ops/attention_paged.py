"""Causal grouped-query attention over key-value pages: a few queries a row (decode), or any chunk (prefill).

A row's keys are walked in splits of a fixed number of tokens, counted from position 0, and joined in order: a query's
bits depend neither on the batch nor on what else is in its chunk. Keys and values of the queries are in the pages
before the call. A position of -1 is no query: its result is 0, and nothing of it is read.

Axes:    A = rows, T = queries a row, H = query heads, G = KV heads, D = head dim,
         P = pages, S = slots a page, N = pages a row (position p of a row lies in slot p % S of its page p // S)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from microllm.ops.contract import INT64, TRITON, Arg, Contract, Out, Rule, Sink, Sizes, cases, numel, rounded
from microllm.ops.kv_store import TABLE, page_rules, pages
from microllm.ops.operator import Operator

CONTEXTS = (1024, 8192, 1 << 20)
"""Slots a row, rounded up to which a split is chosen; more than the last count as the last."""
ROWS = (1, 8, 32, 256)
"""Rows of a call, likewise, for tuned splits."""
_ROW_MULTIPLE = 16  # torch's CPU products change their bits below 16 rows


def attention_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, positions: Tensor, *, scale: float,
    split: int = 256, out: Out = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return attention of at most 8 queries a row over the row's pages up to each query's position.

    Shapes:  q [A, T, H, D], k_pages and v_pages [P, S, G, D], page_table [A, N] int32, positions [A, T] int64
             -> [A, T, H, D]
    Units:   ``split`` in tokens; 0: what keeps the device busy with the rows as they are
    Numbers: scores, softmax and sums in fp32, one maximum and sum a split, rounded once; with 0 the bits of a row know
             how long the others are
    Raises:
        OperatorError: sizes differ, T is above 8, H is no multiple of G, split no multiple of S, or (on a CPU) a
            position or its page is out of range.
    """
    return DECODE(q, k_pages, v_pages, page_table, positions, scale, split, out=out, sink=sink)


def split_key(num_rows: int, heads: tuple[int, int, int], page_tokens: int, context: int) -> dict[str, int]:
    """Return the shape that a tuned split is known by: rows and context rounded up, heads (H, G, D), slots a page."""
    A, N = (
        next((size for size in sizes if size >= n), sizes[-1]) for sizes, n in ((ROWS, num_rows), (CONTEXTS, context))
    )
    return dict(zip("AHGDSN", (A, *heads, page_tokens, N), strict=True))


def decode_split(
    num_rows: int, heads: tuple[int, int, int], page_tokens: int, context: int, dtype: torch.dtype,
    device: torch.device, *, one_for_all_rows: bool,
) -> int:  # fmt: skip
    """Return how many keys a program of ``attention_decode`` walks, for rows of at most ``context`` tokens.

    0, for it to follow the load; 64 for few rows of short contexts, which wait for less then; or what the tuner found.
    ``one_for_all_rows``: bits may follow neither the load nor the number of rows, so splits are longer with the context
    alone.

    Units:   tokens
    Raises:
        OperatorError: ``tuned.json`` is damaged.
    """
    if one_for_all_rows:
        return max(page_tokens, 64 if context <= 1024 else 128 if context <= 8192 else 256)
    from microllm.ops.tuned import damaged, device_name, has_entries, tuned  # noqa: PLC0415 - brings pydantic

    shape = split_key(num_rows, heads, page_tokens, context)
    found = tuned("attention_decode", shape, dtype, device_name(device)) if has_entries() else None
    if found is None:
        return max(page_tokens, 64) if num_rows <= 8 and context <= CONTEXTS[0] else 0
    split = found.get("split", 0)
    if len(found) != 1 or split <= 0 or split % page_tokens:
        raise damaged(f"{found} in the entry for attention_decode {shape}")
    return split


def attention_prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, positions: Tensor, *, scale: float,
    split: int = 256, out: Out = None, sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return attention of a chunk of queries over the row's earlier pages and the chunk's own.

    Shapes:  as ``attention_decode``, T any
    Numbers: as ``attention_decode``; the two need not agree bit by bit
    Raises:
        OperatorError: as ``attention_decode``.
    """
    return PREFILL(q, k_pages, v_pages, page_table, positions, scale, split, out=out, sink=sink)


def attention_reference(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, positions: Tensor, scale: float, split: int,
    sink: Sink = None,
) -> Tensor:  # fmt: skip
    """Return attention by its formula, row by row, split by split."""
    split = split or 256
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for a, length in enumerate((positions.amax(dim=1) + 1).tolist() if positions.numel() else []):
        if length > 0:
            keys, values = (_gathered(pages, page_table[a], length, split) for pages in (k_pages, v_pages))
            out[a] = _walk(q[a], keys, values, positions[a], scale, split)
    if sink is not None:
        sink.update(scores=_scores(q, k_pages, page_table, positions, scale))
    return out


def _scores(q: Tensor, k_pages: Tensor, page_table: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return every query's scores, -inf where it does not look: [A, H, T, N * S] fp32."""
    keys = k_pages[page_table.long().clamp(0, k_pages.shape[0] - 1)].flatten(1, 2).float()
    keys = keys.repeat_interleave(q.shape[2] // keys.shape[2], dim=2)
    scores = torch.einsum("athd,ashd->ahts", q.float(), keys) * scale
    hidden = torch.arange(keys.shape[1], device=q.device) > positions[:, :, None]
    return scores.masked_fill(hidden[:, None], -math.inf)


def _gathered(pages: Tensor, page_ids: Tensor, length: int, split: int) -> Tensor:
    """Return a row's first ``length`` slots in fp32, zeros after them up to a whole split: [G, slots, D]."""
    size = pages.shape[1]
    found = pages[page_ids[: -(-length // size)].long()].flatten(0, 1)[:length].float()
    return functional.pad(found, (0, 0, 0, 0, 0, -length % split)).transpose(0, 1).contiguous()


def _walk(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, split: int) -> Tensor:
    """Attend for one row: q [T, H, D], keys and values [G, slots, D], positions [T] -> [T, H, D]."""
    T, H, D = q.shape
    G = keys.shape[0]
    rows = q.float().view(T, G, H // G, D).transpose(0, 1).reshape(G, T * H // G, D)
    rows = functional.pad(rows, (0, 0, 0, -rows.shape[1] % _ROW_MULTIPLE))
    last = functional.pad(positions.repeat_interleave(H // G), (0, rows.shape[1] - T * H // G), value=-1)
    best = rows.new_full((G, rows.shape[1], 1), -math.inf)
    total, context = torch.zeros_like(best), torch.zeros_like(rows)
    for start in range(0, keys.shape[1], split):
        slots = torch.arange(start, start + split, device=q.device)
        scores = rows @ keys[:, start : start + split].transpose(1, 2) * scale
        scores = scores.masked_fill(slots > last[:, None], -math.inf)
        higher = torch.maximum(best, scores.amax(dim=2, keepdim=True))
        shift = higher.masked_fill(higher == -math.inf, 0)
        weights, keep = (scores - shift).exp(), (best - shift).exp()
        total = total * keep + weights.sum(dim=2, keepdim=True)
        context = context * keep + weights @ values[:, start : start + split]
        best = higher
    context = (context / total.masked_fill(total == 0, 1))[:, : T * H // G]
    return context.view(G, T, H // G, D).transpose(0, 1).reshape(T, H, D).to(q.dtype)


def draw_run(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw runs of positions, each row's from a place of its own, the last row's first one idle where it has two."""
    first = torch.randint(sizes["N"] * sizes["S"] - shape[1] + 1, (shape[0], 1), generator=generator)
    positions = first + torch.arange(shape[1])
    if shape[1] > 1:
        positions[-1, -1] = -1
    return positions


_RULES = (
    Rule("H a multiple of G", lambda q, k, *_: q.shape[2] % k.shape[2] == 0, ({"q": lambda c: c["q"][:, :, :-1]},)),
    Rule("a finite scale above 0", lambda *v: 0 < v[5] < math.inf, ({"scale": 0.0}, {"scale": math.nan})),
    Rule("split a multiple of S", lambda *v: v[6] >= 0 and v[6] % v[1].shape[1] == 0, ({"split": -32}, {"split": 10})),
    *page_rules(1, 3),
)
_FIXED = Rule("split above 0", lambda *v: v[6] > 0, ({"split": 0},))
_FEW = Rule(
    "T at most 8", lambda q, *_: q.shape[1] <= 8,
    ({"q": lambda c: c["q"].repeat(1, 9, 1, 1), "positions": lambda c: c["positions"].repeat(1, 9)},),
)  # fmt: skip


def _operator(name: str, rules: tuple[Rule, ...], *sizes: str) -> Operator:
    return Operator(Contract(
        name=name, args=(
            Arg("q", "ATHD"), pages("k_pages"), pages("v_pages"), TABLE, Arg("positions", "AT", draw_run, INT64),
        ),
        results=(Arg("context", "ATHD"),), scalars={"scale": 0.125, "split": 32}, rules=rules,
        reference=attention_reference, levels=TRITON, invariant=("reference", "triton"), sink=("scores",),
        sizes=cases(*sizes),
        forward=rounded(2e-5, 2e-5, wide=8e-4),
        traffic=lambda s, item: 2 * item * (numel(s, "ATHD") + s["A"] * s["N"] * numel(s, "SGD")),
        num_flops=lambda s: 4 * numel(s, "ATHD") * s["N"] * s["S"],
    ))  # fmt: skip


DECODE = _operator(
    "attention_decode", (*_RULES, _FEW), "A3 T2 H6 G2 D64 P40 S16 N9", "A1 T1 H1 G1 D2 P2 S8 N2",
    "A5 T1 H8 G4 D32 P99 S4 N17",
)  # fmt: skip
PREFILL = _operator(
    "attention_prefill", (*_RULES, _FIXED), "A2 T37 H6 G2 D64 P40 S16 N9", "A1 T1 H2 G1 D2 P2 S8 N2",
    "A1 T64 H4 G4 D32 P20 S8 N8",
)  # fmt: skip
