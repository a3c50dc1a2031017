"""A model small enough to load in milliseconds, as a Hugging Face directory with a tokenizer and a chat template."""

import json

import pytest
import tokenizers

from microllm.config import preset
from microllm.io.checkpoint import save_checkpoint
from microllm.model import Transformer

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<|end|>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    text_files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}).encode(),
    }
    config = preset("tiny", max_position_embeddings=64, eos_token_ids=(0,))
    place = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(place, config, Transformer(config).initialise(seed=3).state_dict(), text_files=text_files)
    return str(place)
