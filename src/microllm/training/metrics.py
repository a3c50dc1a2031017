"""What a run writes down: a JSON line a step, the time of its parts, its share of the device's peak.

Place: the trainer measures with ``StepClock`` and writes with ``Metrics``; the command shows the same rows. On a GPU
the parts lie between events on the stream, which are read one step later: nothing waits for them.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from microllm.config import ModelConfig
from microllm.errors import DataError, MissingExtraError
from microllm.evidence.environment import PUBLISHED, read_device_name
from microllm.evidence.journal import finite_json, read_lines, write_atomic

FILE = "metrics.jsonl"
MFU_FORMULA = "(6 N + 12 L H K c) FLOP a token; N parameters in products, c mean context of a token; dense peak"
PARTS = ("data", "forward_backward", "communication", "optimizer", "verification")


class Metrics:
    """The run's ``metrics.jsonl``; rows past ``step`` are of work that is done again, and go."""

    def __init__(self, directory: Path, step: int, *, tensorboard: bool = False) -> None:
        path = directory / FILE
        try:
            kept = [line for line in read_lines(path) if json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"got {path} with a line that no run wrote ({error}); need its own; move it away"
            ) from error
        write_atomic(path, "".join(f"{line}\n" for line in kept))
        self._board = _board(directory) if tensorboard else None
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it is with the system when this returns."""
        self._file.write(json.dumps(finite_json(row)) + "\n")
        self._file.flush()
        board = self._board
        for name, value in row.items():
            if board is not None and isinstance(value, float):
                board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(directory: Path) -> Any:  # noqa: ANN401  an optional extra's class
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  needs the extra
    except ImportError as error:
        raise MissingExtraError("tensorboard", "tensorboard", "--tensorboard") from error
    return SummaryWriter(directory / "tensorboard")


class StepClock:
    """Times the parts of a step: ``mark`` ends one, ``parts`` reads them when the device has done the step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, []
        self._previous: Any = None

    def mark(self, part: str = "") -> None:
        """Say that ``part`` has ended here; without a name, that a step begins."""
        moment: Any = time.perf_counter()
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # what is captured now is timed when it is replayed, as one part
        if self._device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((part, moment))

    def take(self) -> list[tuple[str, Any]]:
        """Return the marks since the last take; the last of them begins the next step."""
        marks, self._marks = self._marks, self._marks[-1:]
        return marks


def parts_s(marks: list[tuple[str, Any]]) -> dict[str, float]:
    """Return the seconds of each part between marks; waits until the device has passed the last one."""
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    if marks and isinstance(marks[-1][1], torch.cuda.Event):
        marks[-1][1].synchronize()
    for (_, before), (part, after) in pairwise(marks):
        found[part] += before.elapsed_time(after) / 1e3 if isinstance(after, torch.cuda.Event) else after - before
    return found


def flops_per_token(config: ModelConfig, mean_context: float) -> float:
    """Return the FLOPs of a forward and a backward pass over one token, by ``MFU_FORMULA``."""
    products = sum(
        shape[0] * shape[1] for name, shape in config.parameter_shapes().items()
        if len(shape) == 2 and (name != "embed_tokens.weight" or config.tie_word_embeddings)
    )  # fmt: skip
    return 6 * products + 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * mean_context


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Return the device's published dense peak, or None where it is not known."""
    if device.type != "cuda":
        return None
    return PUBLISHED.get(read_device_name(str(device)), {}).get(precision)
