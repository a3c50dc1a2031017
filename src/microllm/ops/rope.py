"""Rotary position embedding, split-half layout: (a, b) -> (a cos - b sin, b cos + a sin), b half a head away.

Axes:    B = batch, T = tokens, H = query heads, G = KV heads, D = head dim, P = D / 2 pairs
Source:  arXiv:2104.09864; the layout is Hugging Face's
"""

from __future__ import annotations

import torch
from torch import Tensor

from microllm.ops.contract import (
    Arg,
    Contract,
    Draw,
    Refusal,
    Sizes,
    Tolerance,
    changed,
    normal,
    require,
    require_float,
)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs of every head of q and k by their position's angles.

    Shapes:  q [B, T, H, D], k [B, T, G, D], cos and sin [B, T, P] fp32, P = D / 2 -> like q, like k
    Numbers: computed in fp32, rounded once
    Raises:
        OperatorError: head dims differ or are odd, cos or sin is not fp32 [B, T, D / 2].
    """
    require_float("rope", q, k)
    require(
        q.dim() == k.dim() == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] and q.shape[3] % 2 == 0,
        "rope", f"q {tuple(q.shape)}, k {tuple(k.shape)}", "q (B, T, H, D), k (B, T, G, D), D even",
    )  # fmt: skip
    need = (*q.shape[:2], q.shape[3] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        require(
            table.dtype == torch.float32 and table.shape == need and table.device == q.device,
            "rope", f"{name} {tuple(table.shape)} of {table.dtype}", f"fp32 {need} on {q.device}",
        )  # fmt: skip
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _oracle(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(2)

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    return rotate(q), rotate(k)


def _angle(function: str) -> Draw:
    def draw(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        angles = torch.arange(shape[1])[None, :, None] * torch.logspace(0, -4, shape[2])[None, None, :]
        return getattr(torch, function)(angles.expand(shape)).contiguous()

    return draw


CONTRACT = Contract(
    name="rope",
    call=rope,
    oracle=_oracle,
    args=(
        Arg("q", "BTHD", normal),
        Arg("k", "BTGD", normal),
        Arg("cos", "BTP", _angle("cos"), is_float=False),
        Arg("sin", "BTP", _angle("sin"), is_float=False),
    ),
    sizes=(
        {"B": 1, "T": 1, "H": 1, "G": 1, "D": 2, "P": 1},
        {"B": 2, "T": 7, "H": 6, "G": 2, "D": 64, "P": 32},
        {"B": 1, "T": 0, "H": 2, "G": 1, "D": 4, "P": 2},
    ),
    refusals=(
        Refusal("an odd head dim", changed(q=torch.zeros(1, 1, 1, 3), k=torch.zeros(1, 1, 1, 3))),
        Refusal("head dims that differ", changed(k=torch.zeros(1, 1, 1, 6))),
        Refusal("angles of another length", changed(cos=torch.zeros(1, 99, 1))),
        Refusal("angles in bf16", changed(cos=lambda c: c["cos"].bfloat16())),
    ),
    forward={
        torch.float32: Tolerance(2e-5, 2e-5),
        torch.bfloat16: Tolerance(1e-5, 8e-3),
        torch.float16: Tolerance(1e-5, 1e-3),
    },
    backward={torch.float32: Tolerance(3e-5, 3e-5)},
    num_bytes=lambda s, item: 2 * s["B"] * s["T"] * (s["H"] + s["G"]) * s["D"] * item + 8 * s["B"] * s["T"] * s["P"],
    num_flops=lambda s: 3 * s["B"] * s["T"] * (s["H"] + s["G"]) * s["D"],
)
