"""A checkpoint: config, generation defaults and tensors of one model; strict loading, atomic saving.

Place: between the file readers (safetensors, GGUF) and ``model``, which asks for its parameters by run-time name.
A load is judged from headers alone and fails before the first weight is handed out; weights then come one at a
time. A save appears whole or not at all. Does not build modules and does not choose devices or dtypes.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microllm.config import DTYPE_BYTES, ModelConfig
from microllm.errors import CheckpointError, ConfigError, LoadError
from microllm.io.gguf import PACKED_FORMATS, GGUFSource, config_from_gguf
from microllm.io.hf_config import (
    MAX_CONFIG_BYTES,
    GenerationDefaults,
    check_supported,
    parse_generation_config,
    parse_hf_config,
    to_generation_config,
    to_hf_config,
)
from microllm.io.json_files import read_json_object
from microllm.io.names import EMBEDDING, HEAD, file_name, is_ignored, runtime_name
from microllm.io.resolve import ModelSource
from microllm.io.safetensors_files import SafetensorsSource, write_bytes, write_tensors
from microllm.io.tensor_source import TensorInfo, TensorSource

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_NOT_WEIGHTS = ("int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk whose headers have been read and whose payload has not.

    ``raw_config`` is config.json as it is, or a GGUF file's metadata without its vocabulary.
    """

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
    """What a load does: run-time names that load or are missing, stored names that are too many or do not fit.

    ``reasons`` says for each incompatible name why.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    incompatible: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether nothing is missing, unexpected or incompatible."""
        return not (self.missing or self.unexpected or self.incompatible)

    def __str__(self) -> str:
        incompatible = [f"{name} ({self.reasons[name]})" for name in self.incompatible]
        groups = {"missing": self.missing, "unexpected": self.unexpected, "incompatible": incompatible}
        named = [f"{len(names)} {group}: {', '.join(names)}" for group, names in groups.items() if names]
        return "; ".join([f"{len(self.loaded)} loaded", *named])


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the checkpoint at ``source`` with every header read and checked, and no payload touched.

    Raises:
        UnsupportedModelError: a model feature that this project refuses.
        ConfigError: config.json or generation_config.json is missing, damaged or impossible.
        CheckpointError: a weight file is missing, damaged or hostile.
    """
    if source.kind == "gguf":
        gguf = GGUFSource(source.path)
        config, generation = config_from_gguf(gguf)
        metadata = {key: value for key, value in gguf.metadata.items() if not key.startswith("tokenizer.")}
        return Checkpoint(source, config, generation, gguf, metadata)
    raw = read_json_object(source.path / CONFIG_FILE, MAX_CONFIG_BYTES, ConfigError)
    check_supported(raw)
    generation = GenerationDefaults()
    if os.path.lexists(source.path / GENERATION_FILE):  # a link to nowhere is a fault, not an absence
        defaults = read_json_object(source.path / GENERATION_FILE, MAX_CONFIG_BYTES, ConfigError)
        generation = parse_generation_config(defaults)
    tensors = SafetensorsSource(source.path)
    config = parse_hf_config(raw, tensor_names=tensors.infos.keys(), generation=generation)
    stored = tensors.infos.get(file_name(EMBEDDING))
    if not (raw.get("dtype") or raw.get("torch_dtype")) and stored and stored.dtype in DTYPE_BYTES:
        config = replace(config, dtype=stored.dtype)
    return Checkpoint(source, config, generation, tensors, raw)


class _Plan:
    """Which stored tensor fills which parameter, worked out from headers."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        infos: Mapping[str, TensorInfo],
        name_map: Mapping[str, MapEntry],
    ) -> None:
        self.moves: dict[str, tuple[str, bool]] = {}  # run-time name -> stored name, transpose
        self.alias: tuple[str, str] | None = None  # stored names that must hold the same bytes
        self._unexpected: list[str] = []
        self._reasons: dict[str, str] = {}
        self._targets: set[str] = set()
        self._shapes, self._infos, self._name_map = shapes, infos, name_map
        for stored in infos:
            self._place(stored)
        if HEAD in self._targets and HEAD not in shapes:
            self._place_tied_head()

    def _place(self, stored: str) -> None:
        mapped = self._name_map.get(stored)
        if mapped is None and is_ignored(stored):
            return
        entry = mapped or MapEntry(runtime_name(stored) or "")
        tied_head = entry.name == HEAD and HEAD not in self._shapes and EMBEDDING in self._shapes
        need = self._shapes.get(EMBEDDING if tied_head else entry.name)
        if need is None and mapped is None:
            self._unexpected.append(stored)
        elif need is None:
            self._reasons[stored] = f"mapped to {entry.name}, which the model does not have"
        elif entry.name in self._targets:
            self._reasons[stored] = f"a second tensor for {entry.name}"
        else:
            self._targets.add(entry.name)
            self._fit(stored, entry, need)

    def _fit(self, stored: str, entry: MapEntry, need: tuple[int, ...]) -> None:
        info = self._infos[stored]
        shape = info.shape[::-1] if entry.transpose else info.shape
        if entry.transpose and len(shape) != 2:
            self._reasons[stored] = f"shape {list(info.shape)} cannot be transposed, need 2 dimensions"
        elif shape != tuple(need):
            self._reasons[stored] = f"shape {list(shape)}, need {list(need)}"
        elif info.dtype in _NOT_WEIGHTS:
            self._reasons[stored] = f"dtype {info.dtype}, need a float dtype without scales"
        else:
            self.moves[entry.name] = (stored, entry.transpose)

    def _place_tied_head(self) -> None:
        """A tied head may be stored as well: as the embedding's twin, or in its place."""
        head = self.moves.pop(HEAD, None)
        embedding = self.moves.get(EMBEDDING)
        if head is None:
            return
        if EMBEDDING not in self._targets:
            self._targets.add(EMBEDDING)
            self.moves[EMBEDDING] = head
        elif embedding is not None and embedding[1] == head[1]:
            self.alias = (embedding[0], head[0])

    def report(self) -> LoadReport:
        missing = tuple(name for name in self._shapes if name not in self._targets)
        loaded = tuple(name for name in self._shapes if name in self.moves)
        return LoadReport(loaded, missing, tuple(self._unexpected), tuple(self._reasons), dict(self._reasons))


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    name_map: Mapping[str, MapEntry] | None = None,
) -> LoadReport:
    """Return which of ``shapes`` (run-time names) the checkpoint fills, from headers alone."""
    return _Plan(shapes, checkpoint.tensors.infos, name_map or {}).report()


