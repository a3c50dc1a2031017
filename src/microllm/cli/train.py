"""``microllm train``: a run from scratch or from a model, alone or under torchrun; the same command goes on with it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from microllm.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a preset, or go on from a model; the same command again goes on where the run stopped."""

    config: TrainConfig
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print each row as one JSON line, as metrics.jsonl has it."""

    def run(self) -> int:
        """Show the run; 0 when it ended or was stopped with a checkpoint."""
        import torch.distributed as dist

        from microllm.errors import DataError, MicroLLMError, MissingExtraError
        from microllm.training import train
        from microllm.training.curve import draw_curve

        progress = _Progress(self.config.last_step, as_json=self.as_json)
        try:
            end = train(self.config, progress.show)
        except BaseException as error:
            if not dist.is_initialized():
                raise
            # Peers may be gone or wait: to leave the group in order, or to run exit handlers, could hang.
            text = f"microllm: {error}" if isinstance(error, MicroLLMError) else traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            os._exit(1)
        if progress.seen and not self.as_json:
            try:
                print(f"curve: {draw_curve(self.config.output)}")
            except (MissingExtraError, DataError) as error:  # no matplotlib, or stopped before the first step
                print(f"no curve: {error}")
            state = "stopped; the same command goes on" if end["stopped"] else "done"
            print(f"{state} at step {end['step']}; checkpoints: {self.config.output / 'checkpoints'}")
        if dist.is_torchelastic_launched():
            sys.stdout.flush()
            os._exit(0)  # one process in ten aborts where gloo's threads meet the interpreter's end
        return 0


class _Progress:
    """One line that is written over on a terminal, plain lines elsewhere."""

    def __init__(self, last_step: int, *, as_json: bool) -> None:
        self._last_step, self._as_json, self._live = last_step, as_json, sys.stdout.isatty()
        self.seen = False

    def show(self, row: dict[str, Any]) -> None:
        """Show one row of the run."""
        self.seen = True
        if self._as_json:
            print(json.dumps(row), flush=True)
        elif row["kind"] == "step":
            self._step(row)
        elif row["kind"] != "end":
            print(("\r\x1b[K" if self._live else "") + _described(row), flush=True)

    def _step(self, row: dict[str, Any]) -> None:
        every = max(1, self._last_step // 50)
        if not self._live and row["step"] % every and row["step"] != self._last_step:
            return
        eta = (self._last_step - row["step"]) * row["seconds"]["total"]
        mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = "" if row["peak_memory_bytes"] is None else f" · {row['peak_memory_bytes'] / 2**30:.1f} GiB"
        text = (
            f"step {row['step']}/{self._last_step} · loss {row['loss']:.4f} · {row['tokens_per_s']:,.0f} tok/s · "
            f"MFU (6N+12LHKc) {mfu}{memory} · {eta:.0f} s left"
        )
        print(f"\r\x1b[K{text}" if self._live else text, end="" if self._live else "\n", flush=True)


def _described(row: dict[str, Any]) -> str:
    match row["kind"]:
        case "validation":
            return f"step {row['step']}: validation loss {row['loss']:.4f} over {row['num_targets']:,} tokens"
        case "sample":
            return f"step {row['step']}: {row['text']!r}"
        case "checkpoint":
            return f"step {row['step']}: checkpoint {row['path']} ({row['seconds']:.1f} s)"
    return f"step {row['step']}: refused {row['reason']}"
