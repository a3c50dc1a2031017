"""config.json of the three families: what transformers writes is read, what we write transformers reads."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microllm.config import PRESETS, ModelConfig, RopeConfig, preset
from microllm.errors import ConfigError, UnsupportedModelError
from microllm.io.hf_config import (
    GenerationDefaults,
    parse_generation_config,
    parse_hf_config,
    to_generation_config,
    to_hf_config,
    unsupported_features,
)

# The published config.json files of four models, in the layouts they were published in.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": 49152,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip


def llama(**changes):
    return SMOLLM2 | changes


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def yarn(**changes):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768} | changes
    return QWEN25 | {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


@pytest.mark.parametrize(("raw", "name"), [(SMOLLM2, "smollm2-135m"), (QWEN25, "qwen2.5-0.5b"), (QWEN3, "qwen3-0.6b")])
def test_published_configs_are_the_presets(raw, name):
    config = parse_hf_config(raw)
    ids = {"bos_token_id": None, "eos_token_ids": (), "pad_token_id": None}
    assert parse_hf_config(raw | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}) == preset(
        name, **ids
    )
    assert config.bos_token_id == raw["bos_token_id"]
    assert config.eos_token_ids == (raw["eos_token_id"],)


def test_llama3_scaling_and_a_list_of_eos_ids():
    config = parse_hf_config(LLAMA32)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.rope == RopeConfig(
        theta=500_000.0, kind="llama3", factor=32.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


@pytest.mark.parametrize("raw", [SMOLLM2, QWEN25, QWEN3, LLAMA32, yarn(), yarn(beta_fast=16, mscale=0.8)])
def test_old_and_new_rope_layouts_read_the_same(raw):
    scaling = dict(raw.get("rope_scaling") or {"rope_type": "default"})
    new = without(raw, "rope_scaling", "rope_theta") | {"rope_parameters": scaling | {"rope_theta": raw["rope_theta"]}}
    old = raw | {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in scaling.items()}}
    assert parse_hf_config(new) == parse_hf_config(old) == parse_hf_config(raw)


def test_dtype_has_two_spellings_of_its_key_and_of_its_value():
    raw = without(SMOLLM2, "torch_dtype")
    assert parse_hf_config(raw).dtype == "float32"
    assert parse_hf_config(raw | {"dtype": "float16"}).dtype == "float16"
    assert parse_hf_config(raw | {"torch_dtype": "torch.bfloat16"}).dtype == "bfloat16"
    assert parse_hf_config(raw | {"dtype": None, "torch_dtype": "float16"}).dtype == "float16"


def test_yarn_fields_and_their_defaults():
    plain = parse_hf_config(yarn()).rope
    assert (plain.kind, plain.factor, plain.original_context, plain.attention_factor) == ("yarn", 4.0, 32768, None)
    assert (plain.beta_fast, plain.beta_slow, plain.truncate) == (32.0, 1.0, True)
    full = parse_hf_config(
        yarn(attention_factor=1.25, mscale=0.7, mscale_all_dim=0.9, beta_fast=24, beta_slow=2, truncate=False)
    ).rope
    assert (full.attention_factor, full.mscale, full.mscale_all_dim) == (1.25, 0.7, 0.9)
    assert (full.beta_fast, full.beta_slow, full.truncate) == (24, 2, False)
    assert parse_hf_config(yarn(original_max_position_embeddings=None)).rope.original_context == 32768
    outside = yarn(original_max_position_embeddings=1024) | {"original_max_position_embeddings": 2048}
    assert parse_hf_config(outside).rope.original_context == 2048
    ratio = parse_hf_config(yarn(factor=None, original_max_position_embeddings=8192)).rope
    assert ratio.factor == 4.0


def test_linear_scaling():
    rope = parse_hf_config(llama(rope_scaling={"type": "linear", "factor": 2.5})).rope
    assert rope == RopeConfig(theta=100_000.0, kind="linear", factor=2.5)


def test_qwen2_biases_follow_the_checkpoint_then_the_config():
    with_bias = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias")
    assert parse_hf_config(QWEN25).qkv_bias
    assert not parse_hf_config(QWEN25 | {"attention_bias": False}).qkv_bias
    assert parse_hf_config(QWEN25 | {"attention_bias": False}, tensor_names=with_bias).qkv_bias
    assert not parse_hf_config(QWEN25, tensor_names=with_bias[:1]).qkv_bias
    assert not parse_hf_config(QWEN25).o_bias


def test_llama_and_qwen3_biases_follow_the_config():
    biased = parse_hf_config(llama(attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    qwen3 = parse_hf_config(QWEN3 | {"attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (True, True, False, True)


def test_key_value_heads_and_head_dim_have_defaults():
    config = parse_hf_config(without(SMOLLM2, "num_key_value_heads"))
    assert (config.num_key_value_heads, config.head_dim) == (9, 64)
    assert parse_hf_config(QWEN3).head_dim == 128  # not 1024 / 16


def test_eos_is_the_union_of_both_files():
    generation = parse_generation_config({"eos_token_id": [151645, 151643]})
    config = parse_hf_config(QWEN25, generation=generation)
    assert config.eos_token_ids == (151643, 151645)


def test_an_inactive_sliding_window_is_honoured():
    assert parse_hf_config(QWEN25 | {"sliding_window": 4096}).max_position_embeddings == 32768
    assert parse_hf_config(without(QWEN25, "use_sliding_window"))
    assert parse_hf_config(llama(sliding_window=4096, use_sliding_window=False))
    assert parse_hf_config(QWEN3 | {"layer_types": ["full_attention"] * 28})


REFUSED = {
    "model_type": [{"model_type": "gpt2"}, {"model_type": "qwen2_moe"}, {"model_type": None}, {"model_type": []}],
    "architectures": [{"architectures": ["LlamaForSequenceClassification"]}, {"architectures": "LlamaForCausalLM"}],
    "num_experts": [{"num_experts": 8}],
    "num_local_experts": [{"num_local_experts": 8, "model_type": "mixtral"}],
    "n_routed_experts": [{"n_routed_experts": 64}],
    "moe_intermediate_size": [{"moe_intermediate_size": 768}],
    "kv_lora_rank": [{"kv_lora_rank": 512}],
    "q_lora_rank": [{"q_lora_rank": 1536}],
    "use_mrope": [{"use_mrope": True}],
    "mrope_section": [{"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}],
    "use_sliding_window": [{"use_sliding_window": True, "sliding_window": 4096}],
    "sliding_window": [{"sliding_window": 4096}, {"sliding_window": 4096, "model_type": "mistral"}],
    "layer_types": [{"layer_types": ["full_attention", "sliding_attention"]}, {"layer_types": "sliding"}],
    "rope_type": [
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "new", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}},
    ],
    "layer type": [{"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}],
    "partial_rotary_factor": [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    "hidden_act": [{"hidden_act": "gelu"}, {"hidden_act": 7}],
    "dtype": [{"torch_dtype": "float64"}, {"dtype": "float8_e4m3fn"}, {"dtype": {"text": "float16"}}],
    "quantization_config": [{"quantization_config": {"quant_method": "gptq"}}],
}


@pytest.mark.parametrize(("field", "changes"), [(f, c) for f, several in REFUSED.items() for c in several])
def test_what_is_not_done_is_refused_by_name(field, changes):
    with pytest.raises(UnsupportedModelError, match=field):
        parse_hf_config(llama(**changes))


def test_every_refused_feature_is_named_at_once():
    raw = llama(num_experts=8, kv_lora_rank=512, hidden_act="gelu")
    assert len(unsupported_features(raw)) == 3
    with pytest.raises(UnsupportedModelError, match=r"num_experts.*kv_lora_rank.*hidden_act"):
        parse_hf_config(raw)


@pytest.mark.parametrize("field", ["use_sliding_window", "layer_types"])
def test_qwen_with_an_active_sliding_window_is_refused(field):
    changes = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 24}
    with pytest.raises(UnsupportedModelError, match=field):
        parse_hf_config(QWEN25 | {field: changes[field]})


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "max_position_embeddings", "rms_norm_eps"],
)  # fmt: skip
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"no {key}"):
        parse_hf_config(without(SMOLLM2, key))


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
     for value in (True, "64", 0, -1, 2.5, math.nan, [1], 1 << 40)]
    + [(key, value) for key in ("rms_norm_eps", "rope_theta") for value in (True, "1", math.nan, math.inf, 0, -1.0)]
    + [("tie_word_embeddings", 1), ("attention_bias", "yes"), ("mlp_bias", None)]
    + [("eos_token_id", value) for value in (True, "2", -1, 2.5, [1, "2"], {"a": 1})]
    + [("num_hidden_layers", 1_000_000_000)],
)  # fmt: skip
def test_a_wrong_type_or_value_is_named(key, value):
    with pytest.raises(ConfigError, match=key):
        parse_hf_config(llama(**{key: value}))


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "yarn", "factor": "4"}, "factor"),
        ({"rope_type": "yarn", "factor": True}, "factor"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": math.nan}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max_position"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "theta"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-320}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e308}, "beta_slow"),
        ({"rope_type": "yarn", "factor": math.e, "mscale": 1.0, "mscale_all_dim": -10.0}, "mscale_all_dim"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
             "original_max_position_embeddings": 64},
            "low < high",
        ),
        ("yarn", "rope_parameters"),
    ],
)  # fmt: skip
def test_bad_rope_scaling_is_named(scaling, word):
    with pytest.raises(ConfigError, match=word):
        parse_hf_config(llama(rope_scaling=scaling))


def test_heads_must_divide():
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        parse_hf_config(llama(num_key_value_heads=2))
    with pytest.raises(ConfigError, match="head_dim"):
        parse_hf_config(llama(hidden_size=577))
    with pytest.raises(ConfigError, match="head_dim"):
        parse_hf_config(llama(head_dim=63))


def test_qwen2_in_float16_warns_and_others_do_not():
    with pytest.warns(UserWarning, match="overflow"):
        parse_hf_config(QWEN25 | {"torch_dtype": "float16"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_hf_config(QWEN3 | {"torch_dtype": "float16"})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KEYS = [*sorted(SMOLLM2), "head_dim", "layer_types", "rope_parameters", "dtype", "num_experts", "sliding_window"]


@given(st.dictionaries(st.sampled_from(KEYS), anything, min_size=1, max_size=3))
def test_whatever_a_field_holds_the_answer_is_a_config_or_a_config_error(changes):
    try:
        config = parse_hf_config(llama(**changes))
    except ConfigError:
        return
    assert isinstance(config, ModelConfig)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_the_round_trip(name):
    config = preset(name, bos_token_id=1, eos_token_ids=(2, 3))
    assert parse_hf_config(to_hf_config(config)) == config


@st.composite
def configs(draw):
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    scaling = {
        "default": {},
        "linear": {"factor": 2.0},
        "llama3": {"factor": 8.0, "original_context": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {
            "factor": 4.0, "original_context": 128, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False,
            "attention_factor": draw(st.none() | st.just(1.25)), "mscale": draw(st.none() | st.just(0.7)),
        },
    }[kind]  # fmt: skip
    bias = draw(st.booleans())
    return preset(
        "tiny",
        family=family,
        rope=RopeConfig(theta=draw(st.sampled_from([10_000.0, 1_000_000.0])), kind=kind, **scaling),
        head_dim=draw(st.sampled_from([16, 32])),
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=bias,
        o_bias=bias and family != "qwen2",
        mlp_bias=draw(st.booleans()) and family == "llama",
        qk_norm=family == "qwen3",
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        eos_token_ids=draw(st.sampled_from([(), (2,), (2, 5)])),
    )


@given(configs())
def test_any_config_survives_the_round_trip(config):
    assert parse_hf_config(to_hf_config(config)) == config


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": True}, {"family": "qwen2", "o_bias": True}, {"family": "qwen2", "mlp_bias": True},
     {"qk_norm": True}, {"family": "qwen3"}],
)  # fmt: skip
def test_what_a_family_cannot_say_is_not_written(changes):
    with pytest.raises(UnsupportedModelError, match="got"):
        to_hf_config(preset("tiny", **changes))


@pytest.mark.parametrize("raw", [SMOLLM2, QWEN25, QWEN3, LLAMA32, yarn(attention_factor=1.25)])
def test_transformers_reads_what_we_write(raw):
    """Our rewritten config and the published one give the same RoPE and shapes in transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    del transformers
    kind = CONFIG_MAPPING[raw["model_type"]]
    published = kind.from_dict(dict(raw))
    ours = kind.from_dict(to_hf_config(parse_hf_config(raw)))
    for name in ("vocab_size", "hidden_size", "num_key_value_heads", "tie_word_embeddings", "eos_token_id", "dtype"):
        assert getattr(ours, name) == getattr(published, name), name
    ours_rope = {key: value for key, value in ours.rope_parameters.items() if key in published.rope_parameters}
    published_rope = {key: value for key, value in published.rope_parameters.items() if key != "type"}
    assert ours_rope == published_rope


def test_generation_defaults():
    raw = {
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05,
        "bos_token_id": 5, "eos_token_id": [7, 8], "pad_token_id": 9, "transformers_version": "4.51.0",
    }  # fmt: skip
    read = parse_generation_config(raw)
    assert read == GenerationDefaults(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05,
        bos_token_id=5, eos_token_ids=(7, 8), pad_token_id=9,
    )  # fmt: skip
    assert parse_generation_config(to_generation_config(read)) == read
    assert parse_generation_config({}) == GenerationDefaults()
    assert to_generation_config(GenerationDefaults(eos_token_ids=(2,))) == {"eos_token_id": 2}


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -0.1), ("temperature", math.nan), ("temperature", "1"), ("top_k", True), ("top_k", -1),
     ("top_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0), ("do_sample", "yes"), ("eos_token_id", [-1])],
)  # fmt: skip
def test_bad_generation_defaults_are_named(key, value):
    with pytest.raises(ConfigError, match=key):
        parse_generation_config({key: value})
