"""Run a GPU's steps as captured graphs: decoding rows in one replay, and several steps ahead where nothing hinders.

Place: the engine's runner on a GPU, with ``ModelRunner.run``'s interface and bursts besides; ``paged_forward.py`` is
what it captures. A graph stands for a number of rows (a bucket), tokens a row, and how tokens are chosen: it is
captured when first met (a width of prompts when met again), serves any lengths, and its inputs are written before it is
replayed. On a CPU the same code runs uncaptured, for tests and debugging.

A burst is several steps without a word from the host: each leaves its tokens in a history, and feeds the next.

Axes:    A = rows, T = tokens a row, V = vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from microllm import ops
from microllm.inference.paged_forward import Arena, PagedForward
from microllm.inference.prewarm import WarmedShape
from microllm.inference.request import Request
from microllm.inference.runner import write_table
from microllm.inference.scheduler import Chunk
from microllm.model import Transformer
from microllm.step import DecodeRow, DecodeRows, Graphs, PagePool, PageTables, RowGroup, TokenReader, bucket

BURST_STEPS = 4
"""Steps of a burst: a few times the host's work for one, and little to throw away when a row ends within."""
MAX_PREFILL_TOKENS = 4096
"""Tokens of prompts that run as one: as many as keep a GPU busy."""
Choosing = Literal["greedy", "sampled"]
_CHOOSING: tuple[Choosing, ...] = ("greedy", "sampled")


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured pass: its inputs, what runs it, and the logits that it leaves."""

    group: RowGroup
    arena: Arena
    replay: Callable[[], object]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class CapturedBurst:
    """A captured step that feeds itself."""

    rows: DecodeRows
    arena: Arena
    replay: Callable[[], object]


class GraphRunner:
    """A model with a page pool, on a GPU."""

    same_bits = False
    num_cold = 0
    """Shapes that were made when a step met them, or by ``prewarm``."""
    passing_bytes = 0
    """Bytes of the largest buffers of a prompt that ran uncaptured, and gave them back."""

    def __init__(
        self, model: Transformer, pool: PagePool, *, num_slots: int, context: int, deterministic: bool,
        max_drafts: int, captures: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.device = model, model.norm.weight.device
        self.forward = PagedForward(model, pool, context=context, one_tiling=deterministic)
        self.graphs = Graphs(self.device, enabled=captures)
        self._deterministic, self._max_drafts, self._num_slots = deterministic, max_drafts, num_slots
        self._tables = PageTables(num_slots, self.forward.pages_a_row, self.device)
        self.arena_bytes = self.forward.table_bytes + self._tables.num_bytes
        """Bytes of tables, and of all buffers that shapes keep."""
        self._passes: dict[tuple[int, int, int], Captured] = {}
        self._bursts: dict[tuple[int, Choosing], CapturedBurst] = {}
        self._met: set[tuple[int, int]] = set()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> tuple[Tensor, list[int]]:
        """Run a step; return the logits that its chunks want, and at which row those of each chunk begin.

        Shapes:  -> [rows, V] in the model's dtype, a number a chunk
        """
        for chunk in chunks:
            write_table(self._tables, chunk.request)
        parts: list[Tensor] = []
        starts = [0] * len(chunks)
        for width in sorted({1, 1 + self._max_drafts}):
            picked = [
                i for i, chunk in enumerate(chunks)
                if chunk.kind == "decode" and (len(chunk.token_ids) > 1) == (width > 1)
            ]  # fmt: skip
            if picked:
                self._decode([chunks[i] for i in picked], width, parts)
                first = sum(len(part) for part in parts[:-1])
                for row, i in enumerate(picked):
                    starts[i] = first + row * width + len(chunks[i].token_ids) - chunks[i].num_logits
        for picked in _alike(chunks):
            first = sum(len(part) for part in parts)
            self._prefill([chunks[i] for i in picked], parts)
            for i in picked:
                starts[i] = first
                first += chunks[i].num_logits
        if not parts:  # chunks that end within their prompts
            parts.append(self.model.norm.weight.new_empty(0, self.model.config.vocab_size))
        return parts[0] if len(parts) == 1 else torch.cat(parts), starts

    @torch.inference_mode()
    def prewarm(
        self, buckets: Sequence[int] | None, lengths: Sequence[int], num_tokens: int | None
    ) -> list[WarmedShape]:
        """Make ready what decodes some numbers of rows (None: any), and a prompt of each length; return what was not.

        ``num_tokens`` of the vocabulary are chosen from in bursts, None where there are none.
        """
        made: list[WarmedShape] = []
        for num_rows in sorted({bucket(n) for n in (range(1, self._num_slots + 1) if buckets is None else buckets)}):
            for width in sorted({1, 1 + self._max_drafts}):
                made += self._made("decode", num_rows, width, lambda n=num_rows, t=width: self._pass(n, t, -1))
            for choosing in _CHOOSING if num_tokens else ():
                made += self._made(
                    choosing, num_rows, 1, lambda n=num_rows, c=choosing: self._burst(n, c, num_tokens or 0)
                )
        for width in sorted({padded_width(n) for n in lengths}):
            self._met.add((1, width))
            made += self._made("prompt", 1, width, lambda t=width: self._pass(1, t, 1))
        return made

    def _made(self, kind: str, num_rows: int, width: int, make: Callable[[], object]) -> list[WarmedShape]:
        """Return the shape that ``make`` makes, or nothing where it was there."""
        num_cold, num_bytes, started = self.num_cold, self.arena_bytes, time.perf_counter()
        make()
        if self.num_cold == num_cold:
            return []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        ms = 1e3 * (time.perf_counter() - started)
        return [WarmedShape(kind=kind, num_rows=num_rows, width=width, ms=ms, num_bytes=self.arena_bytes - num_bytes)]

    @torch.inference_mode()
    def begin(self, rows: Sequence[DecodeRow], num_tokens: int) -> CapturedBurst:
        """Give the rows of the bursts that follow, which choose among the vocabulary's first; return what runs them."""
        choosing: Choosing = "sampled" if any(row.temperature > 0 for row in rows) else "greedy"
        burst = self._burst(bucket(len(rows)), choosing, num_tokens)
        burst.rows.fill(rows)
        return burst

    @torch.inference_mode()
    def go_on(self, burst: CapturedBurst, requests: Sequence[Request], ended: Sequence[int]) -> TokenReader:
        """Run a burst of requests after what runs already, rows ``ended`` idle; return what reads its tokens."""
        for request in requests:
            write_table(self._tables, request)
        if ended:
            burst.rows.idle(ended)
        self._tables.rows(burst.rows.group.slots, burst.arena.table)
        burst.rows.rewind()
        for _ in range(BURST_STEPS):
            burst.replay()
        return burst.rows.read()

    def _decode(self, chunks: Sequence[Chunk], width: int, parts: list[Tensor]) -> None:
        found = self._pass(bucket(len(chunks)), width, -1)
        self._fill(found, chunks)
        found.replay()
        parts.append(found.logits)

    def _prefill(self, chunks: Sequence[Chunk], parts: list[Tensor]) -> None:
        """Run prompts' chunks of one width: captured, rounded up, unless several tokens of a chunk want logits."""
        many = chunks[0].num_logits > 1
        if many:
            group = RowGroup(1, len(chunks[0].token_ids), decodes=False, device=self.device)
            found = self._uncaptured(group, chunks[0].num_logits)
        else:
            found = self._prompt_pass(len(chunks), padded_width(len(chunks[0].token_ids)))
        self._fill(found, chunks)
        ends = [row * found.group.width + len(chunk.token_ids) for row, chunk in enumerate(chunks)]
        wanted = range(ends[0] - chunks[0].num_logits, ends[0]) if many else [end - 1 for end in ends]
        found.arena.wanted.copy_(torch.tensor(list(wanted)))
        found.replay()
        rows = [row for row, chunk in enumerate(chunks) if chunk.num_logits]
        if rows:  # a copy: the next chunks of this shape write there again
            parts.append(found.logits if many else found.logits[torch.tensor(rows, device=self.device)])

    def _fill(self, found: Captured, chunks: Sequence[Chunk]) -> None:
        found.group.fill([(cast("int", chunk.request.slot), chunk.start, chunk.token_ids) for chunk in chunks])
        self._tables.rows(found.group.slots, found.arena.table)

    def _prompt_pass(self, num_rows: int, width: int) -> Captured:
        """Return the pass of prompts of a width: captured when it is met again, for many shapes come once."""
        if (num_rows, width) in self._met:
            return self._pass(num_rows, width, num_rows)
        self._met.add((num_rows, width))
        self.num_cold += 1
        group = RowGroup(num_rows, width, decodes=False, device=self.device)
        return self._uncaptured(group, num_rows)

    def _uncaptured(self, group: RowGroup, num_wanted: int) -> Captured:
        """Return the pass of a prompt that comes once."""
        arena = Arena(self.forward, group, num_wanted)
        found = self._captured(group, arena, captures=False)
        self.passing_bytes = max(self.passing_bytes, arena.num_bytes + found.logits.nbytes)
        return found

    def _pass(self, num_rows: int, width: int, num_wanted: int) -> Captured:
        """Return the captured pass of a shape; ``num_wanted`` -1: decoding rows, all of whose logits are wanted."""
        key = num_rows, width, num_wanted
        if key not in self._passes:
            group = RowGroup(num_rows, width, decodes=num_wanted < 0, device=self.device)
            arena = Arena(self.forward, group, num_rows * width if num_wanted < 0 else num_wanted)
            if num_wanted < 0:
                arena.wanted.copy_(torch.arange(num_rows * width))
            self._passes[key] = found = self._captured(group, arena, captures=True)
            self.num_cold += 1
            self.arena_bytes += arena.num_bytes + found.logits.nbytes
        return self._passes[key]

    def _captured(self, group: RowGroup, arena: Arena, *, captures: bool) -> Captured:
        group.fill([])
        forward = self.forward
        logits = arena.last.new_empty(len(arena.wanted), self.model.config.vocab_size)

        def step() -> None:
            with self._context(overlaps=group.decodes):
                forward.hidden(group, arena)
                if len(arena.wanted):
                    forward.logits(forward.last(arena), logits)

        return Captured(group, arena, self.graphs.capture(step) if captures else step, logits)

    def _burst(self, num_rows: int, choosing: Choosing, num_tokens: int) -> CapturedBurst:
        """Return the captured step of a number of rows, the choice of tokens and the advance of rows in it."""
        if (num_rows, choosing) in self._bursts:
            return self._bursts[num_rows, choosing]
        rows, forward = DecodeRows(num_rows, BURST_STEPS, self.device), self.forward
        head = forward.head.first(num_tokens)
        rows.fill([])
        arena = Arena(forward, rows.group, num_rows)
        token = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        next_position, ids = torch.zeros_like(token), rows.group.token_ids.view(-1)
        positions = rows.group.positions.view(-1)
        logits = arena.last.new_empty(num_rows if choosing == "sampled" or head.scale is not None else 0, num_tokens)

        def step() -> None:
            with self._context(overlaps=True):
                last = forward.norm(forward.hidden(rows.group, arena), arena.last)
                if choosing == "greedy":
                    forward.best(last, head, logits, token)
                else:
                    torch.add(positions, 1, out=next_position)
                    head.linear(last, out=logits)
                    ops.sample(
                        logits, temperature=rows.temperature, top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p,
                        seed=rows.seed, choice=rows.choice, position=next_position, out=token,
                    )  # fmt: skip
                ops.advance_rows(token, ids, positions, rows.last, rows.history, rows.step)

        rows.rewind()
        found = CapturedBurst(rows, arena, self.graphs.capture(step))
        self.num_cold += 1
        self.arena_bytes += arena.num_bytes + logits.nbytes
        self._bursts[num_rows, choosing] = found
        return found

    def _context(self, *, overlaps: bool) -> ExitStack:
        """Return the operators' overlapped launches and their one order of sums, as a step asks for them."""
        stack = ExitStack()
        if overlaps:
            stack.enter_context(ops.overlapped())
        if self._deterministic:
            stack.enter_context(ops.batch_invariant())
        return stack


def _alike(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Return which chunks of prompts run as one: of one width, by eights, fours and twos, and no more than fit."""
    by_width: dict[tuple[int, int], list[int]] = {}
    for i, chunk in enumerate(chunks):
        if chunk.kind == "prefill":
            alone = i if chunk.num_logits > 1 else -1
            by_width.setdefault((padded_width(len(chunk.token_ids)), alone), []).append(i)
    groups: list[list[int]] = []
    for (width, _), picked in by_width.items():
        while picked:
            size = next(n for n in (8, 4, 2, 1) if n == 1 or (n <= len(picked) and n * width <= MAX_PREFILL_TOKENS))
            groups.append(picked[:size])
            del picked[:size]
    return groups


def padded_width(num_tokens: int) -> int:
    """Return the tokens of the captured chunk that takes ``num_tokens``: at most a quarter more, in sixteens."""
    step = max(16, 1 << max(0, (num_tokens - 1).bit_length() - 3))
    return -(-num_tokens // step) * step
