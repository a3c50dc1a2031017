"""Safetensors files, single or sharded: every header is checked before the first payload byte is used.

Place: under ``checkpoint``. The payload is read by the ``safetensors`` library (memory-mapped, one tensor at
a time, so that the resident set never holds more than one). Does not know a model's tensor names.
Source: the safetensors format description (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from microllm.errors import CheckpointError
from microllm.io.json_files import parse_json_object, read_json_object
from microllm.io.paths import open_plain
from microllm.io.tensor_source import TensorInfo

MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 100_000_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_COMPARE_BYTES = 1 << 20
_MAX_DIMENSIONS = 64  # no model comes near; their product stays a number that can be printed

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "BOOL": ("bool", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
}  # fmt: skip
"""Stored dtype -> torch's name and bytes an element; anything else is refused by name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checked header entry: where the tensor's bytes lie in its file."""

    info: TensorInfo
    path: Path
    offset: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one safetensors file in payload order, its whole header checked.

    Raises:
        CheckpointError: header length, JSON, dtype, shape or offsets are not those of a sound file.
    """
    try:
        size = path.stat().st_size
        with open_plain(path) as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"got header length {length} in {path} of {size} bytes; need 1 to "
                    f"{MAX_HEADER_BYTES} bytes that lie in the file; fetch the file again"
                )
            data = file.read(length)
    except OSError as problem:
        raise CheckpointError(f"got no readable {path} ({problem.strerror}); need that file") from problem
    header = parse_json_object(data, f"the header of {path}", CheckpointError)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"got __metadata__ {metadata!r:.80} in {path}; need an object of strings")
    if not header:
        raise CheckpointError(f"got no tensors in {path}; need at least one")
    start = 8 + length
    stored = [_checked_entry(name, entry, path, start) for name, entry in header.items()]
    stored.sort(key=lambda tensor: (tensor.offset, tensor.info.num_bytes))
    _check_layout(stored, path, start, size)
    return {tensor.info.name: tensor for tensor in stored}


def _checked_entry(name: str, entry: object, path: Path, start: int) -> StoredTensor:
    where = f"tensor {name!r} of {path}"
    if not name or not name.isprintable():
        raise CheckpointError(f"got {where}; need a printable name that is not empty")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"got {entry!r:.120} for {where}; need dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"got dtype {dtype!r:.40} for {where}; need one of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"got shape {shape!r:.80} for {where}; need a list of at most {_MAX_DIMENSIONS} whole numbers from 0"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"got data_offsets {offsets!r:.80} for {where}; need [begin, end], begin <= end")
    torch_name, itemsize = DTYPES[dtype]
    num_bytes = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise CheckpointError(
            f"got data_offsets {offsets} ({offsets[1] - offsets[0]} bytes) for {where}; "
            f"need {num_bytes} bytes for {dtype} {shape}"
        )
    return StoredTensor(TensorInfo(name, torch_name, tuple(shape), num_bytes), path, start + offsets[0])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_layout(stored: list[StoredTensor], path: Path, start: int, size: int) -> None:
    cursor = start
    for tensor in stored:
        if tensor.offset != cursor:
            problem = "overlaps the tensor before it" if tensor.offset < cursor else "leaves a gap before it"
            raise CheckpointError(
                f"got tensor {tensor.info.name!r} of {path} that {problem} (byte {tensor.offset - start}, "
                f"need {cursor - start}); fetch or write the file again"
            )
        cursor += tensor.info.num_bytes
    if cursor != size:
        state = "truncated" if cursor > size else "longer than its header says"
        raise CheckpointError(f"got {path} {state}: {size} bytes, need {cursor}; fetch the file again")


