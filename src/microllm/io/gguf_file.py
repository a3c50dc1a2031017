"""The GGUF container: header, metadata and tensor table of one file, checked against the file's real size.

Place: ``gguf`` gives what is read here its meaning. Does not read payload, and knows no model.
Every count and length is compared with the bytes that are left before anything is allocated, so that a file can
cost no more than its own size; whatever is wrong is a ``CheckpointError`` that names the place.
Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little endian
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from microllm.errors import CheckpointError
from microllm.io.gguf_dequant import FORMATS, REFUSED_TYPES, BlockFormat
from microllm.io.paths import open_plain

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DEPTH = 4
_MAX_DIMENSIONS = 4
_SHORTEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_SHORTEST_PAIR_BYTES = 8 + 4 + 1
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFEntry:
    """One row of the tensor table.

    Shapes:  ``shape`` is row-major as in torch (GGUF stores it reversed)
    Units:   ``offset`` and ``num_bytes`` in bytes, from the start of the file
    """

    name: str
    block_format: BlockFormat
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the payload. ``stamp`` (size, modification time) tells whether the file is still the same."""

    version: int
    metadata: dict[str, Any]
    entries: tuple[GGUFEntry, ...]
    stamp: tuple[int, int]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Return the header of the GGUF file at ``path``.

    Raises:
        CheckpointError: the file cannot be read, is no GGUF, is cut, or contradicts itself.
    """
    try:
        with open_plain(path) as file:
            stamp = file_stamp(file)
            if stamp[0] < 24:
                magic = file.read(4)
                reason = f"file of {stamp[0]} bytes" if MAGIC.startswith(magic) else f"magic {magic!r}"
                raise CheckpointError(f"got {reason} in {path}; need a GGUF file; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(data, path).header(stamp)
    except OSError as error:
        raise CheckpointError(f"got {error.strerror} reading {path}; need a readable GGUF file") from error


def file_stamp(file: BinaryIO) -> tuple[int, int]:
    """Return (size in bytes, modification time in ns) of an open file, which change when its content does."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def shorten(text: str) -> str:
    """Return ``text`` quoted for an error message, cut when a file made it absurdly long."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position, self.end = data, path, 0, len(data)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what} (at byte {self.position} of {self.path}); fetch or convert it again")

    def header(self, stamp: tuple[int, int]) -> GGUFHeader:
        magic = self.take(4)
        if magic != MAGIC:
            raise self.fail(f"got magic {magic!r}; need {MAGIC!r}")
        version = self.u32()
        if version not in _VERSIONS:
            swapped = int.from_bytes(_U32.pack(version), "big")
            what = f"big-endian version {swapped}" if swapped in _VERSIONS else f"version {version}"
            raise self.fail(f"got GGUF of {what}; need little-endian version 2 or 3")
        num_tensors, num_pairs = self.u64(), self.u64()
        self.check_count("metadata pairs", num_pairs, _SHORTEST_PAIR_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.string()
            if key in metadata:
                raise self.fail(f"got metadata key {shorten(key)} twice; need each once")
            metadata[key] = self.value(self.u32(), depth=0)
        self.check_count("tensors", num_tensors, _SHORTEST_TENSOR_BYTES)
        rows = [self.tensor_row() for _ in range(num_tensors)]
        return GGUFHeader(version, metadata, self.place(rows, _alignment(metadata, self)), stamp)

    def take(self, count: int) -> bytes:
        stop = self.position + count
        if stop > self.end:
            raise self.fail(f"got {self.end - self.position} bytes before the end of the file; need {count}")
        taken = self.data[self.position : stop]
        self.position = stop
        return taken

    def u32(self) -> int:
        return _U32.unpack(self.take(4))[0]

    def u64(self) -> int:
        return _U64.unpack(self.take(8))[0]

    def check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count * least_bytes > self.end - self.position:
            left = self.end - self.position
            raise self.fail(f"got a count of {count} {what}, which {left} bytes cannot hold; need a whole file")

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read strings in one tight loop: a vocabulary and its merges are 10^5 of them."""
        self.check_count("strings", count, 8)
        data, position, end, unpack = self.data, self.position, self.end, _U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                stop = start + unpack(data, position)[0]
                if stop > end:
                    raise struct.error
                texts.append(data[start:stop].decode())
                position = stop
        except struct.error:
            self.position = position
            raise self.fail("got a string that runs past the end of the file; need a whole file") from None
        except UnicodeDecodeError as error:
            self.position = position
            raise self.fail(f"got a string that is not UTF-8 ({error.reason}); need UTF-8") from None
        self.position = position
        return texts

    def value(self, kind: int, depth: int) -> Any:  # noqa: ANN401  (a metadata value is any of 13 types)
        if kind == _ARRAY:
            return self.array(depth + 1)
        if kind == _STRING:
            return self.string()
        return self.numbers(kind, 1)[0]

    def array(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise self.fail(f"got metadata arrays nested deeper than {_MAX_DEPTH}; need flatter metadata")
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            return self.strings(count)
        if kind != _ARRAY:
            return self.numbers(kind, count)
        self.check_count("arrays", count, 4 + 8)
        return [self.array(depth + 1) for _ in range(count)]

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise self.fail(f"got metadata value type {kind}; need one of 0 to 12")
        dtype = np.dtype(_NUMBERS[kind])
        self.check_count("numbers", count, dtype.itemsize)
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            if (values > 1).any():
                raise self.fail("got a truth value other than 0 and 1; need one of them")
            values = values.astype(bool)
        return values.tolist()

    def tensor_row(self) -> tuple[str, BlockFormat, tuple[int, ...], int]:
        name, num_dimensions = self.string(), self.u32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.fail(f"got tensor {shorten(name)} with {num_dimensions} dimensions; need 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self.u64() for _ in range(num_dimensions))[::-1]
        number, offset = self.u32(), self.u64()
        if number not in FORMATS:
            label = REFUSED_TYPES.get(number, "unknown")
            known = ", ".join(block_format.name for block_format in FORMATS.values())
            raise self.fail(f"got tensor {shorten(name)} of quant type {number} ({label}); need one of {known}")
        block_format = FORMATS[number]
        if 0 in shape or shape[-1] % block_format.block_size:
            raise self.fail(
                f"got tensor {shorten(name)} of shape {shape} in {block_format.name}; need sizes above 0 and "
                f"rows of whole blocks of {block_format.block_size}"
            )
        return name, block_format, shape, offset

    def place(self, rows: list[tuple[str, BlockFormat, tuple[int, ...], int]], alignment: int) -> tuple[GGUFEntry, ...]:
        """Turn offsets into places in the file; none may leave it, share bytes with another, or repeat a name."""
        start = -(-self.position // alignment) * alignment
        entries: dict[str, GGUFEntry] = {}
        for name, block_format, shape, offset in rows:
            num_bytes = math.prod(shape) // block_format.block_size * block_format.type_size
            if offset % alignment or start + offset + num_bytes > self.end:
                raise self.fail(
                    f"got tensor {shorten(name)} of {num_bytes} bytes at payload offset {offset}, in a file of "
                    f"{self.end} bytes with payload from {start}; need it inside, on a multiple of {alignment}"
                )
            if name in entries:
                raise self.fail(f"got tensor {shorten(name)} twice; need each name once")
            entries[name] = GGUFEntry(name, block_format, shape, start + offset, num_bytes)
        in_order = sorted(entries.values(), key=lambda entry: entry.offset)
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.num_bytes > after.offset:
                raise self.fail(
                    f"got tensors {shorten(before.name)} and {shorten(after.name)} over the same bytes; "
                    "need payloads apart"
                )
        return tuple(entries.values())


def _alignment(metadata: dict[str, Any], parser: _Parser) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise parser.fail(f"got general.alignment {str(alignment)[:80]!r}; need a power of two")
    return alignment
