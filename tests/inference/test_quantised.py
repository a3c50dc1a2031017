"""Weights in codes: one set of them under the eager form, the plain engine and the fused pass, and what is refused."""

from dataclasses import replace

import pytest
import torch

from microllm import LLM, SamplingParams, load, ops
from microllm.config import preset
from microllm.errors import ConfigError, OperatorError
from microllm.inference import Engine, EngineConfig
from microllm.inference.own_engine import is_plain
from microllm.inference.quantised import QUANTISATIONS, QuantisedLinear, quantise, quantise_model
from microllm.model import Transformer
from microllm.ops.linear_codes import dequantised

FAMILIES = {
    "llama": {"tie_word_embeddings": True}, "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "tie_word_embeddings": False},
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = [GREEDY, replace(GREEDY, temperature=0.8, seed=3), replace(GREEDY, logprobs=1)]


def quantised(llm, kind, family="llama", dtype=torch.float32, device="cpu"):
    config = preset(
        "tiny", vocab_size=288, hidden_size=128, intermediate_size=320, max_position_embeddings=128, **FAMILIES[family]
    )
    model = Transformer(config, dtype=dtype, device=device).initialise(2, std=0.2).eval().requires_grad_(False)
    return LLM(quantise_model(model, kind), llm.tokenizer, name=family)


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_codes_are_near_the_weights(kind):
    w = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    w[3] = 0
    found = quantise(w, kind)
    off = found.linear(torch.eye(96)).T - w
    bound = {"int8": 1 / 254, "fp8": 1 / 16, "int4": 1 / 15}[kind] * w.abs().amax(dim=1, keepdim=True)
    assert (off.abs() <= bound + 1e-6).all()
    assert (off[3] == 0).all()
    assert found.first(5).linear(torch.eye(96)).T.equal(found.linear(torch.eye(96)).T[:5])


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_tiny_weights_keep_scales_above_0_in_fp16(kind):
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).half()
    w[3], w[4] = 0, w[4] * 1e-5
    found = quantise(w, kind)
    assert found.scale is not None
    assert (found.scale > 0).all()
    off = dequantised(found.weight, found.scale, found.minimum) - w.float()
    step = {"int8": 1 / 254, "fp8": 1 / 16, "int4": 1 / 15}[kind] * w.float().abs().amax(dim=1, keepdim=True)
    assert (off.abs() <= step + 6e-8).all()  # a step of fp16's smallest numbers


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_weights_that_are_no_number_are_refused(kind):
    w = torch.ones(4, 64)
    w[1, 2] = float("nan")
    with pytest.raises(OperatorError, match="need finite scales above 0"):
        quantise(w, kind)


@pytest.mark.parametrize(("kind", "family"), list(zip(QUANTISATIONS, FAMILIES, strict=True)))
def test_engines_give_the_tokens_of_the_eager_form(llm, prompts, kind, family):
    model = quantised(llm, kind, family)
    assert model.precision == kind
    assert is_plain(model.transformer)
    for params in KINDS:
        want = [c.token_ids for c in model.uncaptured().generate(prompts, params)]
        for steps in ("plain", "uncaptured"):
            engine = Engine(model, EngineConfig(max_rows=4, steps=steps, deterministic=False))
            assert [c.token_ids for c in engine.generate(prompts, params)] == want


def floats_of(llm):
    """Return the model whose floats are what the codes stand for."""
    coded, plain = llm.transformer, Transformer(replace(llm.config, tie_word_embeddings=False))
    modules = {path: m for path, m in coded.named_modules() if isinstance(m, QuantisedLinear)}
    others = {name: t for name, t in coded.state_dict().items() if name.rpartition(".")[0] not in modules}
    others |= {f"{path}.weight": dequantised(m.codes, m.scale, m.minimum) for path, m in modules.items()}
    plain.load_state_dict(others | {f"{p}.bias": m.bias for p, m in modules.items() if m.bias is not None})
    return LLM(plain.eval().requires_grad_(False), llm.tokenizer)


