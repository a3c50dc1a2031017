"""The engine over a grid of models, prompt lengths, batches and answer lengths, one row a cell, failed cells too.

Place: ``microllm bench matrix``. Timing, limits and parity are ``bench_engine``'s; one engine a model serves all of its
cells, so that its graphs are captured once. Beside the grid it takes prompts that end at a page's border, and three
rows, which no graph has. Transformers, slow to warm, runs for ``PEER_CELLS`` alone, after all other cells.

Units:   a row's ``figures``: ``efficiency`` is the rate over as many times the rate of one sequence; KV bytes are those
         of the fullest step; ``ours_bytes`` and the like in bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from microllm.errors import ConfigError, MicroLLMError, RequestError, UnavailableError
from microllm.evidence.environment import capture_environment
from microllm.evidence.rows import Row, environment_fields, markdown_table
from microllm.inference import LLM, Engine
from microllm.lab.bench_engine import (
    PEER,
    TORCH_DTYPES,
    Arm,
    EngineBenchConfig,
    Progress,
    StaticCompiled,
    bytes_a_step,
    forget,
    greedy,
    kept,
    measure_parity,
    new_engine,
    peak_of,
    read_rate,
    summary,
    twin_of,
)
from microllm.lab.random_model import random_llm

PEER_CELLS = ((512, 1), (512, 8), (2048, 1), (2048, 8))
"""Prompt tokens and batches that transformers runs too, with the longest answer."""

_FAILURES = MicroLLMError, RuntimeError, ValueError, TypeError  # the last two are a compiler's


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixConfig:
    """The grid, and how often each cell is run.

    Args:
        model: Presets; their weights are random.
        dtype: bf16, fp16 or fp32.
        tokens: Tokens of prompts.
        borders: Tokens of more prompts, around a page's end.
        batch: Sequences that decode at once.
        new_tokens: Tokens that a round decodes, beyond the first.
        peer: Run transformers with a static cache and torch.compile in four cells (a minute each).
        deterministic: Rows' bits do not know their batch (mode B).
        rounds: Rounds of each arm, an even number.
        limits: Rows of bench roofline.
        out: Append each row to this JSONL file as soon as it is there.
    """

    model: tuple[str, ...] = ("smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "r1-distill-qwen-1.5b")
    dtype: str = "bf16"
    device: str = "cuda"
    tokens: tuple[int, ...] = (8, 512, 2048)
    borders: tuple[int, ...] = (15, 16, 17)
    batch: tuple[int, ...] = (1, 2, 3, 4, 8)
    new_tokens: tuple[int, ...] = (1, 8, 32, 64)
    peer: bool = False
    deterministic: bool = False
    rounds: int = 4
    limits: Path = Path("lab/rows/roofline.jsonl")
    out: Path | None = None

    def __post_init__(self) -> None:
        if not (self.model and self.tokens and self.batch and self.new_tokens):
            raise ConfigError("got an empty grid; need a model, prompt tokens, a batch and new tokens")
        self.of_model(self.model[0])

    def of_model(self, model: str) -> EngineBenchConfig:
        """Return the engine benchmark's config for one model.

        Raises:
            ConfigError: a number or a dtype that it refuses.
        """
        return EngineBenchConfig(
            model=model, dtype=self.dtype, device=self.device, batch=self.batch, tokens=(*self.tokens, *self.borders),
            new_tokens=min(self.new_tokens), deterministic=self.deterministic, rounds=self.rounds, limits=self.limits,
            out=self.out,
        )  # fmt: skip


def short(config: MatrixConfig) -> MatrixConfig:
    """Return a grid for a first look: a tiny model on the CPU."""
    return replace(
        config, model=("tiny",), dtype="fp32", device="cpu", tokens=(8,), borders=(15, 16, 17), batch=(1, 2, 3),
        new_tokens=(1, 8), rounds=2,
    )  # fmt: skip


class Cell(NamedTuple):
    """One shape of work."""

    tokens: int
    batch: int
    new_tokens: int


def measure_matrix(config: MatrixConfig, progress: Progress = lambda _: None) -> Iterator[Row]:
    """Yield a row a cell, written to ``config.out`` before the next one is run; stop whenever it is closed."""
    fields = environment_fields(capture_environment(config.device)) | {"dtype": config.dtype, "unit": "tok/s"}
    for model in config.model:
        bench = config.of_model(model)
        try:
            grid = _Grid(config, bench, fields)
        except _FAILURES as error:
            yield kept(bench, _failed(f"{model}, all of it", error, fields))
            continue
        for row in grid.rows():
            progress(_line(row))
            yield kept(bench, row)
        del grid
        forget(torch.device(config.device))


class _Grid:
    """One model's cells, and its engine."""

    def __init__(self, config: MatrixConfig, bench: EngineBenchConfig, fields: dict[str, Any]) -> None:
        self._config, self._bench, self._fields = config, bench, fields
        self._device = torch.device(config.device)
        self._llm: LLM = random_llm(bench.model, config.device, TORCH_DTYPES[config.dtype])
        self._parity = measure_parity(bench, self._llm, self._llm.transformer)
        capacity = max(*config.tokens, *config.borders, 0) + max(config.new_tokens) + 8
        self._engine: Engine = new_engine(bench, self._llm, max(config.batch), capacity)
        self._alone: dict[tuple[int, int], float] = {}

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all cells, those with a peer last."""
        config, last = self._config, max(self._config.new_tokens)
        with_peer: list[Cell] = []
        for tokens in (*config.tokens, *config.borders):
            for batch in sorted(config.batch):
                for new_tokens in config.new_tokens:
                    cell = Cell(tokens, batch, new_tokens)
                    if config.peer and new_tokens == last and (tokens, batch) in PEER_CELLS:
                        with_peer.append(cell)
                    yield self._row(cell, None)
        if with_peer:
            before = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
            twin = twin_of(self._llm, TORCH_DTYPES[config.dtype])
            self._parity = measure_parity(self._bench, self._llm, twin)
            for cell in with_peer:
                yield self._row(cell, twin, before)
                forget(self._device)

    def _row(self, cell: Cell, twin: Any, before: int = 0) -> Row:  # noqa: ANN401
        mode = "B" if self._config.deterministic else "A"
        workload = f"{self._bench.model} B{cell.batch} T{cell.tokens} N{cell.new_tokens} mode {mode}"
        try:
            return self._measured(cell, workload, twin, before)
        except _FAILURES as error:
            return _failed(workload, error, self._fields)

    def _measured(self, cell: Cell, workload: str, twin: Any, before: int) -> Row:  # noqa: ANN401
        """Time a cell's arms in turns; the peer's peak leaves out what lay there ``before`` it."""
        vocabulary = self._llm.config.vocab_size - 5
        prompts = [[(7 * row + i) % vocabulary + 5 for i in range(cell.tokens)] for row in range(cell.batch)]
        arms = [Arm(lambda prompts, count: self._engine.generate(prompts, greedy(count)))]
        if twin is not None:
            capacity = cell.tokens + cell.new_tokens + 8
            compiles = self._device.type == "cuda"
            arms.append(Arm(StaticCompiled(twin, cell.batch, capacity, compiles=compiles).run))
        for arm in arms:
            for count in (1, 1, cell.new_tokens + 1, cell.new_tokens + 1):
                arm.run(prompts, count)
            arm.peak_bytes = peak_of(arm, prompts, self._device)
        figures = self._kv(cell, prompts)
        for number in range(self._bench.rounds):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                arm.time(prompts, cell.new_tokens, self._device)
        ours, rate = arms[0], arms[0].rate(cell.batch, cell.new_tokens)
        if not rate > 0:
            return _failed(workload, RuntimeError("more tokens took no longer than one: too few to time"), self._fields)
        if cell.batch == 1:
            self._alone[cell.tokens, cell.new_tokens] = rate
        if alone := self._alone.get((cell.tokens, cell.new_tokens)):
            figures["efficiency"] = rate / (cell.batch * alone)
        num_bytes = bytes_a_step(self._llm, cell.batch, cell.tokens + cell.new_tokens // 2)
        peer = arms[1] if len(arms) > 1 else None
        return Row(
            target="matrix", workload=workload, ours=rate if self._parity == "pass" else None,
            peer_name=PEER if peer else None, peer=peer and peer.rate(cell.batch, cell.new_tokens),
            limit=cell.batch * read_rate(self._bench, self._fields["device"]) / num_bytes,
            num_forwards=cell.new_tokens, peak_bytes=ours.peak_bytes or None,
            peer_peak_bytes=max(peer.peak_bytes - before, 0) or None if peer else None,
            parity=self._parity, figures=figures, **self._fields,
        )  # fmt: skip

    def _kv(self, cell: Cell, prompts: list[list[int]]) -> dict[str, float]:
        """Return where the pool's bytes are in the step that holds most of them."""
        requests = [self._engine.add(prompt, greedy(cell.new_tokens + 1))[0] for prompt in prompts]
        fullest = self._engine.report().kv
        while self._engine.has_work:
            self._engine.step()
            fullest = max(fullest, self._engine.report().kv, key=lambda use: use.active_bytes)
        for request in requests:
            if len(request.completion.token_ids) != cell.new_tokens + 1:
                done = request.completion
                raise RuntimeError(f"got {len(done.token_ids)} tokens ({done.error or done.finish_reason})")
        return {
            "kv_allocated_bytes": fullest.allocated_bytes, "kv_active_bytes": fullest.active_bytes,
            "kv_wasted_bytes": fullest.wasted_bytes,
        }  # fmt: skip