class SafetensorsSource:
    """The tensors of a safetensors file, or of a directory with one file or with shards and an index.

    Raises:
        CheckpointError: a file is missing or unsound, or the index and the shards disagree.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        if not path.is_dir():
            self._stored = read_header(path)
        elif (path / SINGLE_FILE).exists():
            self._stored = read_header(path / SINGLE_FILE)
        elif (path / INDEX_FILE).exists():
            self._stored = _read_shards(path)
        else:
            self._stored = read_header(_only_file(path))
        self._infos = {name: tensor.info for name, tensor in self._stored.items()}

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every stored tensor by name, in payload order, shard by shard."""
        return self._infos

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU in its stored dtype.

        Numbers: the bytes as stored; the tensor is a private view of the mapped file, freed with it
        Raises:
            CheckpointError: no tensor of that name, or the file changed under us.
        """
        stored = self._find(name)
        try:
            with safe_open(stored.path, framework="pt", device="cpu") as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as problem:
            raise CheckpointError(f"got {problem} when reading {name!r} of {stored.path}; fetch it again") from problem
        if tuple(tensor.shape) != stored.info.shape:
            raise CheckpointError(f"got {stored.path} changed while it was read; load it again")
        return tensor

    def same_bytes(self, first: str, second: str) -> bool:
        """Return whether two stored tensors are equal in dtype, shape and every byte (1 MiB at a time)."""
        a, b = self._find(first), self._find(second)
        if (a.info.dtype, a.info.shape) != (b.info.dtype, b.info.shape):
            return False
        with a.path.open("rb") as file_a, b.path.open("rb") as file_b:
            file_a.seek(a.offset)
            file_b.seek(b.offset)
            for position in range(0, a.info.num_bytes, _COMPARE_BYTES):
                count = min(_COMPARE_BYTES, a.info.num_bytes - position)
                if file_a.read(count) != file_b.read(count):
                    return False
        return True

    def _find(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(f"got no tensor {name!r}; need one of the {len(self._stored)} stored names")
        return self._stored[name]


def _only_file(directory: Path) -> Path:
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    listing = ", ".join(path.name for path in found) or "no .safetensors file"
    pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
    hint = "; pickled weights are not read: convert them to safetensors" if pickled and not found else ""
    raise CheckpointError(f"got {listing} in {directory}; need {SINGLE_FILE} or {INDEX_FILE}{hint}")


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    weight_map = _read_index(directory / INDEX_FILE)
    stored: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        path = directory / shard
        if not path.exists():
            raise CheckpointError(f"got no shard {shard!r} in {directory}; {INDEX_FILE} needs it; fetch it")
        for name, tensor in read_header(path).items():
            if name in stored:
                raise CheckpointError(f"got tensor {name!r} in {stored[name].path} and in {path}; need it once")
            stored[name] = tensor
    absent = sorted(set(weight_map) - set(stored))
    extra = sorted(set(stored) - set(weight_map))
    moved = sorted(name for name in set(stored) & set(weight_map) if stored[name].path != directory / weight_map[name])
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("indexed but in no shard", absent),
            ("in a shard but not indexed", extra),
            ("in another shard than indexed", moved),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"got {directory / INDEX_FILE} at odds with its shards; {'; '.join(problems)}")
    return stored


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, MAX_INDEX_BYTES, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"got weight_map {weight_map!r:.80} in {path}; need an object of name: shard file")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_inside(shard):
            raise CheckpointError(
                f"got shard path {shard!r:.120} for {name!r} in {path}; need a relative path to a "
                ".safetensors file below the index, without '..'"
            )
    return weight_map


def _is_inside(shard: str) -> bool:
    pure = PurePosixPath(shard)
    plain = "\\" not in shard and ":" not in shard and shard.isprintable()
    return plain and pure.suffix == ".safetensors" and not pure.is_absolute() and ".." not in pure.parts


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Return the names of each shard, filled in order; a tensor above the limit gets a shard of its own."""
    if max_shard_bytes <= 0:
        raise CheckpointError(f"got max_shard_bytes={max_shard_bytes}; need a whole number above 0")
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_tensors(
    directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int, *, single_name: str = SINGLE_FILE
) -> None:
    """Write ``tensors`` into ``directory``: one file, or shards with an index when one would be too big.

    Numbers: dtypes and bits as given; one shard at a time is copied to the CPU
    Raises:
        CheckpointError: the disk is full, or another write error; the text carries the system's.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = single_name if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file_name))
        contents = {name: tensors[name].detach().cpu().contiguous() for name in names}
        _write_file(directory / file_name, contents)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_bytes(directory / INDEX_FILE, json.dumps(index, indent=2).encode())


def _write_file(path: Path, contents: dict[str, torch.Tensor]) -> None:
    try:
        save_file(contents, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library leaves the file to its owner alone
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (SafetensorError, OSError) as problem:
        raise _cannot_write(path, problem) from problem


def write_bytes(path: Path, data: bytes) -> None:
    """Write one small file and force it to the disk.

    Raises:
        CheckpointError: the disk is full, or another write error; the text carries the system's.
    """
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise _cannot_write(path, problem) from problem


def _cannot_write(path: Path, problem: Exception) -> CheckpointError:
    return CheckpointError(f"got {problem} when writing {path.name}; need room and the right to write there")
