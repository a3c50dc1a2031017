"""``decoder_block``: a whole block over a cache of ours, as one chain of launches.

Place: an implementation like the others of ``impls``; what the engine decodes with, over a host's own weights. Five
launches a block for one row, seven for more, since every program of a product would norm all rows again; in floats and
in codes alike.

Axes:    B = rows, T = tokens (at most 8), G = KV heads, K = head dim, P = pairs, S = slots
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from microllm import ops

if TYPE_CHECKING:
    from microllm.structures.impls import Region

PAGE_TOKENS = 16


class Pages(NamedTuple):
    """A dense cache [B, S, G, K] seen as pages: row b's lie one after the other."""

    table: Tensor
    split: int

    def of(self, cached: Tensor) -> Tensor:
        """Return a cache's pages [P, PAGE_TOKENS, G, K], a view."""
        return cached.view(-1, PAGE_TOKENS, *cached.shape[2:])


@cache
def pages_of(num_rows: int, capacity: int, device: torch.device) -> Pages:
    """Return the pages of a cache of that many rows and slots (a multiple of ``PAGE_TOKENS``)."""
    table = torch.arange(num_rows * capacity // PAGE_TOKENS, dtype=torch.int32, device=device).view(num_rows, -1)
    return Pages(table, 64 if capacity <= 1024 else 128 if capacity <= 8192 else 256)


class Block:
    """A block's weights, packed, and the chain that runs them."""

    def __init__(self, region: Region) -> None:
        w, constants = {slot: t.detach() for slot, t in region.weights.items()}, region.constants
        self._eps, self._scale = float(constants["eps"]), float(constants["scale"])
        self._head_dim = int(constants["head_dim"])
        self._sizes = tuple(w[f"w_{part}"].shape[0] for part in ("q", "k", "v"))
        self._norm, self._ffn_norm = w["w_input_norm"], w["w_ffn_norm"]
        self._q_norm, self._k_norm = w.get("w_q_norm"), w.get("w_k_norm")
        qkv = region.matrix(("w_q", "w_k", "w_v"), biases=("b_q", "b_k", "b_v"))
        o, gate_up = region.matrix(("w_o",), biases=("b_o",)), region.matrix(("w_gate", "w_up"))
        down = region.matrix(("w_down",), "act_after_mul")
        self.matrices = (qkv, o, gate_up, down)
        self._qkv, self._o, self._gate_up, self._down = (matrix.weights for matrix in self.matrices)
        self.kernel = "norm_linear, attention_step, linear_residual, norm_linear_swiglu"
        if region.format != "float":
            self.kernel = "norm_linear_codes, attention_step, linear_residual_codes, norm_linear_swiglu_codes"

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Tensor:  # fmt: skip
        """Return the stream after the block, [B, T, D]; write the tokens' keys and values into the cache.

        Shapes:  x [B, T, D], cos and sin [S, P] by position, keys and values [B, S, G, K], positions [B, T]
        """
        B, T, _ = x.shape
        qkv = self._projected(x)
        q, k, v = (part.view(B, T, -1, self._head_dim) for part in qkv.split(self._sizes, dim=-1))
        pages = pages_of(B, keys.shape[1], keys.device)
        context = ops.attention_step(
            q, k, v, cos, sin, pages.of(keys), pages.of(values), pages.table, positions, self._q_norm, self._k_norm,
            scale=self._scale, eps=self._eps, split=pages.split,
        )  # fmt: skip
        return self._finished(x, context.flatten(2))

    def _projected(self, x: Tensor) -> Tensor:
        if x.shape[:2].numel() == 1:
            return self._qkv.norm_linear(x, self._norm, eps=self._eps)
        normed = ops.rms_norm(x, self._norm, eps=self._eps)
        return self._qkv.linear(normed.flatten(0, 1)).view(*x.shape[:2], -1)

    def _finished(self, x: Tensor, context: Tensor) -> Tensor:
        x = self._o.residual(context, x)
        one = x.shape[:2].numel() == 1
        normed = x if one else ops.rms_norm(x, self._ffn_norm, eps=self._eps)
        active = self._gate_up.norm_swiglu(normed, self._ffn_norm if one else None, eps=self._eps)
        return self._down.residual(active, x)
