"""Tiny hosts for structures: models of ``transformers`` with seeded weights, and what detaching must give back.

from tiny_hosts import make_host; model = make_host("qwen2")
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
FAMILIES = {
    "llama": lambda **changes: transformers.LlamaConfig(**SIZES | {"head_dim": 16} | changes),
    "qwen2": lambda **changes: transformers.Qwen2Config(**SIZES | {"tie_word_embeddings": True} | changes),
    "qwen3": lambda **changes: transformers.Qwen3Config(**SIZES | {"head_dim": 16} | changes),
}


def make_host(
    family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **changes: object
) -> Any:  # noqa: ANN401  a class of transformers
    """Return a model of a family with seeded weights, for inference."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model.to(device, dtype).requires_grad_(False)


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return everything that detaching must give back: objects, bytes, attributes."""
    return {
        "parameters": {name: (id(p), p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "modules": {name: (id(m), type(m)) for name, m in model.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
        "config": model.config.to_dict() | {"attention": model.config._attn_implementation},
    }


def assert_same_state(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Compare two states; tensors by their bytes."""
    for name in ("attributes", "modules", "hooks", "config"):
        assert now[name] == before[name]
    for name, (identity, address, values) in before["parameters"].items():
        assert now["parameters"][name][:2] == (identity, address)
        assert torch.equal(now["parameters"][name][2], values)
