"""Tuned choices: block sizes and the like that the tuner found, as data with the environment they were found in.

Place: a kernel asks ``tuned`` for its operator and shape, and has a choice of its own where there is none. An entry
of another device or version is not used, and ``ignored`` says so. Only the tuner writes ``tuned.json``, once a
candidate has passed the contract.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from microllm.evidence.tensor_statistics import Record

PATH = Path(__file__).with_name("tuned.json")


class Tuned(Record):
    """One entry: what was tuned (axis letters and sizes), where, and the kernel's options that won."""

    op: str
    shape: dict[str, int]
    dtype: str
    device: str
    torch: str
    triton: str
    choice: dict[str, int]

    def mismatch(self, device: str) -> str | None:
        """Return how ``device`` and this environment differ from the entry's, or None."""
        here = {"device": device, "torch": torch.__version__.partition("+")[0], "triton": _triton_version()}
        there = {name: getattr(self, name) for name in here}
        wrong = [f"tuned on {name} {there[name]}, here {here[name]}" for name in here if here[name] != there[name]]
        return "; ".join(wrong) or None


class TunedFile(Record):
    """The file: a format version and its entries."""

    format: int
    entries: tuple[Tuned, ...]


@cache
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "absent"


@cache
def _read(path: Path) -> tuple[Tuned, ...]:
    return TunedFile.model_validate_json(path.read_text(encoding="utf-8")).entries


@cache
def _find(path: Path, op: str, shape: tuple[tuple[str, int], ...], dtype: str, device: str) -> Tuned | None:
    wanted = (op, dict(shape), dtype)
    return next((e for e in _read(path) if (e.op, e.shape, e.dtype) == wanted and not e.mismatch(device)), None)


def tuned(op: str, shape: dict[str, int], dtype: torch.dtype, device: str) -> dict[str, int] | None:
    """Return the choice tuned for an operator's sizes on a device (its name) in this environment, or None."""
    entry = _find(PATH, op, tuple(sorted(shape.items())), str(dtype).removeprefix("torch."), device)
    return entry.choice if entry else None


def ignored(device: str) -> list[str]:
    """Return a sentence for each entry that is not used on ``device``, and why."""
    return [f"{e.op} {e.shape} {e.dtype}: {why}" for e in _read(PATH) if (why := e.mismatch(device)) is not None]
