"""Find a model by name or path: the demo, a directory, a GGUF file, or a name in the local Hugging Face cache.

Place: first step of every load; what it returns goes to ``io/checkpoint.py`` and ``io/tokenizer.py``.
Does not open weights and never downloads, except the demo (``io/demo.py``).
Source: the cache layout of ``huggingface_hub`` (models--OWNER--NAME/{refs,snapshots})
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microllm.errors import ModelNotFoundError
from microllm.io.demo import DEMO_NAMES, fetch_demo
from microllm.io.paths import expanded

_NEED = "need 'demo', a directory with config.json, a .gguf file, or OWNER/NAME in the local Hugging Face cache"
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies: ``path`` is a directory with config.json, or one GGUF file."""

    name: str
    path: Path
    kind: Literal["directory", "gguf"]


def resolve_model(name: str, *, offline: bool = False) -> ModelSource:
    """Return where the model called ``name`` lies; built-in names come first, then paths, then the local cache.

    ``offline`` forbids fetching the demo; nothing else is ever fetched. A directory called ``demo`` is ``./demo``.

    Raises:
        ModelNotFoundError: nothing of that name, or something there that is no model; near names are suggested.
        UnavailableError: the demo is not on this machine and cannot be fetched.
    """
    if not name.strip():
        raise ModelNotFoundError(f"got an empty model name; {_NEED}")
    path = expanded(name)
    try:
        if name.lower() in DEMO_NAMES:
            return ModelSource(DEMO_NAMES[0], fetch_demo(offline=offline), "gguf")
        if path.is_dir():
            return _in_directory(name, path)
        if path.exists():
            return _gguf_file(name, path)
        snapshot = _cached_snapshot(name)
        if snapshot is not None:
            return _in_directory(name, snapshot)
    except OSError as error:
        raise ModelNotFoundError(f"got {error.strerror} for model {name!r}; {_NEED}") from error
    near = _near_names(name, path)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ModelNotFoundError(f"got model {name!r}, which is no built-in name, path or cached repository; {_NEED}{hint}")


def _in_directory(name: str, directory: Path) -> ModelSource:
    if (directory / "config.json").is_file():
        return ModelSource(name, directory, "directory")
    ggufs = sorted(path for path in directory.iterdir() if path.suffix == ".gguf")
    if len(ggufs) == 1:
        return _gguf_file(name, ggufs[0])
    found = f"{len(ggufs)} GGUF files ({', '.join(path.name for path in ggufs[:5])})" if ggufs else "no GGUF file"
    raise ModelNotFoundError(
        f"got directory {directory} with no config.json and {found}; need config.json beside the weights, "
        "or the path of one .gguf file"
    )


def _gguf_file(name: str, path: Path) -> ModelSource:
    is_gguf = False
    if path.is_file():  # opening a pipe would wait for its writer
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix != ".gguf":  # a damaged .gguf is for its reader to explain
        raise ModelNotFoundError(
            f"got file {path}, which is no GGUF; {_NEED} (for safetensors name the directory, not the file)"
        )
    return ModelSource(name, path, "gguf")


def _hub_dir() -> Path:
    """Return the local Hugging Face cache, by the variables that ``huggingface_hub`` reads."""
    cache, home, xdg = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME"), os.environ.get("XDG_CACHE_HOME")
    if cache:
        return expanded(cache)
    return expanded(home or Path(xdg or "~/.cache") / "huggingface") / "hub"


def _cached_snapshot(name: str) -> Path | None:
    """Return the snapshot that ``main`` points at (or the only one), if that repository is in the cache."""
    if not _REPOSITORY.fullmatch(name):
        return None
    repository = _hub_dir() / f"models--{name.replace('/', '--')}"
    snapshots = repository / "snapshots"
    if not snapshots.is_dir():
        return None
    revision = ""
    with suppress(FileNotFoundError):
        revision = (repository / "refs" / "main").read_text(errors="replace").strip()
    if re.fullmatch(r"\w+", revision, re.ASCII) and (snapshots / revision).is_dir():
        return snapshots / revision
    present = [path for path in snapshots.iterdir() if path.is_dir()]
    if len(present) == 1:
        return present[0]
    raise ModelNotFoundError(
        f"got {name!r} in the Hugging Face cache with {len(present)} snapshots and no usable refs/main; "
        f"need one; name its directory under {snapshots}"
    )


def _near_names(name: str, path: Path) -> list[str]:
    """Return up to three known names that look like ``name``: built-in, cached, or beside the path."""
    known = {builtin: builtin for builtin in DEMO_NAMES}
    with suppress(OSError, ValueError):
        for entry in _hub_dir().glob("models--*"):
            repository = entry.name.removeprefix("models--").replace("--", "/", 1)
            known[repository.lower()] = repository
    with suppress(OSError, ValueError):
        for entry in path.parent.iterdir():
            if entry.is_dir() or entry.suffix == ".gguf":
                known[str(path.parent / entry.name).lower()] = str(path.parent / entry.name)
    short = {key.rpartition("/")[2]: full for key, full in known.items()}
    matches = difflib.get_close_matches(str(path).lower(), known, n=3)
    matches += difflib.get_close_matches(path.name.lower(), short, n=3)
    return list(dict.fromkeys((known | short)[match] for match in matches))[:3]
