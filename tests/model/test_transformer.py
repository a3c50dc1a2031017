"""The Transformer against its Hugging Face twin, with and without a cache, padded and not."""

import pytest
import torch
import transformers

from microllm.config import PRESETS, ModelConfig, RopeConfig, preset
from microllm.errors import RequestError
from microllm.model import Transformer
from microllm.step import DenseCache

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SCALED = {
    "default": (RopeConfig(theta=10_000.0), {"rope_type": "default", "rope_theta": 10_000.0}),
    "linear": (
        RopeConfig(theta=10_000.0, kind="linear", factor=3.0),
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    ),
    "llama3": (
        RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_context=16),
        {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "yarn": (
        RopeConfig(theta=1_000_000.0, kind="yarn", factor=4.0, original_context=16),
        {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "yarn-mscale": (
        RopeConfig(theta=10_000.0, kind="yarn", factor=40.0, original_context=16, mscale=0.7, mscale_all_dim=1.0),
        {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip
FAMILIES = {
    "llama": ({"head_dim": 8}, transformers.LlamaConfig, {"head_dim": 8}),
    "llama-biased": (
        {"head_dim": 8, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        transformers.LlamaConfig,
        {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ({"head_dim": 8, "qkv_bias": True}, transformers.Qwen2Config, {}),
    "qwen3": ({"head_dim": 16, "qk_norm": True}, transformers.Qwen3Config, {"head_dim": 16}),
}


def twins(family, *, rope="default", tied=False):
    ours, hf_class, extra = FAMILIES[family]
    config = ModelConfig(
        family=family.partition("-")[0], **SMALL, **ours, rope=SCALED[rope][0], tie_word_embeddings=tied
    )
    hf_config = hf_class(
        **SMALL, **extra, rope_parameters=SCALED[rope][1], tie_word_embeddings=tied, rms_norm_eps=1e-6,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model = Transformer(config).eval()
    state = {n.removeprefix("model."): p for n, p in reference.state_dict().items()}
    if tied:
        state.pop("lm_head.weight")
    model.load_state_dict(state)
    return model, reference


def token_ids(rows, length, seed=0):
    return torch.randint(SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_the_twin(family, tied):
    model, reference = twins(family, tied=tied)
    ids = token_ids(2, 33)
    torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", SCALED)
@torch.no_grad()
def test_rope_scaling_equals_the_twin_past_the_original_context(rope):
    model, reference = twins("llama", rope=rope)
    torch.testing.assert_close(model.rotary.inv_freq_P, reference.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    ids = token_ids(1, 60)
    torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_prefill_and_cached_steps_equal_one_forward(family):
    model, _ = twins(family)
    ids = token_ids(2, 20)
    whole = model(ids)
    cache = DenseCache(model.config, 2, 20)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 15), (15, 16), (16, 20))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=0)
    assert cache.lengths.tolist() == [20, 20]


@torch.no_grad()
def test_padded_rows_equal_rows_run_alone():
    model, _ = twins("qwen3")
    lengths = [5, 1, 9]
    ids = token_ids(3, 9)
    cache = DenseCache(model.config, 3, 16)
    first = model(ids, cache=cache, num_tokens_B=torch.tensor(lengths), last_only=True)
    steps = [first]
    for t in range(4):
        steps.append(model(token_ids(3, 1, seed=t + 1), cache=cache))
    for row, length in enumerate(lengths):
        alone = DenseCache(model.config, 1, 16)
        logits = [model(ids[row : row + 1, :length], cache=alone, last_only=True)]
        for t in range(4):
            logits.append(model(token_ids(3, 1, seed=t + 1)[row : row + 1], cache=alone))
        torch.testing.assert_close(torch.cat([s[row : row + 1] for s in steps]), torch.cat(logits), atol=2e-5, rtol=0)


@torch.no_grad()
def test_last_only_is_the_last_row_of_all_logits():
    model, _ = twins("llama")
    ids = token_ids(2, 11)
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[:, -1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "count", "tensors"),
    [
        ("qwen2.5-0.5b", 494_032_768, 290),
        ("qwen3-0.6b", 596_049_920, 310),
        ("r1-distill-qwen-1.5b", 1_777_088_000, 339),
        ("smollm2-135m", 134_515_008, 272),
        ("model_s", 15_586_176, 57),
        ("model_m", 31_334_912, 75),
    ],
)
def test_pinned_parameter_counts_on_meta_tensors(name, count, tensors):
    model = Transformer(PRESETS[name], device="meta")
    assert sum(p.numel() for p in model.parameters()) == count == PRESETS[name].num_parameters()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert shapes == PRESETS[name].parameter_shapes()
    assert len(shapes) == tensors


def test_bad_calls_are_refused():
    model = Transformer(preset("tiny", max_position_embeddings=8)).initialise(seed=0)
    with pytest.raises(RequestError, match="at least one token"):
        model(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(RequestError, match="got 9 tokens; need at most 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    cache = DenseCache(model.config, 1, 4)
    model(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    before = cache.keys.clone()
    with pytest.raises(RequestError, match="got 3 cached tokens and 2 new ones; need at most 4"):
        model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert torch.equal(before, cache.keys)
    assert cache.lengths.tolist() == [3]
