"""The reference of qkv_pack: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional


def reference(
    inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the three projections."""
    x = inputs["x"]
    return {part: functional.linear(x, weights[f"w_{part}"], weights.get(f"b_{part}")) for part in ("q", "k", "v")}
