"""A little packed text, and runs so small that a step takes milliseconds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from microllm.training import OptimizerConfig, PackConfig, TrainConfig, pack_data
from microllm.training.vocabulary import train_tokenizer

WORDS = "the a of and king said went house day light water stone tree river unto them was not all they".split()


def write_text(path: Path, num_paragraphs: int = 120) -> Path:
    """Write paragraphs of unlike length, the same every time."""
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 40))) for _ in range(num_paragraphs)]
    path.write_text("\n\n".join(texts) + "\n")
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def tokenizer(text, tmp_path_factory):
    return train_tokenizer([text], 300, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def packed(text, tokenizer, tmp_path_factory):
    output = tmp_path_factory.mktemp("packed") / "data"
    pack_data(PackConfig(
        input=(text,), output=output, tokenizer=str(tokenizer), documents="paragraph", validation_fraction=0.1,
        shard_tokens=700,
    ))  # fmt: skip
    return output


@pytest.fixture
def make_config(packed, tmp_path):
    """Return a function from changes to a config of a tiny run on the CPU."""

    def make(**changes: object) -> TrainConfig:
        settings = {
            "data": packed, "output": tmp_path / "run", "model": "tiny", "num_steps": 10, "row_tokens": 32,
            "batch_rows": 4, "device": "cpu", "deterministic": True, "checkpoint_every": 5,
            "optimizer": OptimizerConfig(learning_rate=3e-3),
        } | changes  # fmt: skip
        return TrainConfig(**settings)

    return make
