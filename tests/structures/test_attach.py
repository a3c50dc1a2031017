"""Attaching: what is found under each scheme, how it is judged, what comes back."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

from microllm import structures
from microllm.errors import EvidenceError, StructureError
from microllm.evidence.receipt import verify_chain
from microllm.evidence.timing import MIN_ROUND_S, TimingConfig
from microllm.structures import judge
from microllm.structures.schemes import SCHEMES
from tiny_hosts import FAMILIES, assert_same_state, make_host, state_of

LAYERS = 2
BRIEF = TimingConfig(pairs=2, control_pairs=0, round_s=MIN_ROUND_S, warmup_s=0.0, quick=True)
FUSED = {"residual_norm": 2 * LAYERS + 1, "attention_core": LAYERS}
PRODUCTS = {"qkv_pack": LAYERS, "linear_proj": LAYERS, "decoder_ffn": LAYERS, "lm_head": 1}
BOTH, DECODE = "decode prefill", "decode"
# Scheme -> what products are: kept, or bound for which bands.
TABLE = {
    "none": None, "bf16_structural": BOTH, "w8a16_decode": DECODE, "w4a16_decode": DECODE, "fp8_static": BOTH,
    "fp8_static_keep_outliers": BOTH,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme_and_structure_give_bind_band_or_keep(family, scheme, ids, config):
    model = make_host(family)
    plan = structures.auto_swaps(model, lambda: model(ids), scheme=scheme, config=config)
    rope = {"qk_norm_rope" if family == "qwen3" else "qkv_rope": LAYERS}
    bands = {(seat.structure, " ".join(sorted(seat.form.bands))) for seat in plan.seats}
    expected = FUSED | rope | (PRODUCTS if TABLE[scheme] else {})
    assert Counter(seat.structure for seat in plan.seats) == expected
    assert plan.build.refused == []
    assert bands == {(name, BOTH if name in FUSED | rope else TABLE[scheme]) for name in expected}
    kept = Counter(key.split("|")[0] for key in plan.build.kept)
    assert kept == {"decoder_block": LAYERS} | ({} if TABLE[scheme] else PRODUCTS)
    formats = {spec.dtype for key, spec in plan.precision_spec.items() if key.startswith("decoder_ffn")}
    quantised = {"w8a16_decode": "int8", "w4a16_decode": "int4"}.get(scheme, "fp8_e4m3" if "fp8" in scheme else "fp32")
    assert formats == ({quantised} | ({"fp32"} if quantised.startswith("int") else set()) if TABLE[scheme] else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_attach_runs_its_gate_keeps_the_tokens_and_gives_the_host_back(family, ids, config):
    model = make_host(family)
    before, own = state_of(model), model.generate(ids, max_new_tokens=12, do_sample=False)
    plan = structures.attach(model, lambda: model(ids), scheme="bf16_structural", min_speedup=0, config=config)
    assert {"decoder_ffn", "qkv_pack", "residual_norm", "lm_head"} <= set(plan.units)
    for unit in [*plan.units.values(), plan.union]:
        assert [phase.phase for phase in unit.phases] == ["prefill", "decode_1", "decode_8"]
        for phase in unit.phases:
            assert phase.gate.null_identical
            assert phase.gate.control_moved
            assert phase.gate.metrics.top1_agreement == 1.0
            assert phase.gate.metrics.perplexity_change == pytest.approx(0, abs=1e-4)
            assert phase.ledger["fallbacks"] == 0
            assert phase.ledger["calls"] > 0
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), own)
    assert plan.summary()["clean"]
    assert plan.summary()["never_ran"] == 0
    plan.raise_on_fallback()
    text = structures.explain(plan)
    assert "decoder_block" in text
    assert "decided by the region family" in text
    plan.detach()
    plan.detach()
    assert_same_state(state_of(model), before)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), own)


@pytest.mark.parametrize("scheme", ["w8a16_decode", "fp8_static"])
def test_a_second_model_of_the_class_stays_bit_equal(scheme, ids, attached):
    model, other = make_host("qwen2"), make_host("qwen2", seed=1)
    wanted, before = other(ids).logits, state_of(other)
    plan = attached(model, scheme)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(other(ids).logits, wanted)
    assert_same_state(state_of(other), before)
    plan.detach()


def test_our_own_transformer_is_a_host_too(config):
    from microllm.config import ModelConfig
    from microllm.model import Transformer

    shape = ModelConfig(
        family="qwen3", vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Transformer(shape).initialise(0, std=0.2).eval().requires_grad_(False)
    ids = torch.arange(12)[None]
    wanted = model(ids)
    plan = structures.attach(model, lambda: model(ids), scheme="bf16_structural", min_speedup=0, config=config)
    assert Counter(seat.structure for seat in plan.seats) == {
        "residual_norm": 5, "qkv_pack": 2, "linear_proj": 2, "decoder_ffn": 2,
    }  # fmt: skip
    assert "multiplies by its table" in structures.explain(plan)
    assert torch.allclose(model(ids), wanted, atol=1e-4)
    assert plan.summary()["clean"]
    plan.detach()
    assert torch.equal(model(ids), wanted)


def test_three_ways_to_give_samples_calibrate_alike_on_every_door(ids, config):
    model = make_host("llama")
    samples = [ids, ids.roll(3), ids.flip(1)]
    ways = [
        ([lambda s=s: model(s) for s in samples], None),
        (lambda s: model(s), samples),
    ]  # fmt: skip
    specs = []
    for forward, observations in ways:
        plan = structures.auto_swaps(model, forward, scheme="fp8_static", observations=observations, config=config)
        specs.append(plan.precision_spec)
        assert plan.notes["calibration"]["samples"] == 3
        assert plan.notes["calibration"]["method"] == "percentile"
    assert specs[0] == specs[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        plan = structures.attach(
            model, lambda s: model(s), scheme="fp8_static", observations=samples, heldout=[ids.roll(5)], min_speedup=0,
            config=config,
        )  # fmt: skip
    assert plan.notes["calibration"]["judged_on"] == "heldout"
    assert plan.precision_spec == specs[0]
    plan.detach()
    single = structures.auto_swaps(model, lambda: model(ids), scheme="fp8_static", config=config)
    assert single.notes["calibration"]["method"] == "single_sample"
    assert single.notes["calibration"]["judged_on"] == "fit"


def test_fp8_producer_and_consumers_are_one_unit(ids, config):
    model = make_host("llama")
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="fp8_static", config=config)
    units = judge.units_of(plan.seats)
    assert set(units) == {
        "fp8: residual_norm -> decoder_ffn -> qkv_pack", "linear_proj", "lm_head", "qkv_rope", "attention_core",
    }  # fmt: skip


def test_floors_refuse_and_leave_the_model_untouched(ids, config):
    model = make_host("llama")
    before = state_of(model)
    with pytest.warns(RuntimeWarning, match="nothing was attached"):
        plan = structures.attach(
            model, lambda: model(ids), scheme="none", floors={"kl": -1.0}, min_speedup=0, config=config
        )  # fmt: skip
    assert not plan.active
    assert plan.seats == []
    assert "need at most -1.0" in structures.explain(plan)
    assert_same_state(state_of(model), before)
    with pytest.raises(EvidenceError, match="floor"):
        structures.attach(
            model, lambda: model(ids), scheme="none", floors={"beauty": 1.0}, min_speedup=0, config=config
        )
    assert_same_state(state_of(model), before)


@pytest.mark.slow
def test_a_speed_that_no_unit_has_binds_nothing(ids, config):
    model = make_host("llama", num_hidden_layers=1)
    with pytest.warns(RuntimeWarning, match="nothing was attached"):
        plan = structures.attach(
            model, lambda: model(ids), scheme="none", min_speedup=50.0, config=replace(config, timing=BRIEF)
        )
    assert all("times the host's speed; need 50" in reason for reason in plan.left.values())
    assert plan.receipt.body["units"]["residual_norm"]["phases"][0]["ratio"] > 0


def test_a_unit_that_loses_a_phase_keeps_the_other_band(ids, config, monkeypatch):
    model = make_host("llama")
    phase = judge.Judge._phase

    def slow_prefill(self, each, seats):
        result = phase(self, each, seats)
        return (
            result.model_copy(update={"reasons": ("slower",)}) if each.band == "prefill" and len(seats) < 6 else result
        )

    monkeypatch.setattr(judge.Judge, "_phase", slow_prefill)
    plan = structures.attach(model, lambda: model(ids), scheme="bf16_structural", min_speedup=0, config=config)
    narrow = {seat.structure for seat in plan.seats if seat.form.bands == {"decode"}}
    assert narrow == {
        "qkv_pack",
        "linear_proj",
        "decoder_ffn",
        "lm_head",
        "qkv_rope",
        "attention_core",
        "residual_norm",
    }
    model(ids)
    assert plan.summary()["calls"] == 0
    assert plan.summary()["by_band"] > 0
    assert plan.summary()["fallbacks"] == 0
    plan.detach()


def test_own_phases_are_judged_by_name(ids, config):
    model = make_host("llama")
    phases = {"long": lambda: model(ids), "short": lambda: model(ids[:, :3])}
    plan = structures.attach(
        model, lambda: model(ids), scheme="none", min_speedup=0, config=replace(config, phases=phases)
    )  # fmt: skip
    assert [p.phase for p in plan.union.phases] == ["long", "short"]
    plan.detach()


def test_an_exception_in_the_middle_leaves_the_model_untouched(ids, config, monkeypatch):
    model = make_host("llama")
    before, calls = state_of(model), []

    def forward():
        calls.append(1)
        if len(calls) == 6:
            raise ZeroDivisionError
        return model(ids)

    with pytest.raises(ZeroDivisionError):
        structures.attach(model, forward, scheme="bf16_structural", min_speedup=0, config=config)
    assert_same_state(state_of(model), before)


def test_the_receipt_digests_metrics_and_verdict(ids, config, tmp_path):
    model = make_host("llama", num_hidden_layers=1)
    plan = structures.attach(model, lambda: model(ids), scheme="none", min_speedup=0, config=config)
    plan.detach()
    path = plan.save_receipt(tmp_path)
    plan.save_receipt(tmp_path)
    lines = path.read_text().splitlines()
    assert verify_chain(lines) == []
    body = json.loads(lines[0])["body"]
    assert body["null_identical"] == {"prefill": True, "decode_1": True, "decode_8": True}
    assert body["structures"]["residual_norm@1"]
    for part in ('"top1_agreement":1.0', '"seats":["residual_norm', '"control_moved":true'):
        assert part in lines[0]
        assert verify_chain([lines[0].replace(part, part[:-1] + "0" + part[-1], 1), lines[1]])


def test_precision_specs_say_where_a_scale_comes_from(ids, config):
    model = make_host("llama")
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="fp8_static", config=config)
    spec = plan.precision_spec["decoder_ffn|model.layers.0.mlp|act_after_mul"]
    assert (spec.dtype, spec.granularity, spec.source, spec.samples) == ("fp8_e4m3", "per_tensor", "calibration", 1)
    seen = []
    hook = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids)
    hook.remove()
    assert spec.scale == pytest.approx(float(seen[0].abs().max()) / 448)
    weight = plan.precision_spec["lm_head|lm_head|w"]
    assert (weight.granularity, weight.source) == ("per_channel", "weights")


def test_what_may_not_be_attached_to_is_refused(ids, config):
    with pytest.raises(StructureError, match="no binding fits"):
        structures.auto_swaps(torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), lambda: None, config=config)
    model = make_host("llama")
    with pytest.raises(StructureError, match="calls none of the model's blocks"):
        structures.auto_swaps(model, lambda: None, scheme="none", config=config)
    with pytest.raises(StructureError, match="need auto or one of none"):
        structures.auto_swaps(model, lambda: model(ids), scheme="w2", config=config)
    with pytest.raises(StructureError, match="statistics"):
        structures.auto_swaps(model, lambda: model(ids), scheme=object(), config=config)  # pyright: ignore
    plan = structures.auto_swaps(model, lambda: model(ids), scheme="none", config=config)
    with pytest.raises(StructureError, match="fallback or raise"):
        plan.activate(on_guard_fail="shrug")  # pyright: ignore
    plan.activate()
    with pytest.raises(StructureError, match="attached already"):
        structures.auto_swaps(model, lambda: model(ids), scheme="none", config=config)
    plan.detach()