class Weights:
    """A checkpoint's tensors by run-time name, judged from headers; payload is read when it is asked for."""

    def __init__(self, tensors: TensorSource, moves: Mapping[str, tuple[str, bool]]) -> None:
        self._tensors, self._moves = tensors, moves

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU; a transposed one comes as a view, a packed GGUF tensor as float32."""
        stored, transpose = self._moves[name]
        return self._tensors.read(stored).T if transpose else self._tensors.read(stored)

    def packed_type(self, name: str) -> str | None:
        """Return the type of a tensor's blocks where the file packs it in a type that is kept so, else None."""
        stored, transpose = self._moves[name]
        dtype = self._tensors.infos[stored].dtype
        return dtype if isinstance(self._tensors, GGUFSource) and dtype in PACKED_FORMATS and not transpose else None

    def read_packed(self, name: str) -> Tensor:
        """Return a packed tensor's blocks as stored: uint8 [rows, bytes of a row]."""
        assert isinstance(self._tensors, GGUFSource), f"{name} is not packed"
        return self._tensors.read_packed(self._moves[name][0])[0]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        order = {stored: position for position, stored in enumerate(self._tensors.infos)}
        for name in sorted(self._moves, key=lambda name: order[self._moves[name][0]]):
            yield name, self.read(name)


def open_weights(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    strict: bool = True,
    name_map: Mapping[str, MapEntry] | None = None,
) -> Weights:
    """Return the tensors that fill ``shapes`` (run-time names), once all of them have been judged.

    ``strict=False`` hands out what fits; the report of what does not is ``check_tensors``'.

    Numbers: values and dtype as stored; a packed GGUF tensor comes as float32
    Raises:
        LoadError: strict, and a tensor is missing, unexpected or incompatible; the text names all of them, and
            ``report`` holds them.
        CheckpointError: the checkpoint ties its head, and stores one that differs from the embedding.
    """
    plan = _Plan(shapes, checkpoint.tensors.infos, name_map or {})
    report = plan.report()
    if strict and not report.ok:
        raise LoadError(f"got {checkpoint.source.path}: {report}; need exactly the model's tensors", report)
    if plan.alias and not _same_bytes(checkpoint.tensors, *plan.alias):
        raise CheckpointError(
            f"got {plan.alias[1]} that differs from {plan.alias[0]} in {checkpoint.source.path}, whose config "
            "ties them; need equal bytes, or tie_word_embeddings false"
        )
    return Weights(checkpoint.tensors, plan.moves)


