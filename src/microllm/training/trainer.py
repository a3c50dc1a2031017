"""The loop: take the step's rows, count their targets over all ranks, step, write down, keep.

Place: ``train`` joins the ranks and runs a ``Trainer``; the command shows its rows. A step's gradient is the sum of its
tokens' losses over their number in the whole step: micro-batches, ranks and masks change nothing. Every rank takes the
same decisions, for they rest on numbers that all ranks have summed.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from microllm import ops
from microllm.errors import DataError, TrainingError
from microllm.evidence.journal import exclusive
from microllm.io.paths import expanded
from microllm.ops.cross_entropy import IGNORE
from microllm.training.build import build
from microllm.training.config import TrainConfig
from microllm.training.dataset import Dataset, Index, Rows, open_index
from microllm.training.metrics import MFU_FORMULA, Metrics, StepClock, flops_per_token, parts_s, peak_tflops
from microllm.training.optimizer import learning_rate, make_optimizer
from microllm.training.pack import INDEX_FILE, PackConfig, open_tokenizer, pack_data
from microllm.training.passes import Passes
from microllm.training.ranks import Ranks, joined
from microllm.training.resume import Keeper
from microllm.training.safety import first_bad
from microllm.training.vocabulary import train_tokenizer

Report = Callable[[dict[str, Any]], None]
"""Takes each row that a run writes."""


def train(config: TrainConfig, report: Report = lambda row: None) -> dict[str, Any]:
    """Run, or go on with, the run in ``config.output``; return its last row: how it ended, and at which step.

    Raises:
        TrainingError: a number is not finite, the ranks disagree, or a collective failed.
        ConfigError, DataError, CheckpointError: the parts do not fit, or are damaged.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own; read when a GPU is first used
    with joined(config.device) as ranks, _modes(config):
        return Trainer(config, ranks, report).run()


@contextmanager
def _modes(config: TrainConfig) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    changes = config.deterministic and not before  # even to say the same again imports the compiler: seconds
    if changes:
        torch.use_deterministic_algorithms(True)
    try:
        with ops.use("reference") if config.level == "reference" else nullcontext():
            yield
    finally:
        if changes:
            torch.use_deterministic_algorithms(before)


