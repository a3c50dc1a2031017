"""Packed shards as rows of a fixed length, in an order that is a function of seed and position alone.

A row is a run of the token stream; a document that a row's end cuts goes on in the next one as a document of its own.
Nothing is kept between steps: what rank r trains on at step s follows from (seed, s, r), so that resuming is
arithmetic. Rows are laid end to end; documents never see each other, and their positions start at 0.

Axes:    N = tokens of a batch (rows times their length), E = documents + 1, padded with N up to a fixed count
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from microllm.errors import DataError
from microllm.io.json_files import read_json_object
from microllm.ops.cross_entropy import IGNORE
from microllm.training.pack import FORMAT_VERSION, INDEX_FILE, MASKED, START

MAX_INDEX_BYTES = 64 << 20
_ID = MASKED - 1


class Rows(NamedTuple):
    """A batch: documents laid end to end; each token's target, the weight of its loss, its place in its document."""

    token_ids_N: Tensor
    targets_N: Tensor
    positions_N: Tensor
    starts_E: Tensor
    weights_N: Tensor
    max_length: int

    def to(self, device: torch.device) -> Rows:
        """Return the batch on ``device``."""
        moved = (t.to(device, non_blocking=True) for t in self[:-1])
        return Rows(*moved, self.max_length)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Index:
    """What ``index.json`` says, checked against the files beside it."""

    directory: Path
    content: dict[str, Any]
    digest: str

    @property
    def vocab_size(self) -> int:
        """Return how many ids the tokenizer knows."""
        return self.content["vocab_size"]

    def text_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files, for the checkpoints."""
        names = ("tokenizer.json", "tokenizer_config.json")
        return {name: (self.directory / name).read_bytes() for name in names}


def open_index(directory: Path) -> Index:
    """Read the index and verify every file that it lists, by size and sha256.

    Raises:
        DataError: there is no index, it is of a newer format, or a file is missing or not as listed.
    """
    content = read_json_object(directory / INDEX_FILE, MAX_INDEX_BYTES, DataError)
    if content.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"got {directory} packed in format {content.get('format_version')!r}; need {FORMAT_VERSION}; pack it again"
        )
    try:
        listed = [
            (s["file"], s["num_tokens"] * 4, s["sha256"]) for shards in content["splits"].values() for s in shards
        ]
        listed.append(("tokenizer.json", None, content["tokenizer_sha256"]))
        for name, size, sha256 in listed:
            path = directory / Path(name).name
            digest = hashlib.sha256(path.read_bytes() if size is None else np.memmap(path, np.uint8, "r").data)
            if size not in (None, path.stat().st_size) or digest.hexdigest() != sha256:
                raise DataError(f"got {path}, which is not as {INDEX_FILE} lists it; pack the data again")
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"got {directory} with a damaged or missing part ({error}); pack the data again") from error
    identity = {"tokenizer": content["tokenizer_sha256"], "files": [entry[2] for entry in listed]}
    return Index(directory, content, hashlib.sha256(repr(identity).encode()).hexdigest())


class Dataset:
    """One split as rows of ``row_tokens``; ``whole`` begins a row early rather than cut a document that fits in one."""

    def __init__(self, index: Index, split: str, row_tokens: int, *, whole: bool = False) -> None:
        shards = index.content["splits"][split]
        self._maps = [np.memmap(index.directory / s["file"], "<u4", "r") for s in shards]
        self._ends = np.cumsum([len(part) for part in self._maps], dtype=np.int64)
        self.row_tokens, self.num_tokens = row_tokens, int(self._ends[-1]) if shards else 0
        starts = [
            np.flatnonzero(part & START) + end - len(part) for part, end in zip(self._maps, self._ends, strict=True)
        ]
        documents = np.concatenate([*starts, np.array([self.num_tokens])]).astype(np.int64)
        self._bounds = _bounds(documents, self.num_tokens, row_tokens, whole)
        inside = np.diff(np.searchsorted(documents[:-1], self._bounds)) if self.num_rows else np.zeros(1)
        self.max_documents = int(inside.max()) + 2  # one that goes on from the row before, and the padding

    @property
    def num_rows(self) -> int:
        """Return the rows of one epoch."""
        return len(self._bounds) - 1

    def rows_of_step(self, step: int, batch_rows: int, seed: int) -> list[int]:
        """Return the rows that all ranks together take at ``step`` (from 0)."""
        places = range(step * batch_rows, (step + 1) * batch_rows)
        return [int(_order(seed, place // self.num_rows, self.num_rows)[place % self.num_rows]) for place in places]

    def length(self, row: int) -> int:
        """Return the tokens of a row, its padding not counted."""
        return int(self._bounds[row + 1] - self._bounds[row])

    def batch(self, rows: list[int], num_rows: int) -> Rows:
        """Return the rows laid end to end, filled up to ``num_rows`` with tokens that no loss counts."""
        length = self.row_tokens
        raw = np.full((num_rows, length + 1), MASKED, dtype=np.uint32)
        for at, row in enumerate(rows):
            start, stop = int(self._bounds[row]), int(self._bounds[row + 1])
            tokens = self._read(start, min(stop + 1, self.num_tokens))  # one more: the last token's target
            raw[at, : len(tokens)] = tokens
            if len(tokens) <= length:
                raw[at, stop - start :] = MASKED
                raw[at, stop - start] |= START  # the padding is a document of its own
        begins = raw & START != 0
        ids = (raw & _ID).astype(np.int64)
        targets = np.where(begins[:, 1:] | (raw[:, 1:] & MASKED != 0), IGNORE, ids[:, 1:])
        begins[:, 0] = True
        at = np.arange(num_rows * length)
        starts = np.flatnonzero(begins[:, :-1])
        positions = at - np.repeat(starts, np.diff(starts, append=len(at)))
        padded = np.full(num_rows * self.max_documents + 1, len(at), dtype=np.int32)
        padded[: len(starts)] = starts
        weights = (targets != IGNORE).astype(np.float32)
        arrays = (ids[:, :-1].ravel(), targets.ravel(), positions, padded, weights.ravel())
        tokens, goals, places, borders, counts = (torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)
        return Rows(tokens, goals, places, borders, counts, length)

    def _read(self, start: int, stop: int) -> np.ndarray:
        pieces = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first = int(self._ends[shard]) - len(self._maps[shard])
            pieces.append(self._maps[shard][start - first : stop - first])
            start, shard = int(self._ends[shard]), shard + 1
        return np.concatenate(pieces)


def _bounds(documents: np.ndarray, num_tokens: int, row_tokens: int, whole: bool) -> np.ndarray:  # noqa: FBT001
    """Return where each row begins, and the end of the last."""
    if not whole:
        return np.append(np.arange(0, num_tokens, row_tokens, dtype=np.int64), num_tokens)
    bounds = [0]
    while bounds[-1] < num_tokens:
        start = bounds[-1]
        end = int(documents[np.searchsorted(documents, start + row_tokens, side="right") - 1])
        bounds.append(end if end > start else start + row_tokens)
    return np.array(bounds, dtype=np.int64)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Return the order of one epoch's rows: of a generator whose raw stream is fixed for all versions of numpy."""
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(num_rows), kind="stable")
