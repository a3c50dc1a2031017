"""Hugging Face ``config.json`` and ``generation_config.json`` to and from this project's own objects."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from microllm.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults that a model's author published; ``None`` means that the file says nothing."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None


def parse_hf_config(
    raw: dict[str, Any],
    *,
    tensor_names: Collection[str] = (),
    generation: GenerationDefaults | None = None,
) -> ModelConfig:
    """Return the model that a raw ``config.json`` describes, or refuse it by the field's name."""
    raise NotImplementedError


def parse_generation_config(raw: dict[str, Any]) -> GenerationDefaults:
    """Return the sampling defaults that a raw ``generation_config.json`` holds."""
    raise NotImplementedError


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` (new layout) from which ``transformers`` builds the same model."""
    raise NotImplementedError
