"""GGUF files written by the ``gguf`` package read back; damaged and hostile ones are refused by name.

The files of the hostile tests are packed by hand below, byte by byte, since no honest writer makes them.
"""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hypothesis import given, settings
from hypothesis import strategies as st

from microllm.config import ModelConfig, RopeConfig
from microllm.errors import CheckpointError, MicroLLMError, UnavailableError, UnsupportedModelError
from microllm.io.demo import fetch_demo
from microllm.io.gguf import GGUFSource, config_from_gguf, hf_name

# ---- files packed by hand

U32, STRING, ARRAY = 4, 8, 9
TINY = {"embedding_length": 8, "feed_forward_length": 4, "block_count": 1, "context_length": 16}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def row(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def packed(
    pairs: list[bytes] | None = None,
    rows: list[bytes] | None = None,
    payload: bytes = b"\1" * 64,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    pairs, rows = pairs or [], rows or []
    num_tensors, num_pairs = counts or (len(rows), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join(pairs) + b"".join(rows)
    return head + b"\0" * (-len(head) % 32) + payload


def opened(tmp_path: Path, raw: bytes) -> GGUFSource:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    return GGUFSource(path)


def tiny_llama_bytes() -> bytes:
    """Return a whole one-block model: enough for every stage (parse, config, read) to have work."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (5, 8), "blk.0.attn_norm.weight": (8,), "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8), "blk.0.attn_v.weight": (4, 8), "blk.0.attn_output.weight": (8, 8),
        "blk.0.attn_q.bias": (8,), "blk.0.attn_k.bias": (4,),
        "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate.weight": (4, 8), "blk.0.ffn_up.weight": (4, 8),
        "blk.0.ffn_down.weight": (8, 4), "output_norm.weight": (8,),
    }  # fmt: skip
    rows, offset = [], 0
    for name, shape in shapes.items():
        rows.append(row(name, shape, 0, offset))
        offset += -(-4 * int(np.prod(shape)) // 32) * 32
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        *(number(f"llama.{key}", value) for key, value in TINY.items()),
        number("llama.attention.head_count", 2),
        number("llama.attention.head_count_kv", 1),
        pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        pair("llama.rope.scaling.type", STRING, text("yarn")),
        pair("llama.rope.scaling.factor", 6, struct.pack("<f", 4)),
        pair("llama.rope.scaling.attn_factor", 6, struct.pack("<f", 0.5)),
        number("tokenizer.ggml.eos_token_id", 2),
        pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bb") + text("é")),
        pair("nested", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", 7, 2) + b"\0\1"),
    ]
    payload = np.random.default_rng(0).standard_normal(offset // 4).astype(np.float32).tobytes()
    return packed(pairs, rows, payload)


def read_all(source: GGUFSource) -> dict[str, torch.Tensor]:
    return {name: source.read(name) for name in source.infos}


# ---- files written by the gguf package


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to llama's q and k before it writes them."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_model(path: Path, arch: str, kind: Q | None = None, **changes) -> dict[str, np.ndarray]:
    """Write a two-block model with the gguf package; return its tensors under Hugging Face names, unpermuted.

    ``kind`` packs the matrices; ``changes`` overrides metadata (``None`` leaves a key out) or drops tensors.
    """
    D, F, V, H, KV, HD = 64, 96, 40, 4, 2, 16
    rng = np.random.default_rng(7)
    weights: dict[str, np.ndarray] = {"model.embed_tokens.weight": rng.standard_normal((V, D))}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes = {
            "input_layernorm.weight": (D,), "self_attn.q_proj.weight": (H * HD, D),
            "self_attn.k_proj.weight": (KV * HD, D), "self_attn.v_proj.weight": (KV * HD, D),
            "self_attn.o_proj.weight": (D, H * HD), "post_attention_layernorm.weight": (D,),
            "mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F),
        }  # fmt: skip
        if arch == "qwen2" or changes.get("biases"):
            sizes = {"q_proj": H * HD, "k_proj": KV * HD, "v_proj": KV * HD}
            shapes |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
        if arch == "qwen3":
            shapes |= {"self_attn.q_norm.weight": (HD,), "self_attn.k_norm.weight": (HD,)}
        weights |= {prefix + name: rng.standard_normal(shape) for name, shape in shapes.items()}
    weights["model.norm.weight"] = rng.standard_normal(D)
    if changes.get("untied"):
        weights["lm_head.weight"] = rng.standard_normal((V, D))
    weights = {name: value.astype(np.float32) for name, value in weights.items()}

    gguf_names = {hf_name(name): name for name in GGUF_NAMES}
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        "block_count": 2, "embedding_length": D, "feed_forward_length": F, "context_length": 128,
        "attention.head_count": H, "attention.head_count_kv": KV, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0, "rope.dimension_count": HD,
    }  # fmt: skip
    if arch == "qwen3":
        metadata |= {"attention.key_length": HD, "attention.value_length": HD}
    for key, value in (metadata | changes.get("metadata", {})).items():
        add(writer, f"{arch}.{key}", value)
    for key, value in changes.get("general", {}).items():
        add(writer, key, value)
    writer.add_token_list([f"t{index}" for index in range(V)])
    for name, value in weights.items():
        stored = value
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            stored = permute(value, H if ".q_proj." in name else KV)
        put(writer, gguf_names[name], stored, kind if value.ndim == 2 else None)
    for name, value in changes.get("tensors", {}).items():
        put(writer, name, value, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def put(writer: gguf.GGUFWriter, name: str, value: np.ndarray, kind: Q | None) -> None:
    if kind is None:
        writer.add_tensor(name, value.astype(np.float32))
    elif kind == Q.F16:
        writer.add_tensor(name, value.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)


GGUF_NAMES = [
    "token_embd.weight", "output_norm.weight", "output.weight",
    *(
        f"blk.{layer}.{part}"
        for layer in range(2)
        for part in (
            "attn_norm.weight", "attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias", "attn_v.weight",
            "attn_v.bias", "attn_output.weight", "attn_q_norm.weight", "attn_k_norm.weight", "ffn_norm.weight",
            "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_plain_tensors_come_back_exactly_under_hugging_face_names(tmp_path, arch):
    weights = write_model(tmp_path / "m.gguf", arch, biases=True)
    source = GGUFSource(tmp_path / "m.gguf")
    assert list(source.infos) == list(weights)
    for name, want in weights.items():
        got = source.read(name)
        assert got.dtype == torch.float32
        np.testing.assert_array_equal(got.numpy(), want, err_msg=name)
        info = source.infos[name]
        assert (info.dtype, info.shape, info.num_bytes) == ("float32", want.shape, want.nbytes)
    config, _ = config_from_gguf(source)
    shapes = {"model." + name: shape for name, shape in config.parameter_shapes().items()}
    assert shapes == {name: value.shape for name, value in weights.items()}


@pytest.mark.filterwarnings("ignore:qwen2 in float16")
@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.BF16, Q.F16])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_packed_tensors_equal_the_gguf_packages_reading(tmp_path, arch, kind):
    weights = write_model(tmp_path / "m.gguf", arch, kind)
    source = GGUFSource(tmp_path / "m.gguf")
    plain = {Q.BF16: torch.bfloat16, Q.F16: torch.float16}
    for name, value in weights.items():
        got = source.read(name)
        want = value if value.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
        assert got.dtype == (plain.get(kind, torch.float32) if value.ndim == 2 else torch.float32)
        np.testing.assert_array_equal(got.float().numpy(), want, err_msg=name)
    wanted = {Q.BF16: "bfloat16", Q.F16: "float16"}.get(kind, "float32")
    assert config_from_gguf(source)[0].dtype == wanted


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_packed_blocks_are_handed_out_in_hugging_face_row_order(tmp_path, kind):
    weights = write_model(tmp_path / "m.gguf", "llama", kind)
    source = GGUFSource(tmp_path / "m.gguf")
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        blocks, stored = source.read_packed(name)
        assert stored == kind.name.lower()
        assert blocks.dtype == torch.uint8
        np.testing.assert_array_equal(blocks.numpy(), gguf.quants.quantize(weights[name], kind))
    with pytest.raises(CheckpointError, match=r"norm\.weight' in float32; need one of q8_0"):
        source.read_packed("model.norm.weight")


def test_a_read_tensor_is_the_callers_own(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen2")
    source = GGUFSource(tmp_path / "m.gguf")
    first = source.read("model.norm.weight")
    first.zero_()
    assert source.read("model.norm.weight").abs().sum() > 0
    with pytest.raises(CheckpointError, match=r"got no tensor 'model\.absent'"):
        source.read("model.absent")


def test_config_of_each_family(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", Q.Q4_1, general={"tokenizer.ggml.bos_token_id": 1})
    sizes = {
        "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config, generation = config_from_gguf(GGUFSource(tmp_path / "m.gguf"))
    assert config == ModelConfig(family="llama", tie_word_embeddings=True, bos_token_id=1, **sizes)
    assert (generation.temperature, generation.eos_token_ids, generation.bos_token_id) == (None, (), 1)

    ids = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 3}
    general = {**ids, "tokenizer.ggml.padding_token_id": 0, "general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    write_model(tmp_path / "m.gguf", "qwen2", general=general, untied=True)
    config, generation = config_from_gguf(GGUFSource(tmp_path / "m.gguf"))
    special = {"eos_token_ids": (3, 5), "pad_token_id": 0}
    assert config == ModelConfig(family="qwen2", qkv_bias=True, **special, **sizes)
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.7, 20, None)
    assert (generation.eos_token_ids, generation.pad_token_id) == ((3, 5), 0)

    write_model(tmp_path / "m.gguf", "qwen3", metadata={"rope.freq_base": 1e6})
    config, _ = config_from_gguf(GGUFSource(tmp_path / "m.gguf"))
    rope = RopeConfig(theta=1e6)
    assert config == ModelConfig(family="qwen3", qk_norm=True, tie_word_embeddings=True, rope=rope, **sizes)


SCALING = "rope.scaling."


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({SCALING + "type": "none", SCALING + "factor": 4.0}, RopeConfig()),
        ({SCALING + "type": "linear", SCALING + "factor": 4.0}, RopeConfig(kind="linear", factor=4.0)),
        ({SCALING + "factor": 2.0}, RopeConfig(kind="linear", factor=2.0)),
        ({"rope.scale_linear": 2.0}, RopeConfig(kind="linear", factor=2.0)),
        (
            {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "original_context_length": 32},
            RopeConfig(kind="yarn", factor=4.0, original_context=32),
        ),
        (
            {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "attn_factor": 0.5},
            RopeConfig(kind="yarn", factor=4.0, original_context=128, attention_factor=0.5 * (1 + 0.1 * np.log(4))),
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, want):
    write_model(tmp_path / "m.gguf", "qwen2", metadata=metadata)
    assert config_from_gguf(GGUFSource(tmp_path / "m.gguf"))[0].rope == want


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """What the converter stores for llama3 scaling, one frequency at a time."""
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * index / head_dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rule_is_found_behind_its_table(tmp_path, factor):
    metadata = {"rope.freq_base": 500_000.0}
    tensors = {"rope_freqs.weight": llama3_factors(500_000.0, 16, factor, 8192)}
    write_model(tmp_path / "m.gguf", "llama", metadata=metadata, tensors=tensors)
    source = GGUFSource(tmp_path / "m.gguf")
    assert "rope_freqs.weight" not in source.infos
    want = RopeConfig(theta=500_000.0, kind="llama3", factor=factor, original_context=8192)
    assert config_from_gguf(source)[0].rope == want


@pytest.mark.parametrize(
    "table",
    [llama3_factors(500_000.0, 16, 8.0, 4096), np.ones(4, np.float32), np.full(8, np.nan, np.float32)],
    ids=["another rule", "another length", "not numbers"],
)
def test_a_frequency_table_of_another_rule_is_refused(tmp_path, table):
    write_model(
        tmp_path / "m.gguf", "llama", metadata={"rope.freq_base": 500_000.0}, tensors={"rope_freqs.weight": table}
    )
    with pytest.raises(MicroLLMError, match=r"rope_freqs\.weight|rope factor"):
        config_from_gguf(GGUFSource(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"metadata": {"expert_count": 8}}, UnsupportedModelError, "mixture of experts"),
        ({"metadata": {"attention.sliding_window": 64}}, UnsupportedModelError, "sliding window of 64"),
        ({"metadata": {"rope.dimension_sections": [2, 3, 3]}}, UnsupportedModelError, "MRoPE"),
        ({"metadata": {"rope.dimension_count": 8}}, UnsupportedModelError, "part of each head"),
        ({"metadata": {"attention.value_length": 32}}, UnsupportedModelError, "another size than keys"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, UnsupportedModelError, "'longrope'"),
        (
            {
                "metadata": {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 2.0,
                    "rope.scaling.yarn_log_multiplier": 0.1,
                }
            },
            UnsupportedModelError,
            "yarn_log_multiplier",
        ),
        ({"general": {"split.count": 3}}, UnsupportedModelError, "split over several"),
        ({"general": {"general.type": "adapter"}}, UnsupportedModelError, "no model"),
        ({"metadata": {"attention.head_count_kv": [2, 1]}}, CheckpointError, r"head_count_kv = '\[2, 1\]'"),
        ({"metadata": {"attention.head_count_kv": 3}}, ValueError, "need heads divisible by KV heads"),
        ({"metadata": {"embedding_length": None}}, CheckpointError, "llama.embedding_length = nothing"),
        ({"metadata": {"embedding_length": "64"}}, CheckpointError, "embedding_length = '64'"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": None}}, ValueError, "rms_norm_eps"),
        ({"metadata": {"block_count": 2**31}}, CheckpointError, "block_count 2147483648 but tensors of 2 blocks"),
        ({"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0}}, ValueError, "rope factor"),
        ({"general": {"tokenizer.ggml.eos_token_id": 40}}, CheckpointError, "eos_token_id = 40; need an id below 40"),
    ],
)
def test_config_refuses_by_name(tmp_path, changes, error, message):
    write_model(tmp_path / "m.gguf", "llama", **changes)
    with pytest.raises(error, match=message) as caught:
        config_from_gguf(GGUFSource(tmp_path / "m.gguf"))
    assert isinstance(caught.value, MicroLLMError)


def test_other_architectures_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf", "gemma3")
    with pytest.raises(UnsupportedModelError, match="'gemma3'; need llama, qwen2 or qwen3"):
        config_from_gguf(GGUFSource(tmp_path / "m.gguf"))


def test_unknown_tensors_keep_their_names(tmp_path):
    extra = {"blk.0.ffn_gate_exps.weight": np.ones(4), "rope_factors_long.weight": np.ones(2)}
    write_model(tmp_path / "m.gguf", "llama", tensors=extra)
    assert set(GGUFSource(tmp_path / "m.gguf").infos) > set(extra)


# ---- metadata


def test_every_metadata_type(tmp_path):
    values = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 2**32 - 1), 5: ("i", -(2**31)),
              6: ("f", 0.5), 7: ("B", 1), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 1e300)}  # fmt: skip
    pairs = [pair(f"one.{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in values.items()]
    pairs += [
        pair(f"many.{kind}", ARRAY, struct.pack("<IQ", kind, 2) + struct.pack("<2" + code, value, value))
        for kind, (code, value) in values.items()
    ]
    inner = struct.pack("<IQ", STRING, 2) + text("a") + text("")
    pairs += [pair("nested", ARRAY, struct.pack("<IQ", ARRAY, 2) + inner + inner), pair("text", STRING, text("é\n"))]
    metadata = opened(tmp_path, packed(pairs)).metadata
    for kind, (_, value) in values.items():
        assert metadata[f"one.{kind}"] == value
        assert metadata[f"many.{kind}"] == [value, value]
        assert type(metadata[f"one.{kind}"]) is type(metadata[f"many.{kind}"][0])
    assert metadata["one.7"] is True
    assert metadata["nested"] == [["a", ""], ["a", ""]]
    assert metadata["text"] == "é\n"


def test_version_2_and_alignment(tmp_path):
    raw = packed([number("general.alignment", 64)], [row("a", (4,), 0, 0), row("b", (2,), 0, 64)], b"", version=2)
    start = -(-len(raw) // 64) * 64
    payload = struct.pack("<4f", 1, 2, 3, 4) + bytes(48) + struct.pack("<2f", 5, 6)
    source = opened(tmp_path, raw + bytes(start - len(raw)) + payload)
    assert source.version == 2
    assert source.read("a").tolist() == [1, 2, 3, 4]
    assert source.read("b").tolist() == [5, 6]


# ---- damaged and hostile files

NESTED = struct.pack("<IQ", ARRAY, 1) * 20 + struct.pack("<IQ", 0, 0)
HOSTILE = {
    "wrong magic": (b"GGML" + packed()[4:], "got magic b'GGML'; need b'GGUF'"),
    "not gguf, short": (b"PK\3\4", "got magic"),
    "empty": (b"", "file of 0 bytes"),
    "version 1": (packed(version=1), "GGUF of version 1; need little-endian version 2 or 3"),
    "version 4": (packed(version=4), "GGUF of version 4"),
    "big endian": (packed(version=3 << 24), "big-endian version 3"),
    "2^60 pairs": (packed(counts=(0, 2**60)), "count of 1152921504606846976 metadata pairs"),
    "2^60 tensors": (packed(counts=(2**60, 0)), "count of 1152921504606846976 tensors"),
    "2^60 strings": (
        packed([pair("k", ARRAY, struct.pack("<IQ", STRING, 2**60))]),
        "count of 1152921504606846976 strings",
    ),
    "2^60 numbers": (packed([pair("k", ARRAY, struct.pack("<IQ", 0, 2**60))]), "count of 1152921504606846976 numbers"),
    "2^60 arrays": (packed([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 2**60))]), "1152921504606846976 arrays"),
    "2^63 bytes of string": (packed([pair("k", STRING, struct.pack("<Q", 2**63))]), "runs past the end of the file"),
    "deep arrays": (packed([pair("k", ARRAY, NESTED)]), "nested deeper than 4"),
    "value type 13": (packed([pair("k", 13, b"\0" * 8)]), "metadata value type 13"),
    "array type 77": (packed([pair("k", ARRAY, struct.pack("<IQ", 77, 1))]), "metadata value type 77"),
    "truth value 2": (packed([pair("k", 7, b"\2")]), "truth value"),
    "not utf-8": (packed([pair("k", STRING, text(b"\xff\xfe"))]), "not UTF-8"),
    "key twice": (packed([number("k", 1), number("k", 2)]), "metadata key 'k' twice"),
    "tensor twice": (packed(rows=[row("t", (4,)), row("t", (4,), 0, 32)]), "tensor 't' twice"),
    "one tensor, two names": (
        packed(rows=[row("output_norm.weight", (4,)), row("model.norm.weight", (4,), 0, 32)]),
        "'model.norm.weight' under two names",
    ),
    "overlap": (packed(rows=[row("t", (16,)), row("u", (4,), 0, 32)]), "'t' and 'u' over the same bytes"),
    "same place": (packed(rows=[row("t", (4,)), row("u", (4,))]), "over the same bytes"),
    "out of file": (packed(rows=[row("t", (17,))]), "tensor 't' of 68 bytes at payload offset 0"),
    "far out of file": (packed(rows=[row("t", (4,), 0, 2**64 - 32)]), "need it inside"),
    "off alignment": (packed(rows=[row("t", (4,), 0, 8)]), "on a multiple of 32"),
    "overflowing size": (packed(rows=[row("t", (2**63, 2**63, 2))]), "need it inside"),
    "size 0": (packed(rows=[row("t", (4, 0))]), "need sizes above 0"),
    "no dimensions": (packed(rows=[row("t", ())]), "'t' with 0 dimensions; need 1 to 4"),
    "five dimensions": (packed(rows=[row("t", (1, 1, 1, 1, 1))]), "with 5 dimensions"),
    "half a block": (packed(rows=[row("t", (2, 48), 8)]), "in q8_0; need sizes above 0 and rows of whole blocks of 32"),
    "refused quant type": (
        packed(rows=[row("blk.0.ffn_up.weight", (1, 256), 19)]),
        r"up\.weight' of quant type 19 \(IQ1_S\)",
    ),
    "unknown quant type": (
        packed(rows=[row("t", (1, 256), 4711)]),
        r"'t' of quant type 4711 \(unknown\); need one of float32",
    ),
    "alignment 0": (packed([number("general.alignment", 0)]), "general.alignment '0'; need a power of two"),
    "alignment 48": (packed([number("general.alignment", 48)]), "power of two"),
    "alignment text": (packed([pair("general.alignment", STRING, text("32"))]), "power of two"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(tmp_path, case):
    raw, message = HOSTILE[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path, raw)
    assert "hostile.gguf" in str(caught.value)


def test_hostile_counts_allocate_nothing(tmp_path):
    raw, _ = HOSTILE["2^60 strings"]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            opened(tmp_path, raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_name_of_a_megabyte_does_not_flood_the_message(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, packed(rows=[row("x" * 1_000_000, (1, 256), 19)]))
    assert len(str(caught.value)) < 1000


def test_missing_file_and_directory(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="need a readable GGUF file"):
            GGUFSource(path)


def test_cut_anywhere_is_refused(tmp_path):
    raw = tiny_llama_bytes()
    source = opened(tmp_path, raw)
    assert len(read_all(source)) == 13
    assert config_from_gguf(source)[0].rope.kind == "yarn"
    for length in reversed(range(len(raw))):
        os.truncate(source.path, length)
        with pytest.raises(CheckpointError):
            GGUFSource(source.path)


@settings(max_examples=400)
@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 1 << 16)),
)
def test_damage_never_raises_anything_but_our_errors(tmp_path_factory, flips, cut):
    raw = bytearray(tiny_llama_bytes())
    header = raw.index(b"output_norm.weight") + 60  # flips in payload would only change numbers
    for position, value in flips:
        raw[position % header] = value
    if cut is not None:
        raw = raw[: cut % len(raw)]
    path = tmp_path_factory.getbasetemp() / f"damaged-{os.getpid()}.gguf"
    path.write_bytes(raw)
    try:
        source = GGUFSource(path)
        read_all(source)
        config_from_gguf(source)
    except MicroLLMError:
        pass


@pytest.mark.parametrize(
    ("rows", "heads"),
    [
        ([row("blk.0.attn_q.weight", (6, 4))], 2),
        ([row("blk.0.attn_q.bias", (64,), 8)], 2),
        ([row("blk.0.attn_q.weight", (8, 2))], 0),
    ],
    ids=["odd rows a head", "packed bias", "no heads"],
)
def test_rows_that_cannot_be_unpermuted(tmp_path, rows, heads):
    pairs = [pair("general.architecture", STRING, text("llama")), number("llama.attention.head_count", heads)]
    source = opened(tmp_path, packed(pairs, rows, bytes(128)))
    with pytest.raises(CheckpointError, match=r"rows a head|above 0"):
        read_all(source)


def test_file_that_changes_after_the_header_was_read(tmp_path):
    source = opened(tmp_path, tiny_llama_bytes())
    source.path.write_bytes(tiny_llama_bytes()[:-16])
    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_all(source)


# ---- the demo


@pytest.fixture(scope="module")
def demo() -> Path:
    try:
        return fetch_demo()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_demo_equals_the_gguf_packages_reading(demo):
    source, reader = GGUFSource(demo), gguf.GGUFReader(demo)
    theirs = {hf_name(tensor.name): tensor for tensor in reader.tensors}
    assert list(source.infos) == list(theirs)
    for name in ("model.embed_tokens.weight", "model.norm.weight", *(n for n in theirs if ".layers.17." in n)):
        want = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        for part, num_heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:
                want = want.reshape(num_heads, 32, 2, -1).swapaxes(1, 2).reshape(want.shape)
        np.testing.assert_array_equal(source.read(name).numpy(), want, err_msg=name)
    for key in (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.token_type",
        "tokenizer.chat_template",
    ):
        assert source.metadata[key] == reader.fields[key].contents()


def test_demo_config(demo):
    source = GGUFSource(demo)
    config, generation = config_from_gguf(source)
    assert config.num_parameters() == 134_515_008
    assert (config.rms_norm_eps, config.rope, config.dtype) == (1e-5, RopeConfig(theta=100_000.0), "float32")
    assert (config.bos_token_id, config.eos_token_ids, generation.eos_token_ids) == (1, (2,), (2,))
    shapes = {"model." + name: shape for name, shape in config.parameter_shapes().items()}
    assert shapes == {name: info.shape for name, info in source.infos.items()}
    assert {info.dtype for info in source.infos.values()} == {"q4_1", "q8_0", "float32"}


def test_demo_reads_within_its_budget(demo):
    """All of it, header and 272 tensors to float32, in under 2 s of processor time (about 0.5 s is usual)."""
    start = time.process_time()
    source = GGUFSource(demo)
    header_s = time.process_time() - start
    for name in source.infos:
        source.read(name)
    assert header_s < 0.3
    assert time.process_time() - start < 2
