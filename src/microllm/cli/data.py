"""``microllm data``: text to what training reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from microllm.training.pack import PackConfig


@dataclass(frozen=True, kw_only=True)
class DataPack:
    """Encode text or conversations into token shards, split into train and validation by document."""

    config: PackConfig
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the whole index as JSON."""

    def run(self) -> int:
        """Print what was packed."""
        from microllm.training.pack import pack_data

        index = pack_data(self.config)
        if self.as_json:
            print(json.dumps(index))
            return 0
        for split, shards in index["splits"].items():
            tokens, documents, targets = (
                sum(shard[key] for shard in shards) for key in ("num_tokens", "num_documents", "num_targets")
            )
            print(f"{split}: {documents:,} documents, {tokens:,} tokens ({targets:,} targets), {len(shards)} shards")
        print(f"data: {self.config.output}")
        return 0


@dataclass(frozen=True, kw_only=True)
class DataTokenizer:
    """Train a byte-level BPE on text; data pack takes its directory as --tokenizer."""

    input: tuple[Path, ...]
    """Text or JSONL files."""
    output: Path
    """Directory for tokenizer.json and tokenizer_config.json."""
    vocab_size: int = 8192
    """Number of tokens, the end of a text among them."""

    def run(self) -> int:
        """Print where it lies."""
        from microllm.training.vocabulary import train_tokenizer

        print(f"tokenizer: {train_tokenizer(self.input, self.vocab_size, self.output)}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prepare text for training: train a tokenizer, pack token shards."""

    action: (
        Annotated[DataPack, tyro.conf.subcommand("pack")] | Annotated[DataTokenizer, tyro.conf.subcommand("tokenizer")]
    )

    def run(self) -> int:
        """Run the chosen action."""
        return self.action.run()
