"""The reference of qkv_rope: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [B, T, H, K] whose pairs, half a head apart, are turned by their position's angles [B, T, P]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def reference(
    inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Add the biases that are given, and turn."""
    turned = {}
    for part in ("q", "k"):
        heads, bias = inputs[part], weights.get(f"b_{part}")
        heads = heads if bias is None else heads + bias.view(heads.shape[2:])
        turned[f"{part}_after_rope"] = rotated(heads, inputs["cos"], inputs["sin"])
    return turned
