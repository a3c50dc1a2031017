"""A byte-level BPE of one's own text: ``microllm data tokenizer``, and what ``train`` does for a preset and plain text.

Source:  the tokenizers library's trainer
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from microllm.errors import DataError
from microllm.evidence.journal import write_atomic
from microllm.io.paths import expanded
from microllm.training.pack import documents_of

END = "<|endoftext|>"


def train_tokenizer(files: Sequence[Path], vocab_size: int, directory: Path) -> Path:
    """Train on the texts of ``files`` and write a directory that a tokenizer is loaded from; return it.

    Raises:
        DataError: a file cannot be read, or the vocabulary is smaller than the bytes that it must hold.
    """
    if vocab_size < 257:
        raise DataError(f"got vocab_size={vocab_size}; need at least 257: every byte, and the end of a text")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_lines(files), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    directory = expanded(directory)
    try:
        write_atomic(directory / "tokenizer.json", tokenizer.to_str())
        write_atomic(directory / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"got {error} when writing to {directory}; need room and the right to write there") from error
    return directory


def _lines(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        for _, document in documents_of(expanded(path), "line"):
            texts = [document] if isinstance(document, str) else [str(m.get("content", "")) for m in document]
            yield from texts
