"""A host of ``transformers`` without trained weights, from a configuration: what adopted weights are put into.

Place: ``adopt`` fills it. Needs the extra [hf]; never runs code that a model's directory brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from microllm.errors import MissingExtraError, UnsupportedModelError


def make_skeleton(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return a causal language model of a configuration (the content of a config.json), for inference.

    Raises:
        MissingExtraError: transformers is not installed.
        UnsupportedModelError: it knows no such model.
    """
    try:
        import transformers  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise MissingExtraError("transformers", "hf", "adopting weights that are quantised already") from error
    values = {name: value for name, value in config.items() if name not in ("quantization_config", "architectures")}
    try:
        parsed = transformers.AutoConfig.for_model(**values)
        model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"got a configuration that transformers does not build: {error}") from error
    return model.eval().requires_grad_(False)
