"""The reference of decoder_block: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [B, T, H, K] whose pairs, half a head apart, are turned by their position's angles [B, T, P]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


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


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm by its formula."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def reference(
    inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the stream after the block; keys and values of its tokens are written to the cache."""
    x, eps, heads = inputs["x"], constants["eps"], (*inputs["x"].shape[:2], -1, constants["head_dim"])
    hidden = normed(x, weights["w_input_norm"], eps)
    q, k, v = (
        functional.linear(hidden, weights[f"w_{part}"], weights.get(f"b_{part}")).view(heads)
        for part in ("q", "k", "v")
    )
    if "w_q_norm" in weights:
        q, k = normed(q, weights["w_q_norm"], eps), normed(k, weights["w_k_norm"], eps)
    positions, rows = inputs["positions"], torch.arange(len(x), device=x.device)[:, None]
    cos, sin = inputs["cos"][positions], inputs["sin"][positions]
    q, k = (rotated(part, cos, sin) for part in (q, k))
    inputs["keys"][rows, positions], inputs["values"][rows, positions] = k, v
    seen = torch.arange(inputs["keys"].shape[1], device=x.device) <= positions[:, None, :, None]
    keys, values = (inputs[name].transpose(1, 2) for name in ("keys", "values"))
    context = attended(q.transpose(1, 2), keys, values, seen, constants["scale"])
    x = x + functional.linear(context.flatten(2), weights["w_o"], weights.get("b_o"))
    hidden = normed(x, weights["w_ffn_norm"], eps)
    gate, up = functional.linear(hidden, weights["w_gate"]), functional.linear(hidden, weights["w_up"])
    return {"y": x + functional.linear(functional.silu(gate) * up, weights["w_down"])}
