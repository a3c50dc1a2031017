"""Low-rank adapters, in the file format of PEFT.

Place: the network adds their output to a matrix's; the trainer trains them alone. A product of two small matrices: the
second begins as zero, so that training starts at the model as it was.

Axes:    R = rank, I = in, O = out
Source:  arXiv:2106.09685; PEFT's adapter_config.json and adapter_model.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from microllm.errors import CheckpointError
from microllm.io.json_files import read_json_object
from microllm.io.safetensors_files import SafetensorsSource, write_bytes, write_tensors
from microllm.model import Transformer
from microllm.training.config import LoraConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PARTS = {name: "self_attn" if name[0] in "qkvo" else "mlp" for name in (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)}  # fmt: skip


class Adapter(nn.Module):
    """scale * B(A x), beside a frozen matrix."""

    def __init__(self, weight: Tensor, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        num_out, num_in = weight.shape
        a_RI = torch.randn(config.lora_rank, num_in, generator=generator) * num_in**-0.5
        self.a_RI = nn.Parameter(a_RI.to(weight.device))
        self.b_OR = nn.Parameter(torch.zeros(num_out, config.lora_rank, device=weight.device))
        self.scale = config.lora_alpha / config.lora_rank


def make_adapters(model: Transformer, config: LoraConfig, seed: int) -> dict[int, dict[str, Adapter]]:
    """Freeze the model and return new adapters, by layer and matrix."""
    model.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    return {
        i: {
            name: Adapter(block.get_parameter(f"{_PARTS[name]}.{name}.weight"), config, generator)
            for name in config.lora_targets
        }
        for i, block in enumerate(model.layers)
    }  # fmt: skip


def peft_names(adapters: Mapping[int, Mapping[str, Adapter]]) -> dict[str, nn.Parameter]:
    """Return every adapter's parameters by the names that PEFT's files have."""
    found = {}
    for i, layer in adapters.items():
        for name, adapter in layer.items():
            path = f"base_model.model.model.layers.{i}.{_PARTS[name]}.{name}"
            found |= {f"{path}.lora_A.weight": adapter.a_RI, f"{path}.lora_B.weight": adapter.b_OR}
    return found


def write_adapters(directory: Path, config: LoraConfig, tensors: Mapping[str, Tensor], model_name: str) -> None:
    """Write an adapter directory that ``peft`` loads.

    Raises:
        CheckpointError: the disk refuses.
    """
    written = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model_name, "bias": "none",
        "r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": 0.0, "inference_mode": True,
        "target_modules": list(config.lora_targets), "fan_in_fan_out": False,
    }  # fmt: skip
    write_tensors(directory, tensors, 1 << 40, single_name=WEIGHTS_FILE)
    write_bytes(directory / CONFIG_FILE, json.dumps(written, indent=1).encode() + b"\n")


def merge_adapters(model: Transformer, directory: Path) -> None:
    """Add an adapter directory's products to the model's matrices, in place.

    Raises:
        CheckpointError: a tensor names no matrix of the model, or does not fit it; the model is as it was.
    """
    config = read_json_object(directory / CONFIG_FILE, 1 << 20, CheckpointError)
    source = SafetensorsSource(directory / WEIGHTS_FILE)
    parameters, products = dict(model.named_parameters()), {}
    for a_name in (name for name in source.infos if name.endswith(".lora_A.weight")):
        path = a_name.removesuffix(".lora_A.weight")
        target = parameters.get(path.removeprefix("base_model.model.model.") + ".weight")
        a_RI, b_OR = source.read(a_name), source.read(f"{path}.lora_B.weight")
        if target is None or (b_OR.shape[0], a_RI.shape[1]) != tuple(target.shape):
            raise CheckpointError(f"got adapter {path} in {directory}, which fits no matrix of the model; need its own")
        products[target] = (b_OR.float() @ a_RI.float()) * (float(config["lora_alpha"]) / int(config["r"]))
    with torch.no_grad():
        for target, product in products.items():
            target.copy_(target.float() + product.to(target.device))
