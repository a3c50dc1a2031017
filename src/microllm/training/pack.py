"""Text and conversations to token shards that are read without parsing: ``microllm data pack``.

A shard is a plain array of uint32: a token's id, and two flags in its highest bits, so that documents and masked
prompts need no second file. ``index.json`` is written last: a directory with one is whole. Shards end at a document's
end. A document is read, encoded and written before the next one is looked at.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np

from microllm.errors import DataError
from microllm.evidence.journal import write_atomic
from microllm.io.paths import expanded, open_plain
from microllm.io.resolve import ModelSource, resolve_model
from microllm.io.tokenizer import Tokenizer, load_tokenizer

START, MASKED = 1 << 31, 1 << 30
"""Flags of a token: it begins a document; it is no target (a prompt's)."""
INDEX_FILE, FORMAT_VERSION = "index.json", 1
SPLITS = ("train", "validation")
Documents = Literal["file", "paragraph", "line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackConfig:
    """What to pack, and how.

    Args:
        input: Text files, or JSON lines with a key "text", or "messages" for the tokenizer's chat template.
        output: Directory to make; it must not exist, or be empty.
        tokenizer: Whose tokenizer encodes: a model's name or path, or a directory with a tokenizer.json.
        documents: What one document of a text file is: the file, a paragraph (blank lines between) or a line.
        validation_fraction: Share of the documents that is set apart, by their number and the seed alone.
        seed: Chooses which.
        shard_tokens: A shard is closed at the first document that ends past this many.
    """

    input: tuple[Path, ...]
    output: Path
    tokenizer: str = "demo"
    documents: Documents = "file"
    validation_fraction: float = 0.01
    seed: int = 0
    shard_tokens: int = 1 << 26

    def __post_init__(self) -> None:
        if not self.input or not 0 <= self.validation_fraction < 1 or self.shard_tokens < 1:
            raise DataError(
                f"got {len(self.input)} input files, validation_fraction={self.validation_fraction}, shard_tokens="
                f"{self.shard_tokens}; need at least one file, a fraction from 0 to below 1, and 1 token or more"
            )
        if self.documents not in get_args(Documents):
            raise DataError(f"got documents={self.documents!r}; need one of {', '.join(get_args(Documents))}")


@dataclass
class _Split:
    """The shards of one split as they are written."""

    name: str
    directory: Path
    shard_tokens: int
    shards: list[dict[str, Any]] = field(default_factory=list)
    _file: BinaryIO | None = None
    _digest: Any = None

    def add(self, tokens: np.ndarray) -> None:
        if self._file is None:
            name = f"{self.name}-{len(self.shards):05d}.tokens"
            self.shards.append({"file": name, "num_tokens": 0, "num_documents": 0, "num_targets": 0})
            self._file, self._digest = (self.directory / name).open("wb"), hashlib.sha256()
        data, shard = tokens.astype("<u4").tobytes(), self.shards[-1]
        self._file.write(data)
        self._digest.update(data)
        shard["num_tokens"] += len(tokens)
        shard["num_documents"] += 1
        shard["num_targets"] += int((tokens[1:] & MASKED == 0).sum())
        if shard["num_tokens"] >= self.shard_tokens:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self.shards[-1]["sha256"] = None, self._digest.hexdigest()


def pack_data(config: PackConfig) -> dict[str, Any]:
    """Encode every document, write the shards and return the index.

    Raises:
        DataError: an input cannot be read or is not what it should be, nothing is in it, or the output is not empty.
        TextError: the tokenizer refuses a text, or has no chat template for messages.
    """
    output = expanded(config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"got {output}, which exists and is not empty; need a new place; remove it, or name another")
    tokenizer = open_tokenizer(config.tokenizer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
            staged = Path(scratch) / "data"
            staged.mkdir()
            index = _write_shards(config, tokenizer, staged)
            for name, content in tokenizer.files().items():
                write_atomic(staged / name, content)
            write_atomic(staged / INDEX_FILE, json.dumps(index, indent=1) + "\n")
            if output.exists():
                output.rmdir()
            staged.rename(output)
    except OSError as error:
        raise DataError(f"got {error} when packing to {output}; need readable input and room there") from error
    return index


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a model, or of a directory that holds nothing else."""
    path = expanded(name)
    alone = (path / "tokenizer.json").is_file() and not (path / "config.json").exists()
    return load_tokenizer(ModelSource(name, path, "directory") if alone else resolve_model(name))


def _write_shards(config: PackConfig, tokenizer: Tokenizer, directory: Path) -> dict[str, Any]:
    splits = {name: _Split(name, directory, config.shard_tokens) for name in SPLITS}
    try:
        for number, tokens in enumerate(_encoded(config, tokenizer)):
            digest = hashlib.sha256(f"{config.seed}:{number}".encode()).digest()
            apart = int.from_bytes(digest[:8], "big") < config.validation_fraction * 2**64
            splits["validation" if apart else "train"].add(tokens)
    finally:
        for split in splits.values():
            split.close()
    if not splits["train"].shards:
        raise DataError("got no document to train on; need some text in the input, and a small validation_fraction")
    return {
        "format_version": FORMAT_VERSION,
        "vocab_size": tokenizer.num_tokens,
        "bos_id": tokenizer.bos_id,
        "eos_ids": sorted(tokenizer.eos_ids),
        "tokenizer_sha256": hashlib.sha256(tokenizer.files()["tokenizer.json"]).hexdigest(),
        "splits": {name: split.shards for name, split in splits.items()},
    }


def _encoded(config: PackConfig, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield each document's tokens, with their flags."""
    for path in config.input:
        for where, document in documents_of(expanded(path), config.documents):
            tokens = _chat_tokens(tokenizer, document, where) if isinstance(document, list) else (
                _text_tokens(tokenizer, document)
            )  # fmt: skip
            if len(tokens):
                tokens[0] |= START
                yield tokens


def documents_of(path: Path, documents: Documents) -> Iterator[tuple[str, str | list[Any]]]:
    """Yield where each document is, and its text or messages."""
    try:
        file = open_plain(path)
    except OSError as error:
        raise DataError(f"got no readable {path} ({error.strerror}); need that file") from error
    with file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(line, f"{path}:{number}")
        elif documents == "file":
            yield str(path), _decoded(file.read(), str(path))
        else:
            yield from _pieces(file, str(path), "" if documents == "paragraph" else None)


def _pieces(file: BinaryIO, path: str, border: str | None) -> Iterator[tuple[str, str]]:
    """Yield lines, or runs of lines between blank ones where ``border`` is "", each with its own ends."""
    piece: list[str] = []
    for number, line in enumerate(file, 1):
        text = _decoded(line, f"{path}:{number}")
        blank = not text.strip()
        if piece and (blank or border is None):
            yield path, "".join(piece)
            piece = []
        if not blank:
            piece.append(text)
    if piece:
        yield path, "".join(piece)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"got {where} that is not UTF-8 ({error}); need UTF-8 text; convert it") from error


def _parsed(line: bytes, where: str) -> str | list[Any]:
    try:
        record = json.loads(_decoded(line, where))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, DataError) else DataError(f"got {where}: {error}; need JSON") from error
    found = record.get("messages", record.get("text")) if isinstance(record, dict) else None
    if not isinstance(found, str | list):
        raise DataError(f'got {where} without a "text" that is a string or "messages" that are a list; need one')
    return found


def _text_tokens(tokenizer: Tokenizer, text: str) -> np.ndarray:
    ids = tokenizer.encode(text, parse_special=False)
    if ids and tokenizer.eos_ids and ids[-1] not in tokenizer.eos_ids:
        ids.append(min(tokenizer.eos_ids))
    return np.array(ids, dtype=np.uint32)


def _chat_tokens(tokenizer: Tokenizer, messages: list[Any], where: str) -> np.ndarray:
    """Return a conversation's tokens, all masked but those that the assistant says."""
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages) or not messages:
        raise DataError(f"got {where} with messages that are no list of objects with a role; need that")
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    tokens = np.array(whole, dtype=np.uint32) | MASKED
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.encode_chat(messages[:i], add_generation_prompt=True) if i else []
            answered = tokenizer.encode_chat(messages[: i + 1], add_generation_prompt=False)
            if whole[: len(prompt)] != prompt or whole[: len(answered)] != answered:
                raise DataError(
                    f"got {where}, whose turn {i} the chat template writes otherwise once more turns follow; "
                    "need turns that stay as they were; keep one answer a conversation"
                )
            tokens[len(prompt) : len(answered)] &= ~np.uint32(MASKED)
    return tokens
