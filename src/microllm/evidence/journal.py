"""Files that survive a kill: canonical JSON, append-only JSON lines, atomic replacement.

Place: under receipts, rows and the lab's records. Knows no schema.
A line is on disk whole or not at all: it is written by one call and flushed, and a torn last line (no newline at
its end) is cut off by the next writer and skipped by every reader.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from microllm.errors import EvidenceError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def finite_json(value: object) -> Json:
    """Return ``value`` as plain JSON data; NaN and infinities become the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise EvidenceError(f"got a {type(value).__name__} in a record; need JSON data; convert it first")


def canonical_json(value: object) -> str:
    """Return the one text that stands for ``value``: keys sorted, no spaces, no NaN."""
    return json.dumps(finite_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_hex(text: str | bytes) -> str:
    """Return the sha256 of ``text`` (UTF-8) in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def append_line(path: Path, make_line: Callable[[str | None], str]) -> str:
    """Append one line to ``path`` under a lock and return it; ``make_line`` is given the last line, if any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        lines = read_lines(path)
        kept = sum(len(line.encode()) + 1 for line in lines)
        if kept != path.stat().st_size:
            os.ftruncate(descriptor, kept)
        line = make_line(lines[-1] if lines else None)
        if "\n" in line:
            raise EvidenceError("got a line break in a JSON line; need one line a record")
        data = (line + "\n").encode()
        if os.write(descriptor, data) != len(data):
            raise OSError(f"short write to {path}")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return line


def read_lines(path: Path) -> list[str]:
    """Return the whole lines of ``path`` (none if there is no file); a torn last line is left out.

    Raises:
        EvidenceError: they are not UTF-8.
    """
    whole = path.read_bytes() if path.exists() else b""
    try:
        return whole[: whole.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise EvidenceError(f"{path}: {error}; need UTF-8; restore it") from error


@contextmanager
def exclusive(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock on an existing file while the context is open; a killed holder holds it no longer.

    Raises:
        EvidenceError: another process holds it; the text is ``refusal``.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EvidenceError(refusal) from error
        yield


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace ``path`` (or what it links to) so that a reader, or a kill, sees the old file or the new one."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
