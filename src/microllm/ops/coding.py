"""From floats to codes: the scales and minima of a matrix, and its codes against them.

Place: an engine's quantised weights and structures' formats. Codes are made against scales already rounded to what is
stored, so that a rounded scale shifts no weight.

    int8    one scale a row, or a group of columns
    int4    scale and minimum a group, the best of some shrunken ranges by squared error
    fp8     e4m3 with a scale a row

Axes:    K = in, N = out, U = groups a row
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.quantise import quantise_fp8, quantise_int8

LARGEST_FP8 = 448.0
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def int8_parts(w_NK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes [N, K] and scales [N, U] in w's dtype."""
    amax = w_NK.float().unflatten(1, (-1, group)).abs().amax(2)
    scale = _stored_up(amax / 127, w_NK.dtype)
    return quantise_int8(w_NK.contiguous(), scale), scale


def fp8_parts(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes [N, K] and a scale a row [N, 1] in w's dtype."""
    scale = _stored_up(w_NK.float().abs().amax(1, keepdim=True) / LARGEST_FP8, w_NK.dtype)
    return quantise_fp8(w_NK.contiguous(), scale), scale


def int4_ranges(w_NK: Tensor, group: int, importance_K: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scale and minimum a group with the least squared error among some shrunken ranges."""
    groups = w_NK.float().unflatten(1, (-1, group))
    weight = 1.0 if importance_K is None else importance_K.float().view(1, -1, group)
    low, high = groups.amin(2), groups.amax(2)
    middle, best = (low + high) / 2, torch.full_like(low, torch.inf)
    scale, minimum = torch.full_like(low, torch.nan), torch.full_like(low, torch.nan)  # what NaN weights leave
    for shrink in _SHRINKS:
        step = _stored_up((high - low) * shrink / 15, w_NK.dtype).float()
        start = (middle - (high - low) * shrink / 2).to(w_NK.dtype).float()
        codes = ((groups - start[..., None]) / step[..., None]).round().clamp(0, 15)
        error = ((codes * step[..., None] + start[..., None] - groups).square() * weight).sum(2)
        better = error < best
        scale, minimum = torch.where(better, step, scale), torch.where(better, start, minimum)
        best = torch.where(better, error, best)
    return scale.to(w_NK.dtype), minimum.to(w_NK.dtype)


def _stored_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in the dtype that stores them, never rounded to less, never 0."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # the smallest number there is: of fp16 6e-8
    stored = scale.clamp(min=max(1e-8, least)).to(dtype)
    up = stored.float() + (stored.float() * info.eps).clamp(min=least)
    return torch.where(stored.float() < scale, up.to(dtype), stored)
