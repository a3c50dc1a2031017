"""Hugging Face ``config.json`` and ``generation_config.json``, to and from this project's own objects.

Place: under ``checkpoint``. Both layouts of the RoPE fields are read (``rope_theta`` at the top, or all of it
in ``rope_parameters``); the new one is written. What this project does not do is refused by the field's name.
Does not read weights: a caller passes the tensor names when it has them.
Source: the meaning and the default of every field are those of transformers 5 (LlamaConfig, Qwen2Config,
Qwen3Config, modeling_rope_utils).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from microllm.config import DTYPE_BYTES, DtypeName, Family, ModelConfig, RopeConfig, RopeKind, warn_of_overflow
from microllm.errors import ConfigError, UnsupportedModelError

MAX_CONFIG_BYTES = 1 << 20
_MOE = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
_MLA = ("kv_lora_rank", "q_lora_rank")


def _as_ids(value: object) -> object:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


_Real = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Positive = Annotated[_Real, Field(gt=0)]
_Fraction = Annotated[_Real, Field(ge=0, le=1)]
_Size = Annotated[int, Strict(), Field(gt=0, lt=1 << 31)]
_Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
_Flag = Annotated[bool, Strict()]
_Ids = Annotated[tuple[_Count, ...], BeforeValidator(_as_ids), Field(validation_alias="eos_token_id")]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults that a model's author published; ``None`` means that the file says nothing."""

    do_sample: _Flag | None = None
    temperature: Annotated[_Real, Field(ge=0)] | None = None
    top_k: _Count | None = None
    top_p: _Fraction | None = None
    min_p: _Fraction | None = None
    repetition_penalty: _Positive | None = None
    max_new_tokens: _Size | None = None
    bos_token_id: _Count | None = None
    eos_token_ids: _Ids = ()
    pad_token_id: _Count | None = None


class _Rope(BaseModel):
    """``rope_parameters`` (or ``rope_scaling`` with the theta from outside) as the file has it."""

    model_config = ConfigDict(frozen=True)
    rope_theta: _Positive
    factor: _Positive | None = None
    original_max_position_embeddings: _Size | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    attention_factor: _Positive | None = None
    mscale: _Real | None = None
    mscale_all_dim: _Real | None = None
    truncate: _Flag = True


class _Config(BaseModel):
    """The fields of ``config.json`` that shape the model, RoPE's aside."""

    model_config = ConfigDict(frozen=True)
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: Annotated[_Size, Field(le=1024)]
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size
    rms_norm_eps: _Positive
    tie_word_embeddings: _Flag = False
    attention_bias: _Flag | None = None
    mlp_bias: _Flag = False
    bos_token_id: _Count | None = None
    eos_token_ids: _Ids = ()
    pad_token_id: _Count | None = None


_GENERATION = TypeAdapter(GenerationDefaults)


def parse_generation_config(raw: Mapping[str, Any]) -> GenerationDefaults:
    """Return the sampling defaults that a raw ``generation_config.json`` holds.

    Raises:
        ConfigError: a field has the wrong type or an impossible value; all such fields are named.
    """
    try:
        return _GENERATION.validate_python(dict(raw))
    except ValidationError as problem:
        raise _named(problem, "generation_config.json") from problem


