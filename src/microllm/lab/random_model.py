"""A model of a preset's shape with random weights and no text: for speed, where no checkpoint can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from microllm.config import preset
from microllm.inference import LLM
from microllm.model import Transformer

if TYPE_CHECKING:
    from microllm.io.tokenizer import Tokenizer


class NoText:
    """What generation asks of a tokenizer, where no text is wanted; its own text stream as well."""

    eos_ids: frozenset[int] = frozenset()

    def known_ids_mask(self, size: int) -> Tensor:
        """Return that every id is a token."""
        return torch.ones(size, dtype=torch.bool)

    def stream(self) -> NoText:
        """Return the stream, which says nothing."""
        return self

    def push(self, token_id: int) -> str:
        """Take a token."""
        return ""

    def flush(self) -> str:
        """End the text."""
        return ""


def random_llm(name: str, device: str, dtype: torch.dtype) -> LLM:
    """Return a model of a preset's shape with seeded weights."""
    model = Transformer(preset(name), dtype=dtype, device=device).initialise(seed=0).eval()
    return LLM(model.requires_grad_(False), cast("Tokenizer", NoText()), name=f"random {name}")
