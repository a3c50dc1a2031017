"""The reference of decoder_ffn: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional


def reference(
    inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return down(silu(gate(x)) * up(x))."""
    x = inputs["x"]
    gate, up = functional.linear(x, weights["w_gate"]), functional.linear(x, weights["w_up"])
    return {"y": functional.linear(functional.silu(gate) * up, weights["w_down"])}
