"""One token of one sequence on a CPU: every buffer and product bound once, so that a step is a list of calls.

Place: ``plan`` makes one for a cache of one row and runs it for each decoded token. At this size a step is bounded by
the bytes of the weights and by the number of calls: a layer is four products and about twenty small calls, none of
which allocates more than a product's result or works out anything that the last step knew.

Numbers: the stream, norms, RoPE, activation and attention in fp32; products as the weights say
Axes:    D = model dim, H = query heads, G = KV heads, K = head dim, P = K / 2, F = FFN dim, L = layers, S = slots
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from microllm.config import ModelConfig
from microllm.inference.plan_weights import LayerWeights, PlanWeights
from microllm.ops.packed import RefinedWeight
from microllm.step import DenseCache

_silu = torch._C._nn.silu  # pyright: ignore[reportAttributeAccessIssue]  (functional.silu takes no out)


class _Buffers:
    """What a step works in; every layer uses the same."""

    def __init__(self, config: ModelConfig) -> None:
        H, G, K, F = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size,
        )  # fmt: skip
        self.x = torch.zeros(1, config.hidden_size)
        self.normed = torch.zeros_like(self.x)
        self.qkv = torch.zeros(1, (H + 2 * G) * K)
        q, k, v = self.qkv[0].split((H * K, G * K, G * K))
        self.q_heads, self.k_heads, self.v = q.view(H, K), k.view(G, K), v.view(G, K)
        self.q_pairs, self.k_pairs = (torch.view_as_complex(part.view(-1, K // 2, 2)) for part in (q, k))
        self.rotated = torch.zeros_like(self.q_pairs)
        self.query = torch.view_as_real(self.rotated).view(1, H, 1, K)
        self.context = torch.zeros(1, H * K)
        self.context_heads = self.context.view(1, H, 1, K)
        self.gate_up = torch.zeros(1, 2 * F)
        self.gate, self.up = self.gate_up.split(F, dim=1)
        self.active = torch.zeros(1, F)


class _BoundLayer:
    """A layer's weights, bound to the buffers."""

    def __init__(self, weights: LayerWeights, buffers: _Buffers) -> None:
        self.input_norm, self.ffn_norm = weights.input_norm, weights.ffn_norm
        self.q_norm, self.k_norm = weights.q_norm, weights.k_norm
        self.qkv, self.output = weights.qkv.bind(buffers.normed), weights.output.bind(buffers.context)
        self.gate_up, self.down = weights.gate_up.bind(buffers.normed), weights.down.bind(buffers.active)


class DecodeStep:
    """The bound step of one plan and one cache of one row.

    ``turns_CP`` are RoPE's complex factors of every position of the cache.
    """

    def __init__(self, weights: PlanWeights, cache: DenseCache, turns_CP: Tensor) -> None:
        config = weights.config
        self._turns = turns_CP  # the cache itself is not held: its step goes when it goes
        self._embedding, self._norm, self._config = weights.embedding, weights.norm, config
        self._buffers = _Buffers(config)
        self._normalise = _bound_norm(self._buffers, config)
        self._layers = [_BoundLayer(layer, self._buffers) for layer in weights.layers]
        head, normed = weights.head, self._buffers.normed
        self._head = head.bind(normed)
        self._top = head.bind_top(normed) if isinstance(head, RefinedWeight) else self._head
        G, K = config.num_key_value_heads, config.head_dim
        keys_LCGK, values_LCGK = cache.keys[:, 0], cache.values[:, 0]
        self._key_pairs = torch.view_as_complex(keys_LCGK.view(len(keys_LCGK), -1, G, K // 2, 2))
        self._values = values_LCGK
        self._keys_L1GCK, self._values_L1GCK = (t.transpose(1, 2).unsqueeze(1) for t in (keys_LCGK, values_LCGK))

    def __call__(self, token_id_1: Tensor, position: int, *, top_only: bool) -> Tensor:
        """Return the logits after one more token, and put its keys and values into the cache: [1, V] fp32.

        With ``top_only`` none but the largest need be right.
        """
        b, turn, normalise = self._buffers, self._turns[position], self._normalise
        x, active, context = b.x, b.active, b.context_heads
        x.copy_(self._embedding(token_id_1))
        seen = position + 1
        slots = zip(
            self._layers,
            self._key_pairs[:, position].unbind(0), self._values[:, position].unbind(0),
            self._keys_L1GCK.narrow(3, 0, seen).unbind(0), self._values_L1GCK.narrow(3, 0, seen).unbind(0),
            strict=True,
        )  # fmt: skip
        attend, multiply = functional.scaled_dot_product_attention, torch.mul
        for layer, key_slot, value_slot, keys, values in slots:
            normalise(layer.input_norm)
            b.qkv.copy_(layer.qkv())
            if layer.q_norm is not None and layer.k_norm is not None:
                self._normalise_heads(layer.q_norm, layer.k_norm)
            multiply(b.q_pairs, turn, out=b.rotated)
            multiply(b.k_pairs, turn, out=key_slot)
            value_slot.copy_(b.v)
            context.copy_(attend(b.query, keys, values, enable_gqa=True))
            x.add_(layer.output())
            normalise(layer.ffn_norm)
            b.gate_up.copy_(layer.gate_up())
            _silu(b.gate, out=active)
            active.mul_(b.up)
            x.add_(layer.down())
        normalise(self._norm)
        return (self._top() if top_only else self._head()).float()

    def _normalise_heads(self, q_norm_K: Tensor, k_norm_K: Tensor) -> None:
        for heads, weight in ((self._buffers.q_heads, q_norm_K), (self._buffers.k_heads, k_norm_K)):
            heads.copy_(functional.rms_norm(heads, weight.shape, weight, self._config.rms_norm_eps))


def _bound_norm(buffers: _Buffers, config: ModelConfig) -> Callable[[Tensor], None]:
    """Return a call that puts the stream at unit root mean square, times a weight [D], into ``normed``."""
    x, row, normed, zero, dot = buffers.x, buffers.x[0], buffers.normed, torch.zeros(1), torch.dot
    eps, share, add_product = config.rms_norm_eps, 1 / config.hidden_size, torch.addcmul

    def normalise(weight_D: Tensor) -> None:
        add_product(zero, x, weight_D, value=1 / math.sqrt(dot(row, row).item() * share + eps), out=normed)

    return normalise
