"""The Transformer: one dataflow for llama, qwen2 and qwen3 dense.

Place: the readable path. It calls ``ops`` and a cache from ``step``; files, scheduling and text are elsewhere.
Modules and parameters carry Hugging Face's names without the leading "model.".

Axes:    B = batch, T = tokens, D = model dim, H = query heads, G = KV heads, K = head dim, F = FFN dim, V = vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from microllm import ops
from microllm.config import ModelConfig
from microllm.errors import RequestError
from microllm.model.rotary import Rotary
from microllm.step.dense_cache import DenseCache
from microllm.step.matrix import Matrix

Angles = tuple[Tensor, Tensor]


class Linear(nn.Module):
    """A matrix stored as [out, in], with or without bias."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(num_out, num_in))
        self.bias = nn.Parameter(like.new_empty(num_out)) if bias else None

    @property
    def matrix(self) -> Matrix:
        """Return weight and bias as a step takes them."""
        return Matrix(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the transposed weight, plus bias."""
        return ops.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, width: int, eps: float, *, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x at unit root mean square, times the weight."""
        return ops.rms_norm(x, self.weight, eps=self.eps)


class Embedding(nn.Module):
    """The token table."""

    def __init__(self, vocab_size: int, width: int, *, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(vocab_size, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows that ids name."""
        return ops.embedding(ids, self.weight)


class Attention(nn.Module):
    """Grouped-query self-attention with RoPE, and a norm on each query and key head where the family has one."""

    def __init__(self, config: ModelConfig, layer: int, *, like: Tensor) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.scale = config.head_dim**-0.5
        D, K = config.hidden_size, config.head_dim
        H, G = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(D, H * K, bias=config.qkv_bias, like=like)
        self.k_proj = Linear(D, G * K, bias=config.qkv_bias, like=like)
        self.v_proj = Linear(D, G * K, bias=config.qkv_bias, like=like)
        self.o_proj = Linear(H * K, D, bias=config.o_bias, like=like)
        self.q_norm = RMSNorm(K, config.rms_norm_eps, like=like) if config.qk_norm else None
        self.k_norm = RMSNorm(K, config.rms_norm_eps, like=like) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, angles: Angles, positions_BT: Tensor, cache: DenseCache | None) -> Tensor:
        """Return the attended values, projected back to [B, T, D]."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHK = self.q_proj(x_BTD).view(heads)
        k_BTGK = self.k_proj(x_BTD).view(heads)
        v_BTGK = self.v_proj(x_BTD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BTHK, k_BTGK = ops.rope(q_BTHK, k_BTGK, *angles)
        if cache is not None:
            k_BTGK, v_BTGK = cache.store(self.layer, k_BTGK, v_BTGK, positions_BT)
            k_BTGK, v_BTGK = k_BTGK.to(q_BTHK.dtype), v_BTGK.to(q_BTHK.dtype)
        context_BTHK = ops.attention(q_BTHK, k_BTGK, v_BTGK, positions_BT, scale=self.scale)
        return self.o_proj(context_BTHK.flatten(2))


class MLP(nn.Module):
    """The gated feed-forward network: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, like: Tensor) -> None:
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(D, F, bias=config.mlp_bias, like=like)
        self.up_proj = Linear(D, F, bias=config.mlp_bias, like=like)
        self.down_proj = Linear(F, D, bias=config.mlp_bias, like=like)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the network's output, [B, T, D]."""
        return self.down_proj(ops.swiglu(self.gate_proj(x_BTD), self.up_proj(x_BTD)))


class Block(nn.Module):
    """One layer: attention, then the feed-forward network, each on a normed input and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, *, like: Tensor) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, like=like)
        self.self_attn = Attention(config, layer, like=like)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, like=like)
        self.mlp = MLP(config, like=like)

    def forward(self, x_BTD: Tensor, angles: Angles, positions_BT: Tensor, cache: DenseCache | None) -> Tensor:
        """Return the stream after this layer, [B, T, D]."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), angles, positions_BT, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Transformer(nn.Module):
    """A decoder-only language model.

    Parameters are uninitialised until weights are loaded or ``initialise`` is called.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        like = torch.empty(0, dtype=dtype, device=device)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, like=like)
        self.layers = nn.ModuleList(Block(config, i, like=like) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, like=like)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings, like.device)
        self.lm_head = (
            None if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, like=like)
        )  # fmt: skip

    @property
    def head_weight_VD(self) -> Tensor:
        """Return the matrix that gives logits: the head's own, or the embedding's where they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def head(self) -> Matrix:
        """Return what gives logits, floats or codes."""
        return Matrix(self.embed_tokens.weight) if self.lm_head is None else self.lm_head.matrix

    def new_cache(self, num_rows: int, capacity: int) -> DenseCache:
        """Return an empty cache of the model's own dtype, where the model is."""
        weight = self.norm.weight
        return DenseCache(self.config, num_rows, capacity, dtype=weight.dtype, device=weight.device)

    def initialise(self, seed: int, std: float = 0.02) -> Transformer:
        """Fill matrices with normal values of ``std``, norms with one and biases with zero; return self."""
        generator = torch.Generator(device=self.norm.weight.device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, std, generator=generator)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return self

    def forward(
        self, token_ids_BT: Tensor, *, cache: DenseCache | None = None,
        num_tokens_B: Tensor | None = None, last_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the logits of each token, or of each row's last token.

        With a cache, tokens follow what it holds, and it advances. ``num_tokens_B`` says how many of a row's
        tokens are real: rows are padded on the right, and padding never reaches a real token.

        Shapes:  token_ids [B, T] int64, num_tokens [B] int64 -> [B, T, V], or [B, 1, V] with ``last_only``
        Raises:
            RequestError: no token is given, or the positions pass the model's context or the cache.
        """
        B, T = token_ids_BT.shape
        if T == 0 or B == 0:
            raise RequestError(f"got token ids of shape {(B, T)}; need at least one token")
        device = token_ids_BT.device
        positions_BT = (
            torch.arange(T, device=device).expand(B, T) if cache is None else cache.reserve(T)
        )  # fmt: skip
        if cache is None and self.config.max_position_embeddings < T:
            raise RequestError(
                f"got {T} tokens; need at most {self.config.max_position_embeddings} (the model's context)"
            )
        angles = self.rotary(positions_BT)
        x_BTD = self.embed_tokens(token_ids_BT)
        for block in self.layers:
            x_BTD = block(x_BTD, angles, positions_BT, cache)
        if cache is not None:
            cache.advance(
                T if num_tokens_B is None else num_tokens_B,
                T if num_tokens_B is None else int(num_tokens_B.max()),
            )
        if last_only:
            last_B = torch.full((B,), T - 1, device=device) if num_tokens_B is None else num_tokens_B - 1
            x_BTD = x_BTD[torch.arange(B, device=device), last_B].unsqueeze(1)
        x_BTD = self.norm(x_BTD)
        return self.lm_head(x_BTD) if self.lm_head is not None else ops.linear(x_BTD, self.head_weight_VD)
