"""Tuned choices: block sizes and the like that the tuner found, as data with the environment they were found in.

Place: a kernel asks ``tuned`` for its operator and shape, and has a choice of its own where there is none. An entry of
another device, version or kernel source is not used, and ``ignored`` says so; a file that is no such table is an error
that names it. Only the tuner (``microllm tune --accept``) writes ``tuned.json``, once a candidate has passed the
contract and won. Decides nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import Field, ValidationError

from microllm.errors import OperatorError
from microllm.evidence.journal import write_atomic
from microllm.evidence.tensor_statistics import Record
from microllm.ops.target import INTERPRETER

PATH = Path(__file__).with_name("tuned.json")
_LINEAR = ("linear.py", "linear_choice.py", "linear_fma.py", "linear_forms.py", "linear_tiles.py", "codes.py")
_SOURCES = {"attention_decode": ("attention_decode.py", "attention_parts.py", "pages.py", "fp8.py")}
"""Files under ``kernels/`` that an operator's entries were found with; ``_LINEAR`` for every linear."""


class Tuned(Record):
    """One entry: what was tuned (axis letters and sizes), where, and the kernel's options that won.

    ``source`` is ``source_of`` the operator: an entry outlives no change of its kernel.
    """

    op: str
    shape: dict[str, int] = Field(min_length=1)
    dtype: str
    device: str
    torch: str
    triton: str
    source: str
    choice: dict[str, int] = Field(min_length=1)

    def mismatch(self, device: str) -> str | None:
        """Return how ``device`` and this environment differ from the entry's, or None."""
        here = environment(self.op, device)
        wrong = [f"tuned on {name} {getattr(self, name)}, here {here[name]}" for name in here
                 if here[name] != getattr(self, name)]  # fmt: skip
        return "; ".join(wrong) or None

    def speaks_of(self, other: Tuned) -> bool:
        """Say whether the two are about one shape in one environment."""
        return self.model_dump(exclude={"choice"}) == other.model_dump(exclude={"choice"})


class TunedFile(Record):
    """The file: a format version and its entries."""

    format: int = Field(ge=1, le=1)
    entries: tuple[Tuned, ...]


def environment(op: str, device: str) -> dict[str, str]:
    """Return what an operator's entries hold for, on a device of that name in this process."""
    return {
        "device": device, "torch": torch.__version__.partition("+")[0], "triton": _triton_version(),
        "source": source_of(op),
    }  # fmt: skip


@cache
def source_of(op: str) -> str:
    """Return a digest of the source of the kernels that an operator's entries choose for."""
    folder, digest = Path(__file__).with_name("kernels"), hashlib.sha256()
    for name in _SOURCES.get(op, _LINEAR):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:16]


@cache
def device_name(device: torch.device) -> str:
    """Return the name that tuned entries know a device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER.name


@cache
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "absent"


@cache
def _read(path: Path) -> tuple[Tuned, ...]:
    try:
        entries = TunedFile.model_validate_json(path.read_text(encoding="utf-8")).entries
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise damaged(": ".join(lines[1:3]) or lines[0], path) from error
    for i, entry in enumerate(entries):
        if any(entry.speaks_of(other) for other in entries[:i]):
            raise damaged(f"two entries for {entry.op} {entry.shape} {entry.dtype}", path)
    return entries


def damaged(what: str, path: Path | None = None) -> OperatorError:
    """Return the error of a table that says what no kernel takes."""
    return OperatorError(
        f"{path or PATH}: got {what}; need tuned choices as microllm tune --accept writes them; "
        'restore the file, or empty it: {"format": 1, "entries": []}'
    )


_trial: list[Tuned] = []


@contextmanager
def trial(*entries: Tuned) -> Iterator[None]:
    """Let entries stand before the file's inside the context: how a candidate is run. Holds for the whole process."""
    _trial[:0] = entries
    _find.cache_clear()
    try:
        yield
    finally:
        del _trial[: len(entries)]
        _find.cache_clear()


@cache
def _find(path: Path, op: str, shape: tuple[tuple[str, int], ...], dtype: str, device: str) -> Tuned | None:
    wanted = (op, dict(shape), dtype)
    entries = (*_trial, *_read(path))
    return next((e for e in entries if (e.op, e.shape, e.dtype) == wanted and not e.mismatch(device)), None)


def has_entries() -> bool:
    """Say whether there is anything to find, so that a call may skip the question."""
    return bool(_trial or _read(PATH))


def tuned(op: str, shape: dict[str, int], dtype: torch.dtype, device: str) -> dict[str, int] | None:
    """Return the choice tuned for an operator's sizes on a device (its name) in this environment, or None.

    Raises:
        OperatorError: the file is not a table of tuned choices.
    """
    entry = _find(PATH, op, tuple(sorted(shape.items())), str(dtype).removeprefix("torch."), device)
    return entry.choice if entry else None


def entries() -> tuple[Tuned, ...]:
    """Return all entries of the file, used or not."""
    return _read(PATH)


def ignored(device: str) -> list[str]:
    """Return a sentence for each entry that is not used on ``device``, and why."""
    return [f"{e.op} {e.shape} {e.dtype}: {why}" for e in _read(PATH) if (why := e.mismatch(device)) is not None]


def accept(entries: tuple[Tuned, ...]) -> list[Tuned]:
    """Write entries to the file in place of those about the same shapes; return those that went.

    What fixes the order of a sum for a whole matrix takes the entries of its numbers of rows along: they were found
    with the order before.
    """
    _read.cache_clear()  # another process may have written since
    gone = [old for old in _read(PATH) if any(old.speaks_of(new) or _rests_on(old, new) for new in entries)]
    kept = [old for old in _read(PATH) if old not in gone]
    whole = TunedFile(format=1, entries=(*kept, *entries))
    write_atomic(PATH, whole.model_dump_json(indent=1) + "\n")
    _read.cache_clear()
    _find.cache_clear()
    return gone


def _rests_on(old: Tuned, new: Tuned) -> bool:
    rows = {name: size for name, size in old.shape.items() if name != "M"}
    return old.speaks_of(new.model_copy(update={"shape": old.shape})) and "M" in old.shape and rows == new.shape
