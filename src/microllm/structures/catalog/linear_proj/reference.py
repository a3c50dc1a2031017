"""The reference of linear_proj: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional


def reference(
    inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return x times the transposed weight, plus bias."""
    return {"y": functional.linear(inputs["x"], weights["w"], weights.get("b"))}
