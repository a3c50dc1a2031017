"""Angles of the rotary position embedding, with llama3 and yarn scaling.

Axes:    B = batch, T = tokens, P = head dim / 2
Source:  arXiv:2104.09864; yarn: arXiv:2309.00071, equations 17-23; llama3: the rule of Llama 3.1's release
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from microllm.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Return each pair's angle a position, and the factor that cos and sin are multiplied by.

    Shapes:  -> [P] fp32, a number
    Numbers: fp32 throughout, as the models were trained
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.kind:
        case "linear":
            return frequencies / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, frequencies), 1.0
        case "yarn":
            return _yarn(rope, frequencies, head_dim, max_positions), _yarn_attention_factor(rope)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Leave short waves, divide long ones by the factor, and blend linearly between."""
    assert rope.original_context is not None
    turns = rope.original_context * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / rope.factor)


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int, max_positions: int) -> Tensor:
    """Divide the slow pairs by the factor, leave the fast ones, ramp between."""
    context = rope.original_context or max_positions

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


class Rotary(torch.nn.Module):
    """Turns positions into the cos and sin that ``ops.rope`` takes."""

    inv_freq_P: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device | None) -> None:
        super().__init__()
        inv_freq_P, self.attention_factor = inverse_frequencies(rope, head_dim, max_positions)
        self.register_buffer("inv_freq_P", inv_freq_P.to(device), persistent=False)

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, T, P] fp32, times the attention factor."""
        angles_BTP = positions_BT[..., None].float() * self.inv_freq_P
        return angles_BTP.cos() * self.attention_factor, angles_BTP.sin() * self.attention_factor
