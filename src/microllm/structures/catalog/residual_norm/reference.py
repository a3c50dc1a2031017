"""The reference of residual_norm: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def reference(
    inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the norm, and the sum where there is a residual."""
    x = inputs["x"] if "residual" not in inputs else inputs["x"] + inputs["residual"]
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + constants["eps"])
    return {"y": weights["w"] * normed.to(x.dtype), "sum": x}
