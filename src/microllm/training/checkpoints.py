"""Checkpoints of a run: whole or refused, and enough to go on bit for bit.

    step-00000100/
        config.json, model.safetensors, tokenizer.json, ...   a Hugging Face directory: --model takes it
        optimizer.safetensors                                 moments, by parameter
        random.safetensors                                    every rank's generators
        state.json                                            format, config, step, versions, sha256 of every file
        complete                                              written last: sha256 of state.json

All is written under a temporary name, forced to the disk and renamed; then comes the marker. With adapters the
directory is PEFT's instead. Only the first rank opens a file for writing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microllm.config import ModelConfig
from microllm.errors import CheckpointError
from microllm.io.checkpoint import save_checkpoint, sync_directory
from microllm.io.json_files import read_json_object
from microllm.io.safetensors_files import SafetensorsSource, write_bytes, write_tensors

STATE_FILE, MARKER, FORMAT_VERSION = "state.json", "complete", 1
OPTIMIZER_FILE, RANDOM_FILE = "optimizer.safetensors", "random.safetensors"
_MAX_STATE_BYTES = 16 << 20
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that one checkpoint holds. ``record`` is the JSON part: config, step, data, versions."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    generators: Mapping[str, Tensor]
    record: dict[str, Any]
    text_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Complete:
    """A checkpoint that has been verified, file by file."""

    path: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """Return how many steps were done."""
        return self.record["step"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one of its files."""
        if not (self.path / name).exists():
            return {}
        source = SafetensorsSource(self.path / name)
        return {key: source.read(key) for key in source.infos}


def write_checkpoint(directory: Path, snapshot: Snapshot, *, keep: int, adapter: Any = None) -> Path:  # noqa: ANN401
    """Write ``directory``/step-N and drop the oldest beyond ``keep``; ``adapter`` writes PEFT's files instead.

    Raises:
        CheckpointError: the disk refuses; what was there before is intact.
    """
    target = directory / f"step-{snapshot.record['step']:08d}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".step-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=directory) as scratch:
            staged = Path(scratch) / target.name
            if adapter is None:
                save_checkpoint(staged, snapshot.config, snapshot.weights, text_files=snapshot.text_files)
            else:
                staged.mkdir()
                adapter(staged)
            for name, tensors in ((OPTIMIZER_FILE, snapshot.optimizer), (RANDOM_FILE, snapshot.generators)):
                if tensors:
                    write_tensors(staged, tensors, 1 << 62, single_name=name)
            files = {path.name: _sha256(path) for path in sorted(staged.iterdir())}
            state = {"format_version": FORMAT_VERSION, **snapshot.record, "files": files}
            data = json.dumps(state, indent=1, allow_nan=False).encode() + b"\n"
            write_bytes(staged / STATE_FILE, data)
            sync_directory(staged)
            if target.exists():  # incomplete, or of a run that was rolled back: its steps are done again
                target.rename(Path(scratch) / "old")
            staged.rename(target)
            sync_directory(directory)
            write_bytes(target / MARKER, hashlib.sha256(data).hexdigest().encode() + b"\n")
            sync_directory(target)
    except OSError as error:
        raise CheckpointError(f"got {error} when writing {target}; need room and the right to write there") from error
    whole = [path for path in _found(directory) if (path / MARKER).is_file()]
    for old in set(_found(directory)) - set(whole[:keep]):
        shutil.rmtree(old, ignore_errors=True)
    return target


def latest_checkpoint(directory: Path) -> tuple[Complete | None, list[str]]:
    """Return the newest checkpoint that is whole, and why each newer one is refused.

    Raises:
        CheckpointError: a newer version of this package wrote it; to go on from an older one would lose work.
    """
    refused: list[str] = []
    for path in _found(directory):
        try:
            return open_complete(path), refused
        except NewerFormatError:
            raise
        except (CheckpointError, OSError) as error:
            refused.append(f"{path.name}: {error}")
    return None, refused


class NewerFormatError(CheckpointError):
    """A checkpoint that a newer version of this package wrote."""


def open_complete(path: Path) -> Complete:
    """Verify every file of a checkpoint against its state, and that against the marker.

    Raises:
        CheckpointError: a file is missing, too many, or not as it was written.
        NewerFormatError: the format is newer than this package.
    """
    marker, state = path / MARKER, path / STATE_FILE
    if not marker.is_file():
        raise CheckpointError(f"got no file {MARKER!r} in {path}; need it: writing did not end")
    if marker.read_text(errors="replace").strip() != _sha256(state):
        raise CheckpointError(f"got {state}, which is not what {MARKER!r} says; need it as it was written")
    record = read_json_object(state, _MAX_STATE_BYTES, CheckpointError)
    version = record.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise NewerFormatError(f"got {path} in format {version!r}; need at most {FORMAT_VERSION}; update microllm")
    there = {file.name for file in path.iterdir()} - {MARKER, STATE_FILE}
    for name in sorted(there ^ record["files"].keys()):
        raise CheckpointError(f"got {path} with {name} {'too many' if name in there else 'missing'}; need its files")
    for name, sha256 in record["files"].items():
        if _sha256(path / name) != sha256:
            raise CheckpointError(f"got {path / name}, whose bytes are not those that were written; need them")
    return Complete(path, record)


def _found(directory: Path) -> list[Path]:
    """Return the checkpoint directories, newest first."""
    return sorted((p for p in directory.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()), reverse=True)


def _sha256(path: Path) -> str:
    if not path.is_file():
        raise CheckpointError(f"got no file {path}; need it")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put this rank's generators back where they were."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
