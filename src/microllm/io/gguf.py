"""A GGUF file as a checkpoint: tensors under Hugging Face names, and the config its metadata describes.

Place: implements ``tensor_source.TensorSource``; ``checkpoint`` opens it, ``tokenizer`` reads its metadata.
Parses no bytes (``gguf_file``) and knows no block layout (``gguf_dequant``). Does not write GGUF.
Source: llama.cpp's tensor names and metadata keys; its converter's row permutation of llama's q and k
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microllm.config import DtypeName, ModelConfig, RopeConfig, warn_of_overflow
from microllm.errors import CheckpointError, UnsupportedModelError
from microllm.io.gguf_dequant import dequantize
from microllm.io.gguf_file import GGUFEntry, file_stamp, read_gguf_header, shorten
from microllm.io.hf_config import GenerationDefaults
from microllm.io.tensor_source import TensorInfo

PACKED_FORMATS = ("q8_0", "q4_0", "q4_1")
"""Types that ``read_packed`` hands out for the quantised linear operators."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_PATTERN = re.compile(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"


def hf_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; a name that is not known stays as it is."""
    match = _BLOCK_PATTERN.fullmatch(gguf_name)
    if match and match[2] in _BLOCK_NAMES:
        return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(gguf_name, gguf_name)


class GGUFSource:
    """One GGUF file whose header is read and checked; payload is read tensor by tensor.

    Raises:
        CheckpointError: the file is damaged, or changed after its header was read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        header = read_gguf_header(self.path)
        self.version: int = header.version
        self.metadata: dict[str, Any] = header.metadata
        self._stamp = header.stamp
        self._entries: dict[str, GGUFEntry] = {}
        for entry in header.entries:
            name = hf_name(entry.name)
            if name in self._entries:
                raise CheckpointError(
                    f"got tensor {shorten(name)} under two names in {self.path}; need it once; convert it again"
                )
            self._entries[name] = entry
        self._infos = {
            name: TensorInfo(name, entry.block_format.name, entry.shape, entry.num_bytes)
            for name, entry in self._entries.items()
            if name != _ROPE_FREQS  # belongs to the config
        }

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor of the model by its Hugging Face name, in file order."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """Return one tensor: packed types as float32, plain types as stored; llama's q and k rows in HF order."""
        entry = self._entry(name)
        raw = self._raw_rows(name, entry).reshape(-1)
        if entry.block_format.torch_dtype is not None:
            return torch.from_numpy(raw).view(entry.block_format.torch_dtype).view(entry.shape)
        return torch.from_numpy(dequantize(raw, entry.block_format)).view(entry.shape)

    def read_packed(self, name: str) -> tuple[Tensor, str]:
        """Return one tensor's blocks as stored, and the name of their type.

        Shapes:  uint8 [rows, bytes of a row]; llama's q and k rows in Hugging Face order
        Raises:
            CheckpointError: the tensor's type is not in ``PACKED_FORMATS``.
        """
        entry = self._entry(name)
        if entry.block_format.name not in PACKED_FORMATS:
            raise CheckpointError(
                f"got tensor {shorten(name)} in {entry.block_format.name}; need one of "
                f"{', '.join(PACKED_FORMATS)} to keep it packed; read it dequantised"
            )
        return torch.from_numpy(self._raw_rows(name, entry)), entry.block_format.name

    def rope_factors(self) -> Tensor | None:
        """Return llama3's per-frequency factors, which GGUF keeps as a tensor, or None."""
        return self.read(_ROPE_FREQS) if _ROPE_FREQS in self._entries else None

    def _entry(self, name: str) -> GGUFEntry:
        if name not in self._entries:
            raise CheckpointError(f"got no tensor {shorten(name)} in {self.path}; need one of its tensors")
        return self._entries[name]

    def _raw_rows(self, name: str, entry: GGUFEntry) -> np.ndarray:
        """Return the stored bytes as [rows, bytes of a row]; a bias or norm has one value a row when permuted."""
        raw = np.empty(entry.num_bytes, np.uint8)
        try:
            with self.path.open("rb") as file:
                same = file_stamp(file) == self._stamp
                file.seek(entry.offset)
                complete = file.readinto(raw.data) == entry.num_bytes
        except OSError as error:
            raise CheckpointError(f"got {error.strerror} reading {self.path}; need a readable file") from error
        if not (same and complete):
            raise CheckpointError(
                f"got a file that changed while it was read: {self.path}; need it left alone; load again"
            )
        rows = math.prod(entry.shape[:-1])
        num_heads = self._permuted_heads(name)
        if num_heads is None:
            return raw.reshape(rows, -1)
        return _unpermute(raw, name, entry.shape[0], num_heads).reshape(rows, -1)

    def _permuted_heads(self, name: str) -> int | None:
        """Return by how many heads the rows of ``name`` are permuted, or None where they are not."""
        if self.metadata.get("general.architecture") != "llama":
            return None
        fields = _Fields(self.metadata, "llama")
        if ".self_attn.q_proj." in name:
            return fields.size("attention.head_count")
        if ".self_attn.k_proj." in name:
            return fields.size("attention.head_count_kv", fields.size("attention.head_count"))
        return None


