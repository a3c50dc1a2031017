"""What a model is: one frozen ``ModelConfig``, presets, and the formulas that follow from it.

Place: read by every room to the right. Does not read files: ``io/hf_config.py`` and ``io/gguf.py`` do.
Field names are Hugging Face's, so that a config reads the same here and there.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from microllm.errors import ConfigError

Family = Literal["llama", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, and how positions past the trained context are scaled.

    Units:   ``original_context`` in tokens (the context that the model was trained with)
    Source:  llama3: Llama 3.1's published rule; yarn: arXiv:2309.00071
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _positive("rope theta", self.theta)
        _positive("rope factor", self.factor)
        if self.kind not in get_args(RopeKind):
            raise ConfigError(f"got rope kind {self.kind!r}; need one of {', '.join(get_args(RopeKind))}")
        if self.kind == "llama3":
            if self.original_context is None:
                raise ConfigError("got llama3 rope scaling without original_max_position_embeddings; need it")
            if not self.low_freq_factor < self.high_freq_factor:
                raise ConfigError(
                    f"got llama3 rope factors low {self.low_freq_factor}, high {self.high_freq_factor}; need low < high"
                )
        if self.kind == "yarn":
            if self.theta <= 1:
                raise ConfigError(f"got yarn rope theta={self.theta}; need above 1, so that waves grow longer")
            for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
                value, low = getattr(self, name), 1e-3 if name.startswith("beta") else 0
                if value is not None and not low <= value <= 1e6:
                    raise ConfigError(f"got yarn rope {name}={value}; need a number from {low} to 1e6")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family: RMSNorm, RoPE, GQA, SwiGLU.

    Units:   ``max_position_embeddings`` in tokens; every other size in elements
    Raises:
        ConfigError: a size is not positive, heads do not divide by KV heads, or head_dim is odd.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: DtypeName = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise ConfigError(f"got model family {self.family!r}; need one of {', '.join(get_args(Family))}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"got dtype {self.dtype!r}; need one of {', '.join(DTYPE_BYTES)}")
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"got {name}={value!r}; need a whole number above 0")
        _positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"got num_attention_heads={self.num_attention_heads}, num_key_value_heads="
                f"{self.num_key_value_heads}; need heads divisible by KV heads (grouped-query attention)"
            )
        if self.head_dim % 2:
            raise ConfigError(f"got head_dim={self.head_dim}; need an even number (RoPE rotates pairs)")

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Return the bytes that one token takes in the KV cache of all layers."""
        itemsize = DTYPE_BYTES[dtype or self.dtype]
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize

    def num_parameters(self) -> int:
        """Return the number of parameters held at run time (a tied head counts once)."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's name and shape, in the order of the model's own modules."""
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_hidden_layers):
            for name, shape in self._block_shapes().items():
                shapes[f"layers.{layer}.{name}"] = shape
        shapes["norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _block_shapes(self) -> dict[str, tuple[int, ...]]:
        D, F, H = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * H, self.num_key_value_heads * H
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,)}
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"self_attn.{name}.weight"] = (rows, D)
            if self.qkv_bias:
                shapes[f"self_attn.{name}.bias"] = (rows,)
        shapes["self_attn.o_proj.weight"] = (D, q)
        if self.o_bias:
            shapes["self_attn.o_proj.bias"] = (D,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (H,)
            shapes["self_attn.k_norm.weight"] = (H,)
        shapes["post_attention_layernorm.weight"] = (D,)
        for name, shape in (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))):
            shapes[f"mlp.{name}.weight"] = shape
            if self.mlp_bias:
                shapes[f"mlp.{name}.bias"] = shape[:1]
        return shapes


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ConfigError(f"got {name}={value!r}; need a finite number above 0")


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        family="llama", vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    ),
    "model_s": ModelConfig(
        family="llama", vocab_size=8192, hidden_size=384, intermediate_size=832, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=6, head_dim=64,
    ),
    "model_m": ModelConfig(
        family="llama", vocab_size=8192, hidden_size=512, intermediate_size=1184, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, head_dim=64,
    ),
    "smollm2-135m": ModelConfig(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope=RopeConfig(theta=100_000.0), tie_word_embeddings=True, dtype="bfloat16",
    ),
    "qwen2.5-0.5b": ModelConfig(
        family="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, head_dim=64, max_position_embeddings=32768,
        rope=RopeConfig(theta=1_000_000.0), tie_word_embeddings=True, qkv_bias=True, dtype="bfloat16",
    ),
    "qwen3-0.6b": ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        rope=RopeConfig(theta=1_000_000.0), tie_word_embeddings=True, qk_norm=True, dtype="bfloat16",
    ),
    "r1-distill-qwen-1.5b": ModelConfig(
        family="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, head_dim=128, max_position_embeddings=131072,
        rope=RopeConfig(theta=10_000.0), qkv_bias=True, dtype="bfloat16",
    ),
}  # fmt: skip
"""Shapes with names: three of this project's own, and the published models that are measured."""


def warn_of_overflow(family: Family, dtype: str) -> None:
    """Warn when ``dtype`` is float16 and the family's activations are known to leave its range."""
    if family == "qwen2" and dtype == "float16":
        message = "qwen2 in float16: activations can overflow to inf; use bfloat16 or float32"
        warnings.warn(message, UserWarning, stacklevel=3)


def preset(name: str, **changes: object) -> ModelConfig:
    """Return the preset called ``name``, with the fields in ``changes`` replaced."""
    if name not in PRESETS:
        raise ConfigError(f"got preset {name!r}; need one of {', '.join(PRESETS)}")
    unknown = sorted(set(changes) - {f.name for f in fields(ModelConfig)})
    if unknown:
        raise ConfigError(f"got unknown config fields {unknown}; need fields of ModelConfig")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
