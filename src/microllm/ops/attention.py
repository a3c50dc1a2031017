"""Causal grouped-query attention of queries over a key-value prefix, each query by its own position.

Axes:    B = batch, T = queries, S = key slots (slot index = position), H = query heads, G = KV heads, D = head dim
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from microllm.ops.contract import (
    Arg,
    Contract,
    Refusal,
    Sizes,
    Tolerance,
    changed,
    normal,
    require,
    require_float,
    require_unit_stride,
)


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float) -> Tensor:
    """Return softmax(scale q kT) v, a query seeing the key slots up to its own position.

    The query heads of a group are folded into rows, so that each key and value is read once a group.

    Shapes:  q [B, T, H, D], k and v [B, S, G, D], positions [B, T] int64 -> [B, T, H, D]
    Numbers: scores, softmax and sum in fp32, rounded once
    Raises:
        OperatorError: H is not a multiple of G, sizes differ, scale is not finite and above 0.
    """
    require_float("attention", q, k, v)
    B, T, H, D = q.shape if q.dim() == 4 else (-1, -1, -1, -1)
    require(
        k.dim() == 4 and k.shape == v.shape and (k.shape[0], k.shape[3]) == (B, D) and H % k.shape[2] == 0,
        "attention", f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
        "q (B, T, H, D), k and v (B, S, G, D), H a multiple of G",
    )  # fmt: skip
    require(
        positions.shape == (B, T) and positions.dtype == torch.int64, "attention",
        f"positions {tuple(positions.shape)} of {positions.dtype}", f"int64 {(B, T)}",
    )  # fmt: skip
    require(math.isfinite(scale) and scale > 0, "attention", f"scale={scale}", "a finite scale above 0")
    require_unit_stride("attention", q, k, v)
    S, G = k.shape[1:3]
    rows = q.float().view(B, T, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, H // G * T, D)
    scores = rows @ k.float().permute(0, 2, 3, 1) * scale
    hidden = torch.arange(S, device=q.device) > positions[:, :, None]
    scores = scores.view(B, G, H // G, T, S).masked_fill(hidden[:, None, None], -math.inf)
    context = scores.softmax(dim=-1).view(B, G, H // G * T, S) @ v.float().permute(0, 2, 1, 3)
    return context.view(B, G, H // G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H, D).to(q.dtype)


def _oracle(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float) -> Tensor:
    repeats = q.shape[2] // k.shape[2]
    visible = torch.arange(k.shape[1]) <= positions[:, None, :, None]
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(repeats, 2).transpose(1, 2),
        v.repeat_interleave(repeats, 2).transpose(1, 2),
        attn_mask=visible,
        scale=scale,
    ).transpose(1, 2)


def _last_positions(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.arange(sizes["S"] - sizes["T"], sizes["S"]).expand(shape).contiguous()


CONTRACT = Contract(
    name="attention",
    call=attention,
    oracle=_oracle,
    args=(
        Arg("q", "BTHD", normal),
        Arg("k", "BSGD", normal),
        Arg("v", "BSGD", normal),
        Arg("positions", "BT", _last_positions, is_float=False),
    ),
    scalars={"scale": 0.125},
    sizes=(
        {"B": 1, "T": 1, "S": 1, "H": 1, "G": 1, "D": 2},
        {"B": 2, "T": 5, "S": 5, "H": 6, "G": 2, "D": 64},
        {"B": 3, "T": 1, "S": 17, "H": 4, "G": 4, "D": 16},
        {"B": 1, "T": 4, "S": 33, "H": 9, "G": 3, "D": 64},
    ),
    refusals=(
        Refusal("heads that do not divide", changed(q=torch.zeros(2, 5, 3, 64))),
        Refusal("k and v that differ", changed(v=lambda c: c["v"][:, :, :0])),
        Refusal("positions of another length", changed(positions=torch.zeros(1, 99, dtype=torch.int64))),
        Refusal("positions in int32", changed(positions=lambda c: c["positions"].int())),
        Refusal("scale = 0", changed(scale=0.0)),
        Refusal("mixed dtypes", changed(k=lambda c: c["k"].double())),
    ),
    forward={
        torch.float32: Tolerance(3e-5, 3e-5),
        torch.bfloat16: Tolerance(8e-4, 8e-3),
        torch.float16: Tolerance(2e-4, 1e-3),
    },
    backward={torch.float32: Tolerance(3e-5, 3e-5)},
    num_bytes=lambda s, item: 2 * s["B"] * (s["T"] * s["H"] + s["S"] * s["G"]) * s["D"] * item,
    num_flops=lambda s: 4 * s["B"] * s["T"] * s["S"] * s["H"] * s["D"],
)  # fmt: skip