def unsupported_features(raw: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every feature of a raw ``config.json`` that this project refuses."""
    found = [f"{name}={raw[name]!r} (mixture of experts)" for name in _MOE if raw.get(name)]
    found += [f"{name}={raw[name]!r} (multi-head latent attention)" for name in _MLA if raw.get(name)]
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {}
    found += _unsupported_rope(rope)
    for factor in (raw.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        if factor not in (None, 1):
            found.append(f"partial_rotary_factor={factor!r} (RoPE on a part of the head)")
    if raw.get("use_mrope"):
        found.append(f"use_mrope={raw['use_mrope']!r} (multimodal RoPE)")
    found += _sliding_windows(raw)
    if raw.get("quantization_config"):
        found.append("quantization_config (weights quantised by another library)")
    for name in ("hidden_act", "hidden_activation"):
        if raw.get(name) not in (None, "silu", "swish"):
            found.append(f"{name}={raw[name]!r} (activations read: silu, swish)")
    dtype = _dtype(raw)
    if dtype is not None and dtype not in list(DTYPE_BYTES):  # a list: the file may hold what cannot be hashed
        found.append(f"dtype={dtype!r} (dtypes read: {', '.join(DTYPE_BYTES)})")
    family, architectures = raw.get("model_type"), raw.get("architectures")
    if family not in get_args(Family):
        found.append(f"model_type={family!r} (families read: {', '.join(get_args(Family))})")
    elif architectures and architectures != [_class_name(str(family))]:
        found.append(f"architectures={architectures!r} (for {family} only {_class_name(str(family))})")
    return found


def _class_name(family: str) -> str:
    return f"{family.capitalize()}ForCausalLM"


def check_supported(raw: Mapping[str, Any]) -> None:
    """Refuse a raw ``config.json`` that has any of ``unsupported_features``.

    Raises:
        UnsupportedModelError: at least one; the text names all.
    """
    refused = unsupported_features(raw)
    if refused:
        raise UnsupportedModelError(f"got a model with {'; '.join(refused)}; need a dense model without these")


def _unsupported_rope(rope: dict[str, Any]) -> list[str]:
    found = []
    if rope.get("mrope_section"):
        found.append(f"mrope_section={rope['mrope_section']!r} (multimodal RoPE)")
    if any(isinstance(value, dict) for value in rope.values()):
        found.append("rope_parameters by layer type (one RoPE for all layers is read)")
    if _rope_kind(rope) not in get_args(RopeKind):
        found.append(f"rope_type={_rope_kind(rope)!r} (types read: {', '.join(get_args(RopeKind))})")
    return found


def _rope_kind(rope: dict[str, Any]) -> Any:  # noqa: ANN401  whatever the file holds; the caller checks it
    return rope.get("rope_type", rope.get("type", "default"))


def _sliding_windows(raw: Mapping[str, Any]) -> list[str]:
    layer_types = raw.get("layer_types") or []
    kinds = layer_types if isinstance(layer_types, list) else [layer_types]
    others = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if others:
        return [f"layer_types with {', '.join(others)} (only full_attention is read: no sliding windows)"]
    if raw.get("use_sliding_window"):
        return [f"use_sliding_window={raw['use_sliding_window']!r} (sliding-window attention)"]
    # Qwen applies sliding_window only where use_sliding_window is true; others apply it when it is set.
    is_qwen = raw.get("model_type") in ("qwen2", "qwen3")
    if raw.get("sliding_window") and "use_sliding_window" not in raw and not is_qwen:
        return [f"sliding_window={raw['sliding_window']!r} (sliding-window attention)"]
    return []


def _dtype(raw: Mapping[str, Any]) -> Any:  # noqa: ANN401  whatever the file holds; the caller checks it
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype


def parse_hf_config(
    raw: Mapping[str, Any],
    *,
    tensor_names: Collection[str] = (),
    generation: GenerationDefaults | None = None,
) -> ModelConfig:
    """Return the model that a raw ``config.json`` describes.

    ``tensor_names`` (on-disk names) decide whether a Qwen2 model has QKV biases, which its config does not
    say. ``generation`` adds its end-of-sequence ids to the config's.

    Raises:
        UnsupportedModelError: a feature that this project refuses; every one is named.
        ConfigError: a key is missing, or has the wrong type or an impossible value; every one is named.
    """
    check_supported(raw)
    try:
        config = _Config.model_validate(dict(raw))
    except ValidationError as problem:
        raise _named(problem, "config.json") from problem
    family: Family = raw["model_type"]
    heads = config.num_attention_heads
    if config.head_dim is None and config.hidden_size % heads:
        raise ConfigError(
            f"got hidden_size={config.hidden_size}, num_attention_heads={heads} and no head_dim; "
            "need a head_dim, or a hidden_size divisible by the heads"
        )
    qkv_bias = bool(config.attention_bias)
    if family == "qwen2":
        qkv_bias = _has_qkv_bias(tensor_names, config.attention_bias)
    dtype: DtypeName = _dtype(raw) or "float32"
    warn_of_overflow(family, dtype)
    extra_eos = generation.eos_token_ids if generation else ()
    fields = config.model_dump(exclude={"attention_bias"}) | {
        "family": family,
        "num_key_value_heads": config.num_key_value_heads or heads,
        "head_dim": config.head_dim or config.hidden_size // heads,
        "rope": _parse_rope(raw, config.max_position_embeddings),
        "qkv_bias": qkv_bias,
        "o_bias": qkv_bias and family != "qwen2",
        "mlp_bias": config.mlp_bias and family == "llama",
        "qk_norm": family == "qwen3",
        "dtype": dtype,
        "eos_token_ids": tuple(dict.fromkeys(config.eos_token_ids + extra_eos)),
    }
    return ModelConfig(**fields)


def _has_qkv_bias(tensor_names: Collection[str], attention_bias: bool | None) -> bool:  # noqa: FBT001
    if tensor_names:
        return any(name.endswith(".self_attn.q_proj.bias") for name in tensor_names)
    return attention_bias is not False


def _parse_rope(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"got rope_parameters {given!r:.80} in config.json; need an object")
    given = {"rope_theta": raw.get("rope_theta", 10_000.0)} | given
    if raw.get("original_max_position_embeddings") is not None:  # outside wins, as in transformers
        given["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    try:
        rope = _Rope.model_validate(given)
    except ValidationError as problem:
        raise _named(problem, "config.json (RoPE)") from problem
    kind = _rope_kind(given)
    if kind == "default":
        return RopeConfig(theta=rope.rope_theta)
    original = rope.original_max_position_embeddings
    factor = rope.factor
    if kind == "yarn":
        original = original or max_position_embeddings
        factor = factor or max_position_embeddings / original
    needed = {"factor": factor}
    if kind == "llama3":
        needed |= {name: getattr(rope, name) for name in _LLAMA3_KEYS}
    absent = [name for name, value in needed.items() if value is None]
    if absent or factor is None:
        raise ConfigError(f"got {kind} rope scaling without {', '.join(absent)}; need it in config.json")
    return RopeConfig(
        theta=rope.rope_theta,
        kind=kind,
        factor=factor,
        original_context=None if kind == "linear" else original,
        **rope.model_dump(include={*_LLAMA3_KEYS[1:], *_YARN_KEYS}, exclude_none=True),
    )


_LLAMA3_KEYS = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def _named(problem: ValidationError, where: str) -> ConfigError:
    parts = []
    for error in problem.errors(include_url=False):
        name = ".".join(str(part) for part in error["loc"])
        missing = error["type"] == "missing"
        parts.append(f"no {name}" if missing else f"{name}={error['input']!r:.80} ({error['msg']})")
    return ConfigError(f"got {where} with {'; '.join(parts)}; need every key, of its type and range")


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` (new layout) from which ``transformers`` builds the same model.

    Raises:
        UnsupportedModelError: the family has no field for this model's biases or QK norm.
    """
    family = config.family
    o_bias = config.qkv_bias and family != "qwen2"
    if config.o_bias != o_bias or (config.mlp_bias and family != "llama"):
        raise UnsupportedModelError(
            f"got qkv_bias={config.qkv_bias}, o_bias={config.o_bias}, mlp_bias={config.mlp_bias}; need biases "
            f"that Hugging Face's {family} has"
        )
    if config.qk_norm != (family == "qwen3"):
        raise UnsupportedModelError(f"got qk_norm={config.qk_norm} for {family}; only qwen3 has it, and always")
    eos = config.eos_token_ids
    written: dict[str, Any] = {
        "architectures": [_class_name(family)],
        "model_type": family,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in _SAME_FIELDS},
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "rope_parameters": _rope_parameters(config.rope),
        "use_cache": True,
    }
    return written | ({"mlp_bias": config.mlp_bias} if family == "llama" else {"use_sliding_window": False})


_SAME_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "dtype", "bos_token_id", "pad_token_id",
)  # fmt: skip


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        written["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn") and rope.original_context is not None:
        written["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        values = asdict(rope)
        written |= {name: values[name] for name in _YARN_KEYS if values[name] is not None}
    return written


def to_generation_config(generation: GenerationDefaults) -> dict[str, Any]:
    """Return the ``generation_config.json`` that holds these defaults."""
    values = asdict(generation)
    eos = values.pop("eos_token_ids")
    written = {name: value for name, value in values.items() if value is not None}
    return written | ({"eos_token_id": eos[0] if len(eos) == 1 else list(eos)} if eos else {})