@pytest.mark.parametrize(("kind", "family"), list(zip(QUANTISATIONS, FAMILIES, strict=True)))
def test_engines_give_the_tokens_of_the_floats_that_codes_stand_for(llm, prompts, kind, family):
    model = quantised(llm, kind, family)
    floats = floats_of(model)
    for params in KINDS:
        want = [c.token_ids for c in floats.generate(prompts, params)]
        for deterministic in (False, True):
            engine = Engine(model, EngineConfig(max_rows=4, steps="uncaptured", deterministic=deterministic))
            assert [c.token_ids for c in engine.generate(prompts, params)] == want


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_memory_counts_codes_scales_and_a_table_beside_its_head(llm, kind):
    model = quantised(llm, kind)
    memory, config = Engine(model, EngineConfig(max_rows=1)).memory(), model.config
    assert not any(module.training for module in model.transformer.modules())
    table = config.vocab_size * config.hidden_size
    shapes = [shape for shape in config.parameter_shapes().values() if len(shape) == 2]
    layers = sum(shape[0] * shape[1] for shape in shapes) - table
    assert memory.code_bytes == (layers // 2 if kind == "int4" else layers) + table
    parts = [m.matrix for m in model.transformer.modules() if isinstance(m, QuantisedLinear)]
    assert memory.scale_bytes == sum(p.nbytes for m in parts for p in (m.scale, m.minimum) if p is not None) > 0
    floats = sum(p.nbytes for p in model.transformer.parameters()) + model.transformer.rotary.inv_freq_P.nbytes
    assert memory.weight_bytes == memory.code_bytes + memory.scale_bytes + floats > 4 * table


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_a_step_of_the_fused_pass_multiplies_by_codes_alone(llm, kind):
    engine = Engine(quantised(llm, kind), EngineConfig(max_rows=2, steps="uncaptured", deterministic=False))
    with ops.ledger() as ran:
        engine.generate([[5, 6, 7]], GREEDY)
        engine.generate([[5, 6, 7], [8]], GREEDY)
    products = {entry.op for entry in ran if "linear" in entry.op or "head" in entry.op}
    head = "linear_int8" if kind == "int4" else f"linear_{kind}"
    fused = {"linear_residual_codes", "norm_linear_codes", "norm_linear_swiglu_codes"}
    assert products == {head, f"linear_{kind}", *fused}


def test_a_second_engine_shares_the_codes_of_the_first(llm):
    model = quantised(llm, "int4")
    first, second = (Engine(model, EngineConfig(max_rows=2, steps="uncaptured")) for _ in range(2))
    for a, b in zip(first._runner.forward.blocks, second._runner.forward.blocks, strict=True):
        for name in ("weight", "scale", "minimum"):
            assert getattr(a.gate_up, name).data_ptr() == getattr(b.gate_up, name).data_ptr()
    layer = model.transformer.layers[0]
    assert layer.self_attn.q_proj.codes.data_ptr() == first._runner.forward.blocks[0].qkv.weight.data_ptr()
    assert first.memory().weight_bytes == second.memory().weight_bytes


def test_what_cannot_be_quantised_or_run_is_refused(llm):
    with pytest.raises(ConfigError, match="got a matrix of 40 columns; need a multiple of 32"):
        quantise(torch.ones(4, 40), "int4")
    with pytest.raises(ConfigError, match="got 'int3'; need one of int8, int4, fp8"):
        quantise_model(Transformer(preset("tiny")), "int3")
    with pytest.raises(ConfigError, match=r"got precision 'fp8'; need auto or one of .*, int4 on a cpu"):
        load("demo", device="cpu", precision="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTISATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_codes_give_the_eager_tokens(llm, prompts, kind, family):
    model = quantised(llm, kind, family, device="cuda")
    for params in KINDS:
        want = [c.token_ids for c in model.uncaptured().generate(prompts, params)]
        assert [c.token_ids for c in model.generate(prompts, params)] == want
        engine = Engine(model, EngineConfig(max_rows=8))
        assert [c.token_ids for c in engine.generate(prompts, params)] == want


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_codes_in_bf16_repeat_themselves_and_stay_near_the_eager_form(llm, kind):
    model = quantised(llm, kind, dtype=torch.bfloat16, device="cuda")
    params = replace(GREEDY, logprobs=0)
    first = Engine(model, EngineConfig(max_rows=1)).generate([7] * 40, params)
    assert Engine(model, EngineConfig(max_rows=1)).generate([7] * 40, params).logprobs == first.logprobs
    ids = torch.tensor([[*[7] * 40, *first.token_ids]], device="cuda")
    logits = model.transformer(ids)[0, 39:-1].float().log_softmax(1)
    eager = [float(row[token]) for row, token in zip(logits, first.token_ids, strict=True)]
    assert [each.logprob for each in first.logprobs] == pytest.approx(eager, abs=0.3)