def _unpermute(raw: np.ndarray, name: str, num_rows: int, num_heads: int) -> np.ndarray:
    """Undo the converter's interleaving of the two rotary halves of each head, row by row."""
    if num_rows % (2 * num_heads) or raw.size % num_rows:
        raise CheckpointError(
            f"got {num_rows} rows of {raw.size} bytes in tensor {shorten(name)} for {num_heads} heads; "
            "need an even number of whole rows a head"
        )
    pairs = raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2))


class _Fields:
    """Typed reading of ``<architecture>.*`` metadata, which a file may fill with anything."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata, self.architecture = metadata, architecture

    def _get(self, key: str, kind: type, need: str) -> Any:  # noqa: ANN401  (of the type that ``kind`` says)
        full = f"{self.architecture}.{key}" if self.architecture else key
        value = self.metadata.get(full)
        if value is not None and type(value) is not kind:
            raise CheckpointError(f"got GGUF metadata {full} = {shorten(str(value))}; need {need}; convert it again")
        return value

    def whole(self, key: str, default: int = 0) -> int:
        """Return a whole number, or ``default`` where the key is absent."""
        value = self._get(key, int, "one whole number for all layers")
        return default if value is None else value

    def size(self, key: str, default: int = 0) -> int:
        """Return a whole number above 0; with no default the key must be there."""
        value = self.whole(key, default)
        if value <= 0:
            raise CheckpointError(
                f"got GGUF metadata {self.architecture}.{key} = {value or 'nothing'}; need a whole number above 0"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """Return a float, in the short spelling that its float32 came from (1e-05, not 9.999999747378752e-06)."""
        value = self._get(key, float, "a number")
        with np.errstate(over="ignore"):  # becomes inf, which the config refuses by the field's name
            return default if value is None else float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        """Return a string, or ``default`` where the key is absent."""
        value = self._get(key, str, "a string")
        return default if value is None else value


def config_from_gguf(source: GGUFSource) -> tuple[ModelConfig, GenerationDefaults]:
    """Return the model that the metadata and the tensor table describe, and its author's sampling defaults.

    Raises:
        UnsupportedModelError: an architecture or feature that this project refuses, by name.
        CheckpointError: a key is missing, of the wrong type, or contradicts the tensors.
    """
    family = _Fields(source.metadata, "").text("general.architecture", "")
    if family not in ("llama", "qwen2", "qwen3"):
        raise UnsupportedModelError(f"got GGUF architecture {shorten(family)}; need llama, qwen2 or qwen3")
    fields, infos = _Fields(source.metadata, family), source.infos
    hidden_size, num_heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", hidden_size // num_heads)
    context = fields.size("context_length")
    _refuse_features(fields, head_dim, context)
    vocab_size = _vocab_size(source)
    special = {key: _special_id(source, key, vocab_size) for key in ("bos", "eos", "eot", "eom", "padding")}
    eos_ids = tuple(dict.fromkeys(i for i in (special["eos"], special["eot"], special["eom"]) if i is not None))
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.size("feed_forward_length"),
        num_hidden_layers=_num_layers(fields, infos),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0),
        rope=_rope(source, fields, head_dim, context),
        tie_word_embeddings="lm_head.weight" not in infos,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in infos,
        o_bias="model.layers.0.self_attn.o_proj.bias" in infos,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in infos,
        qk_norm=family == "qwen3",
        dtype=_dtype(infos),
        bos_token_id=special["bos"],
        eos_token_ids=eos_ids,
        pad_token_id=special["padding"],
    )
    warn_of_overflow(config.family, config.dtype)
    return config, _generation(source, config)


def _refuse_features(fields: _Fields, head_dim: int, context: int) -> None:
    whole, general = fields.whole, _Fields(fields.metadata, "")
    window = whole("attention.sliding_window")
    refused = {
        "a mixture of experts": whole("expert_count") > 0,
        "a model split over several GGUF files": general.whole("split.count") > 1,
        "a GGUF file that is no model": general.text("general.type", "model") != "model",
        f"a sliding window of {window} tokens": 0 < window < context,
        "rotary sections (MRoPE)": f"{fields.architecture}.rope.dimension_sections" in fields.metadata,
        "rotation of a part of each head": whole("rope.dimension_count", head_dim) != head_dim,
        "values of another size than keys": whole("attention.value_length", head_dim) != head_dim,
    }
    for feature, present in refused.items():
        if present:
            raise UnsupportedModelError(
                f"got {feature} in the GGUF metadata; need a dense model that attends to all of its context; "
                "use another file"
            )


def _vocab_size(source: GGUFSource) -> int:
    embedding = source.infos.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"got no table token_embd.weight in {source.path}; need one; convert it again")
    return embedding.shape[0]


def _num_layers(fields: _Fields, infos: Mapping[str, TensorInfo]) -> int:
    """Return block_count, which has to be what the tensor table holds (a lie of 2^31 layers would cost hours)."""
    stored = {match[1] for match in (re.match(r"model\.layers\.([0-9]+)\.", name) for name in infos) if match}
    num_layers = fields.size("block_count")
    if num_layers != len(stored):
        raise CheckpointError(
            f"got block_count {num_layers} but tensors of {len(stored)} blocks; need them equal; convert it again"
        )
    return num_layers


def _special_id(source: GGUFSource, key: str, vocab_size: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    token_id = _Fields(source.metadata, "").whole(name, -1)
    if token_id >= vocab_size:
        raise CheckpointError(f"got {name} = {token_id}; need an id below {vocab_size}; convert it again")
    return token_id if token_id >= 0 else None


def _dtype(infos: Mapping[str, TensorInfo]) -> DtypeName:
    """Return the one dtype of all matrices; mixed or packed weights are computed with in float32."""
    stored = {info.dtype for info in infos.values() if len(info.shape) > 1}
    if stored == {"bfloat16"}:
        return "bfloat16"
    return "float16" if stored == {"float16"} else "float32"


def _generation(source: GGUFSource, config: ModelConfig) -> GenerationDefaults:
    sampling, metadata = _Fields(source.metadata, "general.sampling"), source.metadata

    def given(key: str) -> float | None:
        return sampling.number(key, 0.0) if f"general.sampling.{key}" in metadata else None

    return GenerationDefaults(
        temperature=given("temp"),
        top_k=sampling.whole("top_k") if "general.sampling.top_k" in metadata else None,
        top_p=given("top_p"),
        min_p=given("min_p"),
        repetition_penalty=given("penalty_repeat"),
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        pad_token_id=config.pad_token_id,
    )


def _rope(source: GGUFSource, fields: _Fields, head_dim: int, context: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10_000.0)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    kind = fields.text("rope.scaling.type", "linear" if factor else "none")
    rope_factors = source.rope_factors()
    if rope_factors is not None:
        if kind != "none":
            raise UnsupportedModelError(f"got rope_freqs.weight and rope scaling {kind!r}; need one of them")
        return _llama3_rope(rope_factors, theta, head_dim)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise UnsupportedModelError(f"got rope scaling {shorten(kind)}; need none, linear or yarn")
    for key, neutral in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)):
        if fields.number(f"rope.scaling.{key}", neutral) != neutral:
            raise UnsupportedModelError(f"got yarn rope scaling with {key}; need it absent or {neutral}")
    rope = RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=fields.size("rope.scaling.original_context_length", context),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    attention = fields.number("rope.scaling.attn_factor", 1.0) * fields.number("rope.scaling.yarn_attn_factor", 1.0)
    return rope if attention == 1 else replace(rope, attention_factor=attention * (1 + 0.1 * math.log(factor)))


def _llama3_rope(rope_factors: Tensor, theta: float, head_dim: int) -> RopeConfig:
    """Find the llama3 rule behind a table of factors: GGUF keeps what the rule gives, not its parameters.

    The largest entry is the factor; the rest are taken as Llama 3's published ones and then have to give the table.
    """
    given = rope_factors.double()
    rope = RopeConfig(theta=theta, kind="llama3", factor=float(given.max()), original_context=8192)
    if given.shape == (head_dim // 2,):
        turns = 8192 * theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        if torch.allclose(given, 1 / ((1 - smooth) / rope.factor + smooth), rtol=1e-5):
            return rope
    raise UnsupportedModelError(
        f"got rope_freqs.weight of shape {tuple(given.shape)} that is not Llama 3's rule (original context 8192, "
        "frequency factors 1 and 4); need that rule; use the safetensors checkpoint"
    )
