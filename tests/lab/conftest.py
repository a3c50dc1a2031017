"""Models for the tests of whole models: tiny ones with random weights, tiny ones that were trained, the demo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import transformers

from microllm.errors import UnavailableError
from microllm.io.resolve import resolve_model
from microllm.lab.hf_twin import load_twin

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
RANDOM = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, head_dim=8),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
}


def unavailable(reason: str) -> NoReturn:
    """Skip for want of data, except in CI, where the data is part of the promise."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family to the directory of its tiny random model, as transformers saves it."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(RANDOM[family]()).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
            made[family] = tmp_path_factory.mktemp("random") / family
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def trained_model() -> Callable[[str], Path]:
    """Return a function from "tiny-qwen2" or "tiny-qwen3" to its directory; the first call may train for a minute."""
    import fetch_test_data
    import tiny_models

    def make(name: str) -> Path:
        try:
            return tiny_models.build(name)
        except fetch_test_data.FetchError as error:
            unavailable(str(error))

    return make


@pytest.fixture(scope="session")
def demo_twin() -> torch.nn.Module:
    """Return the demo as transformers reads it from the GGUF file: fifteen seconds, so once."""
    try:
        return load_twin(resolve_model("demo"))
    except UnavailableError as error:
        unavailable(str(error))