class Trainer:
    """One rank's part of a run. ``step`` counts the steps that are done."""

    def __init__(self, config: TrainConfig, ranks: Ranks, report: Report) -> None:
        self.config, self.ranks, self._report = config, ranks, report
        self.output = expanded(config.output)
        if ranks.is_first:
            self.output.mkdir(parents=True, exist_ok=True)
        self.index = _open_data(config, self.output, ranks)
        self.rows = Dataset(self.index, "train", config.row_tokens, whole=config.whole_documents)
        self.validation = Dataset(self.index, "validation", config.row_tokens, whole=config.whole_documents)
        if config.validate_every and not self.validation.num_rows:
            raise DataError("got validate_every with data that has no validation split; need one; pack more documents")
        self.clock = StepClock(ranks.device)
        self.built = build(config, self.index, ranks, lambda: self.clock.mark("forward_backward"))
        self.optimizer = make_optimizer(self.built.parameters, config.optimizer, config.seed)
        self.keeper = Keeper(config, self.output, self.index, ranks, self.built, self.optimizer)
        torch.manual_seed(config.seed + ranks.rank)
        self.step = self.keeper.resume()
        self.built.copies.refresh()
        self.passes = Passes(config, self.built, ranks)
        self._per_rank = -(-config.batch_rows // ranks.world)
        self._stopping = False
        self._metrics: Metrics | None = None
        self._last_row_at = 0.0

    def run(self) -> dict[str, Any]:
        """Go on to the last step, or to a signal, and leave a checkpoint."""
        with ExitStack() as stack:
            if self.ranks.is_first:
                lock = self.output / ".lock"
                lock.touch()
                busy = f"got a run in {self.output} that another process is training; need it to end; or another output"
                stack.enter_context(exclusive(lock, busy))
                self._metrics = Metrics(self.output, self.step, tensorboard=self.config.tensorboard)
                stack.callback(self._metrics.close)
            with _signals(self._stop):
                for reason in self.keeper.refused:
                    self._write({"kind": "refused", "step": self.step, "reason": reason})
                self._take_steps()
            return self._write({"kind": "end", "step": self.step, "stopped": self.step < self.config.last_step})

    def _take_steps(self) -> None:
        self._start_clock()
        pending, kept = None, self.step
        while self.step < self.config.last_step:
            row = self._train_step()
            if row is None:
                break
            self._flush(pending)
            pending = row
            if self._extras_due():
                self._flush(pending)
                pending = None
                kept = self._extras(kept)
                self._start_clock()
        self._flush(pending)
        if kept != self.step:
            self._keep()

    def _start_clock(self) -> None:
        self.clock.mark()
        self.clock.take()
        self._last_row_at = time.perf_counter()

    def _stop(self) -> None:
        self._stopping = True

    def _batches(self) -> tuple[list[Rows], int]:
        """Return this rank's micro-batches of the step, and how many tokens all ranks' rows hold."""
        config, ranks = self.config, self.ranks
        rows = self.rows.rows_of_step(self.step, config.batch_rows, config.seed)
        mine, size = rows[ranks.rank :: ranks.world], min(config.micro_rows or self._per_rank, self._per_rank)
        parts = [mine[i : i + size] for i in range(0, self._per_rank, size)]
        fixed = self.passes.fixed_shape
        batches = [self.rows.batch(part, size if fixed else max(1, len(part))) for part in parts]
        return batches, sum(self.rows.length(row) for row in rows)

    def _train_step(self) -> dict[str, Any] | None:
        """Take one step and return its row, or None where a signal asked to stop before it."""
        config, ranks, parameters = self.config, self.ranks, self.built.parameters
        batches, num_tokens = self._batches()
        counted = float(sum(int((rows.targets_N != IGNORE).sum()) for rows in batches))
        contexts = float(sum(int((rows.positions_N + 1).sum()) for rows in batches))
        laid = float(sum(len(rows.positions_N) for rows in batches))
        self.clock.mark("data")
        counted, contexts, laid, stopping = ranks.sum([counted, contexts, laid, float(self._stopping)])
        if stopping:
            return None
        self.clock.mark("communication" if ranks.world > 1 else "data")
        scale = ranks.world / max(1.0, counted)  # the ranks' gradients are averaged
        scaled = [rows._replace(weights_N=rows.weights_N * scale).to(ranks.device) for rows in batches]
        loss, norm = self.passes.run(scaled)
        self.clock.mark("communication" if ranks.world > 1 and not self.passes.captures else "forward_backward")
        (loss,) = ranks.sum([loss / ranks.world])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            bad = first_bad(self.built, scaled, loss)
            raise TrainingError(
                f"got {bad} that is not finite at step {self.step + 1} (loss {loss}, gradient norm {norm}); need "
                f"finite numbers; the step was not taken; the last checkpoint is in {self.keeper.directory}; lower the "
                "learning rate, or look at the data of that step"
            )
        peak = config.optimizer.learning_rate
        rate = learning_rate(self.step, config.num_steps, peak, config.schedule)
        self.passes.clip(norm, config.optimizer.clip_norm)
        self.optimizer.step(rate, self.step + 1)
        self.built.copies.refresh()
        self.passes.forget_gradients()
        self.clock.mark("optimizer")
        self.step += 1
        if config.check_ranks_every and self.step % config.check_ranks_every == 0:
            if (name := None if config.shard else ranks.different(dict(parameters))) is not None:
                raise TrainingError(f"got {name} with other bits on some ranks after step {self.step}; need them equal")
            self.clock.mark("verification")
        now = time.perf_counter()
        total_s, self._last_row_at = now - self._last_row_at, now
        return {
            "kind": "step", "step": self.step, "loss": loss, "learning_rate": rate, "grad_norm": norm,
            "num_targets": int(counted), "num_tokens": num_tokens, "mean_context": contexts / laid,
            "total_s": total_s, "marks": self.clock.take(),
        }  # fmt: skip

    def _flush(self, row: dict[str, Any] | None) -> None:
        """Write a step's row, once the device has done the step."""
        if row is None:
            return
        marks, device = row.pop("marks"), self.ranks.device
        context, seconds = row.pop("mean_context"), row.pop("total_s")
        rate = row["num_tokens"] / seconds
        peak = peak_tflops(device, self.built.precision)
        done = rate * flops_per_token(self.built.config, context) / self.ranks.world
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        self._write({
            **row, "tokens_per_s": rate, "mfu": None if peak is None else done / (peak * 1e12),
            "mfu_formula": MFU_FORMULA, "peak_memory_bytes": memory,
            "seconds": {**parts_s(marks), "total": seconds},
        })  # fmt: skip

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _extras_due(self) -> bool:
        config = self.config
        return any(self._due(n) for n in (config.validate_every, config.sample_every, config.checkpoint_every))

    def _extras(self, kept: int) -> int:
        """Do what this step is the time for, and return the step of the last checkpoint."""
        if self._due(self.config.validate_every):
            self._validate()
        if self._due(self.config.sample_every):
            self._sample()
        if self._due(self.config.checkpoint_every):
            self._keep()
            return self.step
        return kept

    def _keep(self) -> None:
        started = time.perf_counter()
        path = self.keeper.keep(self.step)
        seconds = time.perf_counter() - started
        self._write({"kind": "checkpoint", "step": self.step, "path": str(path), "seconds": seconds})

    def _validate(self) -> None:
        rows = list(range(min(self.config.validate_rows, self.validation.num_rows)))
        loss, counted = self.passes.validate(self.validation, rows[self.ranks.rank :: self.ranks.world], len(rows))
        loss, counted = self.ranks.sum([loss, counted])
        loss /= max(1.0, counted)
        self._write({"kind": "validation", "step": self.step, "loss": loss, "num_targets": int(counted)})

    def _sample(self) -> None:
        tokenizer = open_tokenizer(str(self.index.directory))
        for prompt in self.config.sample_prompts:
            ids = tokenizer.encode(prompt) or sorted(tokenizer.eos_ids)
            made = self.passes.sample(ids, self.config.sample_tokens, self.config.seed, tokenizer.eos_ids)
            self._write({"kind": "sample", "step": self.step, "prompt": prompt, "text": tokenizer.decode(made)})

    def _write(self, row: dict[str, Any]) -> dict[str, Any]:
        if self._metrics is not None:
            self._metrics.write(row)
            self._report(row)
        return row


def _open_data(config: TrainConfig, output: Path, ranks: Ranks) -> Index:
    """Open packed data; a text or JSONL file is packed under the output by the first rank, once."""
    data = expanded(config.data)
    if not data.is_dir():
        packed = output / "data"
        problem = None
        if ranks.is_first and not (packed / INDEX_FILE).exists():
            try:
                pack_data(PackConfig(
                    input=(data,), output=packed, tokenizer=_tokenizer_for(config, data, output),
                    documents="file" if data.suffix == ".jsonl" else "paragraph",
                ))  # fmt: skip
            except Exception as error:  # noqa: BLE001  the other ranks wait: they must hear of it
                problem = error
        problem = ranks.share(problem)
        if problem is not None:
            raise problem
        data = packed
    index = open_index(data)
    if not sum(shard["num_targets"] for shard in index.content["splits"]["train"]):
        raise DataError(f"got {data} without a target; need a document of two tokens, or an assistant's answer")
    return index


def _tokenizer_for(config: TrainConfig, data: Path, output: Path) -> str:
    from_scratch = config.preset
    if from_scratch is None:
        return config.model
    return str(train_tokenizer([data], from_scratch.vocab_size, output / "tokenizer"))


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ask to stop on SIGTERM and Ctrl-C; a second Ctrl-C stops at once. Only a main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        stop()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
