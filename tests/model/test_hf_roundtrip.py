"""What transformers saves, we load with the same logits; what we save, transformers loads back equal."""

import json

import pytest
import torch
import transformers

from microllm.io.checkpoint import open_checkpoint, save_checkpoint
from microllm.io.resolve import resolve_model
from microllm.model import load_model

SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"head_dim": 8, "rms_norm_eps": 1e-5}),
    "llama-biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
}
DEFAULT = {"rope_type": "default", "rope_theta": 50_000.0}
ORIGINAL_CONTEXT = 16
SCALED = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
    "yarn with its own attention factor": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16.0,
        "beta_slow": 2.0, "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
}  # fmt: skip
SMALL_SHARDS = 40_000  # bytes: the files become a dozen


def make_reference(family, *, tied=False, rope=DEFAULT, dtype=torch.float32):
    config_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**SIZES, **extra, tie_word_embeddings=tied, rope_parameters=dict(rope))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.to(dtype)


def save(model, directory, *, sharded=False):
    model.save_pretrained(directory, max_shard_size=SMALL_SHARDS if sharded else "1GB")
    assert (directory / "model.safetensors.index.json").exists() is sharded
    assert len(list(directory.glob("*.safetensors"))) > (5 if sharded else 0)


def use_old_rope_layout(directory, type_key="rope_type"):
    """Rewrite config.json as transformers before 5 wrote it: theta at the top, the rest in rope_scaling."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {type_key: kind, **rope}
    path.write_text(json.dumps(raw))


def load_ours(directory):
    return load_model(open_checkpoint(resolve_model(str(directory))))


def token_ids(length):
    return torch.randint(SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours, reference, length=60):
    ids = token_ids(length)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), reference(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_we_load(family, tied, sharded, tmp_path):
    reference = make_reference(family, tied=tied)
    save(reference, tmp_path, sharded=sharded)
    assert_same_logits(load_ours(tmp_path), reference)
    use_old_rope_layout(tmp_path)
    assert load_ours(tmp_path).config.rope.theta == DEFAULT["rope_theta"]
    assert_same_logits(load_ours(tmp_path), reference)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_scaling_past_the_original_context_in_both_layouts(family, kind, tmp_path):
    reference = make_reference(family, rope=SCALED[kind])
    save(reference, tmp_path)
    unscaled = make_reference(family, rope={**DEFAULT, "rope_theta": SCALED[kind]["rope_theta"]})
    ids = token_ids(60)
    with torch.no_grad():
        past = (reference(ids).logits - unscaled(ids).logits)[:, ORIGINAL_CONTEXT:].abs().amax(-1)
    assert past.median() > 0.05, "the scaling changes nothing here, so the test would prove nothing"
    assert_same_logits(load_ours(tmp_path), reference)
    use_old_rope_layout(tmp_path)
    assert_same_logits(load_ours(tmp_path), reference)
    if kind != "llama3":  # the oldest spelling
        reference.save_pretrained(tmp_path)
        use_old_rope_layout(tmp_path, "type")
        assert_same_logits(load_ours(tmp_path), reference)


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_we_save_transformers_loads_back_equal(family, tied, sharded, tmp_path):
    reference = make_reference(family, tied=tied)
    save(reference, tmp_path / "theirs")
    ours = load_ours(tmp_path / "theirs")
    save_checkpoint(
        tmp_path / "ours", ours.config, ours.state_dict(), max_shard_bytes=SMALL_SHARDS if sharded else 1 << 30
    )
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 5) is sharded
    assert_equal_reload(tmp_path / "ours", reference)
    again = load_ours(tmp_path / "ours")
    assert again.config == ours.config
    assert torch.equal(again(token_ids(9)), ours(token_ids(9)))


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_models_come_back_equal_too(family, kind, tmp_path):
    reference = make_reference(family, rope=SCALED[kind])
    save(reference, tmp_path / "theirs")
    ours = load_ours(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", ours.config, ours.state_dict())
    assert_equal_reload(tmp_path / "ours", reference)


def test_a_bf16_model_keeps_its_dtype_and_bits_through_both(tmp_path):
    save(make_reference("qwen2", dtype=torch.bfloat16), tmp_path / "theirs")
    # loaded, not cast: .to(bfloat16) would have rounded the rotary frequencies as well
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    ours = load_ours(tmp_path / "theirs")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    save_checkpoint(tmp_path / "ours", ours.config, ours.state_dict())
    assert_equal_reload(tmp_path / "ours", reference, dtype=torch.bfloat16)


def assert_equal_reload(directory, reference, dtype=torch.float32):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected, got = reference.state_dict(), model.state_dict()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == dtype
        assert torch.equal(got[name], tensor), name
    ids = token_ids(60)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, reference(ids).logits)
    assert model.generation_config.eos_token_id == 2
    assert model.config.to_dict()["bos_token_id"] == 1
