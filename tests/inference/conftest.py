"""A tiny model with a real tokenizer over bytes, so that every path runs in milliseconds."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, models

from microllm.config import ModelConfig
from microllm.inference import LLM, load
from microllm.io.tokenizer import Tokenizer
from microllm.io.tokenizer_parts import TokenizerParts, byte_level_bpe, surround
from microllm.model import Transformer

BOS, EOS = 0, 1
NUM_TOKENS = 4 + 256 + 2
VOCAB = 280  # the last 18 rows are padding
CONTEXT = 96
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; "th" and "the" are two more, so that texts have borders inside words."""
    letters = [*"!\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~"]
    others = [chr(c) for c in [*range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x100 + 68)]]
    names = ["<s>", "</s>", "<user>", "<assistant>", *letters, *others, "th", "the"]
    assert len(names) == NUM_TOKENS
    bpe = models.BPE({name: i for i, name in enumerate(names)}, [("t", "h"), ("th", "e")])
    backend = byte_level_bpe(bpe, "gpt-2")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:4]])
    surround(backend, bos="<s>", eos=None)
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        TokenizerParts(backend=backend, roles=roles, eos_ids=frozenset({EOS}), templates={"default": TEMPLATE})
    )


def tiny_model(seed: int = 0) -> Transformer:
    """Weights of this size give peaked, varied logits: no near ties at temperature 0."""
    config = ModelConfig(
        family="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=CONTEXT, bos_token_id=BOS,
    )  # fmt: skip
    return Transformer(config).initialise(seed, std=0.3).eval()


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(tiny_model(), byte_tokenizer(), name="tiny")


@pytest.fixture
def spoiled() -> LLM:
    """The tiny model with NaN in the embedding of "!": whoever reads that token gets no finite logits."""
    model, tokenizer = tiny_model(), byte_tokenizer()
    with torch.no_grad():
        model.embed_tokens.weight[tokenizer.encode("!")[-1]] = torch.nan
    return LLM(model, tokenizer)


@pytest.fixture(scope="session")
def demo() -> LLM:
    return load("demo", device="cpu", precision="fp32")


@pytest.fixture
def prompts() -> list[str]:
    return ["the cat", "x", "Once upon a time there were three bears", "", "Grüße, 世界 🙂", "the the the"]