def _failed(workload: str, error: Exception, fields: dict[str, Any]) -> Row:
    """Return the row of a cell that could not be run."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError | UnavailableError)
    status = "oom" if out_of_memory else "unsupported" if isinstance(error, RequestError) else "invalid"
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Row(target="matrix", workload=workload, parity=text, status=status, **fields)


def _line(row: Row) -> str:
    efficiency = (row.figures or {}).get("efficiency")
    return summary(row) + ("" if efficiency is None else f", {efficiency:.2f} of B1's each")


def matrix_table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table: rates, what of the limit and of one sequence's rate, and bytes."""
    columns = ("cell", "tok/s", "of limit", "of B1's", "ours / peer", "KV MiB held", "wasted", "peak MiB", "peer's")
    lines = []
    for row in rows:
        seen = row.figures or {}
        ratios = (row.ratio_limit, seen.get("efficiency"), row.ratio_peer)
        sizes = (seen.get("kv_active_bytes"), seen.get("kv_wasted_bytes"), row.peak_bytes, row.peer_peak_bytes)
        lines.append((
            row.workload, f"{row.status}: {row.parity}" if row.ours is None else f"{row.ours:,.0f}",
            *("—" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            *("—" if size is None else f"{size / 2**20:,.2f}" for size in sizes),
        ))  # fmt: skip
    return markdown_table(columns, lines)
