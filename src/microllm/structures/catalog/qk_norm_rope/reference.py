"""The reference of qk_norm_rope: plain torch."""

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
    """Norm and turn."""
    turned = {}
    for part in ("q", "k"):
        wide = inputs[part].float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + constants["eps"])
        heads = weights[f"w_{part}_norm"] * normed.to(inputs[part].dtype)
        turned[f"{part}_after_rope"] = rotated(heads, inputs["cos"], inputs["sin"])
    return turned
