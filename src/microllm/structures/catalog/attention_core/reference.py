"""The reference of attention_core: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return grouped attention [B, T, H, K] of q [B, H, T, K] over k and v [B, G, S, K].

    Without a mask query i sees keys 0 to i, as in a cache that was empty, and a single query sees all of them.
    """
    groups, (T, S) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    keys, values = (t.float().repeat_interleave(groups, dim=1) for t in (k, v))
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - 1 if T == 1 else 0)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=q.device).masked_fill(~mask, -torch.inf)
    scores = q.float() @ keys.transpose(-1, -2) * scale + mask.float()
    return (scores.softmax(-1) @ values).transpose(1, 2).to(q.dtype)


def reference(
    inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Attend."""
    return {"context": attended(inputs["q"], inputs["k"], inputs["v"], inputs.get("mask"), constants["scale"])}
