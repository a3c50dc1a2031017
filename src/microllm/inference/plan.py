"""The decode plan on a CPU: a model's forward pass over packed weights, called as a ``Transformer`` is.

Place: ``llm.load`` makes one in place of a ``Transformer``; the generator drives either. One token of one sequence
takes the bound ``DecodeStep``; prompts and batches take the pass below, whose products are few and large. Keys lie in
the cache in the plan's own order of a head's elements. Does not load and does not schedule.

Axes:    B = rows, T = tokens, M = B T, D = model dim, H = query heads, G = KV heads, K = head dim, R = H / G,
         P = K / 2, S = slots, V = vocabulary
"""

from __future__ import annotations

import math
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from microllm import ops
from microllm.errors import RequestError
from microllm.inference.decode_step import DecodeStep
from microllm.inference.plan_weights import LayerWeights, PlanWeights
from microllm.model.rotary import Rotary
from microllm.ops.packed import RefinedWeight
from microllm.step import DenseCache

_QUERY_BLOCK = 128
"""Queries that attend at once; what lies above a block's own diagonal is never multiplied."""


class Plan(nn.Module):
    """A decoder-only language model over packed weights, for inference on a CPU."""

    def __init__(self, weights: PlanWeights, *, wide_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.weights = weights.config, weights
        self._wide_dtype = wide_dtype
        config = weights.config
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings, torch.device("cpu"))
        self._steps: WeakKeyDictionary[DenseCache, DecodeStep] = WeakKeyDictionary()

    def new_cache(self, num_rows: int, capacity: int) -> DenseCache:
        """Return an empty cache for this plan."""
        return DenseCache(self.config, num_rows, capacity)

    @torch.no_grad()
    def forward(
        self, token_ids_BT: Tensor, *, cache: DenseCache | None = None,
        num_tokens_B: Tensor | None = None, last_only: bool = False, top_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the logits of each token, or of each row's last token, as ``Transformer`` does.

        With ``top_only``, for a caller that takes the argmax, logits below the largest may be coarse.

        Shapes:  token_ids [B, T] int64, num_tokens [B] int64 -> [B, T, V], or [B, 1, V] with ``last_only``, fp32
        Numbers: a head in bf16 or int8 rounds its logits to bf16; of q8_0 blocks the 128 largest of a last token are
                 exact and the others rounded so, and all are exact for whole prompts and for more than 8 rows

        Raises:
            RequestError: no token is given, or the positions pass the model's context or the cache.
        """
        B, T = token_ids_BT.shape
        if T == 0 or B == 0:
            raise RequestError(f"got token ids of shape {(B, T)}; need at least one token")
        if cache is None:
            if T > self.config.max_position_embeddings:
                raise RequestError(f"got {T} tokens; need at most {self.config.max_position_embeddings} (the context)")
            cache = self.new_cache(B, T)
        if B == T == cache.num_rows == 1 and num_tokens_B is None:
            return self._decode(token_ids_BT, cache, top_only=top_only)
        positions_BT = cache.reserve(T)
        last_B = torch.full((B,), T - 1) if num_tokens_B is None else (num_tokens_B - 1).clamp(min=0)
        wanted_M = torch.arange(B) * T + last_B if last_only else None
        x_MD = self.weights.embedding(token_ids_BT.flatten())
        turns_M1P = self._turns(positions_BT.flatten()).unsqueeze(1)
        turns = turns_M1P * self.config.head_dim**-0.5, turns_M1P  # a query's own is scaled for its scores
        for index, layer in enumerate(self.weights.layers):
            is_last = index == len(self.weights.layers) - 1
            x_MD = self._layer(index, layer, x_MD, turns, positions_BT, cache, wanted_M if is_last else None)
        cache.advance(
            T if num_tokens_B is None else num_tokens_B, T if num_tokens_B is None else int(num_tokens_B.max())
        )
        x_MD, head = self._normed(x_MD, self.weights.norm), self.weights.head
        logits_MV = head.exact(x_MD) if isinstance(head, RefinedWeight) and not last_only else head(x_MD)
        return logits_MV.float().unflatten(0, (B, -1))

    def _decode(self, token_ids_11: Tensor, cache: DenseCache, *, top_only: bool) -> Tensor:
        """Run one token of one sequence through the bound step."""
        cache.check_room(1)
        step = self._steps.get(cache)
        if step is None:
            step = DecodeStep(self.weights, cache, self._turns(torch.arange(cache.capacity)))
            self._steps[cache] = step
        logits_1V = step(token_ids_11[0], cache.num_filled, top_only=top_only)
        cache.advance(1, 1)
        return logits_1V.unsqueeze(1)

    def _turns(self, positions_M: Tensor) -> Tensor:
        """Return RoPE's factors as complex numbers, [M, P]."""
        return torch.complex(*self.rotary(positions_M))

    def _normed(self, x_MD: Tensor, weight_D: Tensor) -> Tensor:
        return functional.rms_norm(x_MD, weight_D.shape, weight_D, self.config.rms_norm_eps)

    def _layer(
        self, index: int, layer: LayerWeights, x_MD: Tensor, turns: tuple[Tensor, Tensor], positions_BT: Tensor,
        cache: DenseCache, wanted_M: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the stream after one layer, fp32: [M, D], or of the wanted tokens alone.

        What is not wanted of the last layer ends with its keys and values.
        """
        config, heads = self.config, (*positions_BT.shape, -1, self.config.head_dim)
        H, G = config.num_attention_heads, config.num_key_value_heads
        qkv_MNK = layer.qkv(self._normed(x_MD, layer.input_norm)).float().unflatten(1, (-1, config.head_dim))
        q_MHK, k_MGK, v_MGK = qkv_MNK.split((H, G, G), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_MHK, k_MGK = self._normed(q_MHK, layer.q_norm), self._normed(k_MGK, layer.k_norm)
        q_BTHK, k_BTGK = (
            _turned(part, turn).view(heads) for part, turn in zip((q_MHK, k_MGK), turns, strict=True)
        )  # fmt: skip
        if cache.num_rows == 1:
            context = self._attend(q_BTHK[0], *cache.append(index, k_BTGK[0], v_MGK))
        else:
            keys_BSGK, values_BSGK = cache.store(index, k_BTGK, v_MGK.reshape(heads), positions_BT)
            context = ops.attention(q_BTHK, keys_BSGK, values_BSGK, positions_BT, scale=1.0)
        context_MN = context.reshape(len(x_MD), -1)
        if wanted_M is not None:
            x_MD, context_MN = x_MD[wanted_M], context_MN[wanted_M]
        x_MD = x_MD.add_(layer.output(context_MN))  # the stream is this pass's own
        return x_MD.add_(layer.down(layer.gate_up.swiglu(self._normed(x_MD, layer.ffn_norm))))

    def _attend(self, q_THK: Tensor, keys_SGK: Tensor, values_SGK: Tensor) -> Tensor:
        """Attend causally, the last query (scaled) to the last key, a block of queries at a time: [T, H, K].

        torch's own attention takes twice as long for the causal form on a CPU.
        """
        T, S, G = len(q_THK), *keys_SGK.shape[:2]
        q_GTRK = q_THK.unflatten(1, (G, -1)).transpose(0, 1)
        q_GTRK, keys_GSK, values_GSK = (
            t.to(self._wide_dtype) for t in (q_GTRK, keys_SGK.transpose(0, 1), values_SGK.transpose(0, 1))
        )
        context_TGRK = q_GTRK.new_empty(T, *q_GTRK.shape[::2], q_GTRK.shape[3])
        for start in range(0, T, _QUERY_BLOCK):
            size = min(_QUERY_BLOCK, T - start)
            seen = S - T + start + size
            block = q_GTRK[:, start : start + size].flatten(1, 2)
            scores = torch.bmm(block, keys_GSK[:, :seen].transpose(1, 2)).unflatten(1, (size, -1))
            scores[..., seen - size :].add_(_later(size).unsqueeze(1))
            weights = scores.softmax(-1).flatten(1, 2)
            found = torch.bmm(weights, values_GSK[:, :seen]).unflatten(1, (size, -1))
            context_TGRK[start : start + size] = found.transpose(0, 1)
        return context_TGRK.flatten(1, 2)


@lru_cache(maxsize=8)
def _later(size: int) -> Tensor:
    """Return what is added to a block's own scores: -inf for keys that come later, [T, T]."""
    return torch.full((size, size), -math.inf).triu(1)


def _turned(heads_MHK: Tensor, turns_M1P: Tensor) -> Tensor:
    """Return heads whose elements lie in pairs, each pair turned by its angle."""
    pairs = torch.view_as_complex(heads_MHK.unflatten(2, (-1, 2)))
    return torch.view_as_real(pairs * turns_M1P).flatten(2)
