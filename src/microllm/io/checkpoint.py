"""A checkpoint: config, generation defaults and tensors of one model; strict loading, atomic saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from microllm.config import ModelConfig
from microllm.io.hf_config import GenerationDefaults
from microllm.io.tensor_source import TensorSource

if TYPE_CHECKING:
    from microllm.io.resolve import ModelSource


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk whose headers have been read and whose payload has not."""

    source: ModelSource
    config: ModelConfig
    generation: GenerationDefaults
    tensors: TensorSource
    raw_config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MapEntry:
    """Where one foreign tensor goes: its run-time name, and whether it is stored transposed."""

    name: str
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load would do: run-time names that load or are missing, file names that do not fit (with why)."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    incompatible: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing is missing, unexpected or incompatible."""
        return not (self.missing or self.unexpected or self.incompatible)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the checkpoint at ``source`` with every header read and checked, and no payload touched."""
    raise NotImplementedError


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    name_map: Mapping[str, MapEntry] | None = None,
) -> LoadReport:
    """Return which of ``shapes`` (run-time names) the checkpoint fills, from headers alone."""
    raise NotImplementedError


def read_tensors(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    strict: bool = True,
    name_map: Mapping[str, MapEntry] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (run-time name, CPU tensor as stored), one tensor in memory at a time."""
    raise NotImplementedError


def save_checkpoint(
    directory: Path | str,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    generation: GenerationDefaults | None = None,
    text_files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = 4 << 30,
    overwrite: bool = False,
) -> Path:
    """Write a Hugging Face directory atomically and return its path."""
    raise NotImplementedError