def read_tensors(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    strict: bool = True,
    name_map: Mapping[str, MapEntry] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (run-time name, CPU tensor), in file order, one tensor in memory at a time.

    The judgement comes first, when this function is called: it is ``open_weights``'.
    """
    return iter(open_weights(checkpoint, shapes, strict=strict, name_map=name_map))


def _same_bytes(tensors: TensorSource, first: str, second: str) -> bool:
    if isinstance(tensors, SafetensorsSource):
        return tensors.same_bytes(first, second)
    return torch.equal(tensors.read(first), tensors.read(second))


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
    """Write a Hugging Face directory that ``transformers`` loads, whole or not at all, and return its path.

    ``text_files`` are copied beside the weights (tokenizer.json and the like). The directory is written beside
    its place, forced to the disk, and renamed; what was there stays until then, and stays when writing fails.

    Numbers: bits as given; config.json names the dtype that holds every tensor exactly
    Raises:
        CheckpointError: ``state`` is not the config's parameters, the directory is not empty (and not
            ``overwrite``), or the disk refuses.
        UnsupportedModelError: Hugging Face's config cannot describe this model.
    """
    target = Path(directory).resolve()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"got {target}, which is a file; need a directory to write")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(f"got {target}, which is not empty; need an empty place, or overwrite=True")
    tensors = _checked_state(config, state)
    files = _small_files(replace(config, dtype=_common_dtype(tensors)), generation, text_files or {})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            staged = Path(scratch) / "new"
            staged.mkdir()
            write_tensors(staged, {file_name(name): tensor for name, tensor in tensors.items()}, max_shard_bytes)
            for name, data in files.items():
                write_bytes(staged / name, data)
            sync_directory(staged)
            _swap(staged, target, Path(scratch) / "old")
    except OSError as problem:
        raise CheckpointError(f"got {problem} when saving to {target}; need a writable place") from problem
    return target


def _checked_state(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to write, in the model's order: the config's parameters, a tied head once."""
    shapes = config.parameter_shapes()
    extra = set(state) - set(shapes)
    if HEAD in extra and config.tie_word_embeddings and EMBEDDING in state:
        if not torch.equal(state[HEAD], state[EMBEDDING]):
            raise CheckpointError(f"got {HEAD} that differs from {EMBEDDING}, which the config ties; need them equal")
        extra.remove(HEAD)
    problems = [f"{name} missing" for name in shapes if name not in state]
    problems += [f"{name} unexpected" for name in sorted(extra)]
    problems += [
        f"{name} of shape {list(state[name].shape)}, need {list(shape)}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if problems:
        raise CheckpointError(f"got a state with {'; '.join(problems)}; need exactly the config's parameters")
    return {name: state[name] for name in shapes}


def _common_dtype(tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401  a DtypeName, checked here
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"got a state of {name}; need {', '.join(DTYPE_BYTES)}")
    return name


def _small_files(
    config: ModelConfig, generation: GenerationDefaults | None, text_files: Mapping[str, bytes]
) -> dict[str, bytes]:
    if generation is None:
        generation = GenerationDefaults(
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            pad_token_id=config.pad_token_id,
        )
    written = {CONFIG_FILE: to_hf_config(config), GENERATION_FILE: to_generation_config(generation)}
    for name in text_files:
        if name in (*written, "", "..") or Path(name).name != name or ".safetensors" in name:
            raise CheckpointError(f"got text file name {name!r}; need a plain name that a checkpoint does not use")
    files = {name: json.dumps(value, indent=2).encode() + b"\n" for name, value in written.items()}
    return files | dict(text_files)


def _swap(staged: Path, target: Path, old: Path) -> None:
    """Put ``staged`` in ``target``'s place; what was there goes to ``old``, and comes back if that fails."""
    if target.exists():
        target.rename(old)
    try:
        staged.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Force a directory's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
