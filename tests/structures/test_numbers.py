"""Formats, calibration, schemes and decisions: what they compute."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from microllm import ops, structures
from microllm.errors import CaptureRefused, GateRefused, StructureError
from microllm.evidence.receipt import append_receipt
from microllm.structures import calibration, decisions
from microllm.structures.capture import _judge
from microllm.structures.formats import Format, Matrix, int4_parts
from microllm.structures.schemes import Fp8Static, Point, Report, Statistic, WeightOnly
from tiny_hosts import make_host

LIMITS = {"int8": 1.2e-2, "int4": 0.11, "fp8": 3.5e-2}
"""Relative L2 of a normal matrix on each grid, with a fifth to spare."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "group"), [("int8", 0), ("int8", 64), ("int4", 32), ("int4", 64), ("fp8", 0)])
def test_a_format_keeps_weights_and_products(name, group, dtype):
    w, bias, x = torch.randn(96, 128).to(dtype), torch.randn(96).to(dtype), torch.randn(5, 128).to(dtype)
    matrix = Matrix(w, bias, Format(name, group))
    error = (matrix.dequantised().float() - w.float()).norm() / w.float().norm()
    assert 1e-4 < error < LIMITS[name]
    wanted = x.float() @ matrix.dequantised().float().T + bias.float()
    assert torch.allclose(matrix(x).float(), wanted, atol=1e-3 if dtype == torch.float32 else 0.3)
    assert matrix.num_bytes < 0.7 * w.numel() * 2 or (name == "int8" and dtype == torch.float32)
    zero = Matrix(torch.zeros(16, 64).to(dtype), None, Format(name, group))
    assert torch.equal(zero(x[:, :64]).float(), torch.zeros(5, 16))


def test_static_fp8_rounds_inputs_by_their_one_scale():
    w, x = torch.randn(64, 64), torch.randn(4, 64)
    matrix = Matrix(w, None, Format("fp8", x_amax=float(x.abs().max())))
    step = float(x.abs().max()) / 448
    rounded = (x / step).to(torch.float8_e4m3fn).float() * step
    assert torch.allclose(matrix(x), rounded @ matrix.dequantised().T, atol=1e-4)
    huge = matrix(x * 1000)  # saturated, not infinite
    assert huge.isfinite().all()


@pytest.mark.parametrize("bad", [Format("int8", 48), Format("int4", 16)])
def test_groups_that_do_not_divide_are_refused(bad):
    with pytest.raises(StructureError, match="groups of"):
        Matrix(torch.zeros(8, 64), None, bad)
    for refused in (lambda: Format("int3"), lambda: Format("fp8", x_amax=0.0)):  # pyright: ignore
        with pytest.raises(StructureError):
            refused()


def test_gptq_beats_rounding_on_inputs_that_hang_together():
    torch.manual_seed(0)
    mixed = torch.randn(64, 64) / 8
    x = torch.randn(4096, 64) @ mixed @ torch.diag(torch.logspace(0, 1, 64))
    w = torch.randn(48, 64)
    gram = x.T @ x / len(x)

    def error(parts):
        made = Matrix.of_parts(parts, None, Format("int4", 32), torch.float32).dequantised()
        return float(((made - w) @ x.T).norm() / (w @ x.T).norm())

    plain, searched = error(int4_parts(w, 32)), error(int4_parts(w, 32, gram))
    assert searched < 0.7 * plain


# ---- calibration


def test_samples_are_reduced_by_a_percentile_of_their_own_vectors():
    vectors = [np.array([float(i), 10.0 - i]) for i in range(5)]
    assert calibration.accumulate(vectors, 100).tolist() == [4.0, 10.0]
    assert calibration.accumulate(vectors, 50).tolist() == [2.0, 8.0]
    for bad in ([], [np.zeros(2), np.zeros(3)], [np.zeros((1, 2))]):
        with pytest.raises(StructureError):
            calibration.accumulate(bad, 99)
    with pytest.raises(StructureError):
        calibration.accumulate(vectors, 101)


def test_statistics_are_what_they_say():
    model, points = make_host("llama"), {}
    x = [torch.arange(8)[None], torch.arange(20, 30)[None]]
    seen = {}
    module = "model.layers.0.mlp.down_proj"
    hook = model.get_submodule(module).register_forward_pre_hook(lambda _, a: seen.setdefault(len(seen), a[0][0]))
    for ids in x:
        model(ids)
    hook.remove()
    wanted = {
        "tensor": (Statistic("amax"), max(float(s.abs().max()) for s in seen.values())),
        "channel": (Statistic("amax", "channel"), torch.stack([s.abs().amax(0) for s in seen.values()]).amax(0)),
        "moment": (Statistic("second_moment", "channel"), torch.cat(list(seen.values())).square().mean(0)),
        "gram": (Statistic("gram"), torch.cat(list(seen.values())).T @ torch.cat(list(seen.values())) / 18),
    }
    for name, (statistic, value) in wanted.items():
        points = [Point("decoder_ffn", "here", name, module)]
        found = calibration.calibrate(
            model, points, {f"here|{name}": statistic}, [lambda i=i: model(i) for i in x], percentile=100
        ).values[f"here|{name}"]
        assert torch.allclose(torch.as_tensor(found), torch.as_tensor(value), rtol=1e-4)


def test_what_cannot_be_measured_fails_before_any_sample(ids, config):
    class Wish:
        name = "wish"

        def statistics(self, points):
            return {points[0].key: Statistic("histogram", "tensor")}

        def decide(self, report):
            return {}

    model, calls = make_host("llama"), []

    def forward():
        calls.append(1)
        return model(ids)

    with pytest.raises(StructureError, match="teach the collector"):
        structures.auto_swaps(model, forward, scheme=Wish(), config=config)
    assert len(calls) == 1  # the one that discovers


def test_a_sample_that_misses_a_point_and_percentiles_are_refused(ids, config):
    model = make_host("llama")
    with pytest.raises(StructureError, match="misses"):
        structures.auto_swaps(
            model, [lambda: model(ids), lambda: model.model(ids)], scheme="fp8_static", config=config
        )  # fmt: skip
    for forward, observations in [([], None), ([1], None), (3, [1]), (lambda x: model(x), [])]:
        with pytest.raises(StructureError):
            structures.auto_swaps(model, forward, scheme="none", observations=observations, config=config)
    with pytest.raises(StructureError, match="percentile"):
        structures.auto_swaps(model, lambda: model(ids), scheme="none", config=replace(config, percentile=200.0))


def test_samples_are_picked_over_documents_and_positions():
    documents = [d for d in "abcd" for _ in range(10)]
    picked = calibration.stratified_indices(documents, 8)
    assert len(picked) == len(set(picked)) == 8
    assert {documents[i] for i in picked} == set("abcd")
    assert len({i % 10 for i in picked}) > 1
    assert calibration.stratified_indices(documents, 40) == list(range(40))
    assert len(calibration.stratified_indices(["a"] * 3, 2)) == 2
    for count in (0, 41):
        with pytest.raises(StructureError):
            calibration.stratified_indices(documents, count)


def test_outliers_are_warned_of_and_kept_by_the_scheme_that_says_so(ids, config):
    model = make_host("llama")
    model.model.layers[1].mlp.up_proj.weight *= 300
    kept = {}
    for scheme in (Fp8Static("fp8_static"), Fp8Static("keep", keep_outliers=True)):
        with pytest.warns(RuntimeWarning, match="above 20 medians"):
            plan = structures.auto_swaps(model, lambda: model(ids), scheme=scheme, config=config)
        assert any("layers.1.mlp|act_after_mul" in key for key in plan.notes["calibration"]["above_ceiling"])
        kept[scheme.name] = [key for key, reason in plan.build.kept.items() if "outliers" in reason]
    assert kept["fp8_static"] == []
    assert "decoder_ffn|model.layers.1.mlp" in kept["keep"]


def test_four_bits_by_size_and_rtn_beside_gptq(ids, config):
    scheme = WeightOnly("w4a16_decode", "int4")
    model = make_host("llama")
    plan = structures.auto_swaps(model, lambda: model(ids), scheme=scheme, config=config)
    spec = plan.precision_spec["decoder_ffn|model.layers.0.mlp|w_gate"]
    assert (spec.dtype, spec.group_size, spec.scheme) == ("int4", 32, "asymmetric")
    big = Report(candidates=[], values={}, num_parameters=2_000_000_000)
    assert scheme._product(_candidate(64), "int4", big).group == 64
    assert not scheme._product(_candidate(96), "int4", big).bind
    exact = structures.auto_swaps(
        model, lambda: model(ids), scheme=WeightOnly("gptq", "int4", gptq=True), config=config
    )
    assert exact.precision_spec["decoder_ffn|model.layers.0.mlp|w_gate"].method == "gptq"


def _candidate(width):
    class Fake:
        path, points = "here", {}
        weights = {"w": torch.zeros(8, width)}  # noqa: RUF012

    return Fake()


# ---- binding by hand


@pytest.mark.parametrize("name", ["decoder_ffn", "qkv_pack", "linear_proj", "lm_head", "residual_norm"])
def test_any_region_binds_by_hand(name):
    model = make_host("qwen2")
    layer = model.model.layers[0]
    module = {
        "decoder_ffn": layer.mlp, "qkv_pack": layer.self_attn, "linear_proj": layer.self_attn.o_proj,
        "lm_head": model.lm_head, "residual_norm": layer.input_layernorm,
    }[name]  # fmt: skip
    x = torch.randn(6, 64)
    bound = structures.get(name).bind(module, [x, 3 * x])
    assert bound.certification["worst_cosine"] > 0.9999
    assert bound.certification["samples"] == 2
    if name == "qkv_pack":
        found, wanted = torch.cat(bound(x), -1), torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
    else:
        found, wanted = bound(x), module(x)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert "forward" not in vars(module)


def test_rope_attention_and_a_whole_block_bind_by_hand():
    model = make_host("qwen3")
    layer = model.model.layers[0]
    draw = lambda *shape: torch.randn(shape)  # noqa: E731
    angles = {"cos": draw(1, 3, 8), "sin": draw(1, 3, 8)}
    heads = {"q": draw(1, 3, 4, 16), "k": draw(1, 3, 2, 16)}
    structures.get("qk_norm_rope").bind(layer.self_attn, [heads | angles])
    structures.get("qkv_rope").bind(make_host("llama").model.layers[0].self_attn, [heads | angles])
    cached = {"q": draw(2, 4, 1, 16), "k": draw(2, 2, 9, 16), "v": draw(2, 2, 9, 16)}
    attention = structures.get("attention_core").bind(
        layer.self_attn, [cached, cached | {"mask": draw(2, 1, 1, 9) > 0}]
    )
    assert attention.certification["worst_cosine"] > 0.9999
    block = {
        "x": draw(1, 2, 64), "cos": draw(16, 8), "sin": draw(16, 8), "keys": draw(1, 16, 2, 16),
        "values": draw(1, 16, 2, 16), "positions": torch.tensor([[4, 5]]),
    }  # fmt: skip
    assert structures.get("decoder_block").bind(layer, [block]).certification["worst_cosine"] > 0.9999
    one = block | {"x": draw(1, 1, 64), "positions": torch.tensor([[4]])}
    for format in ("float", "int8", "int4"):
        bound = structures.get("decoder_block").bind(
            layer, [one], format=format, group=32 if format == "int4" else 0, floor=0.97
        )
        with ops.ledger() as ran:
            bound(*one.values())
        assert (sum(ran.values()), bound.certification["worst_cosine"] > 0.97) == (5, True), (format, ran)
    odd = {"q": draw(1, 3, 4, 15), "k": draw(1, 3, 2, 15), "cos": draw(1, 3, 7), "sin": draw(1, 3, 7)}
    with pytest.raises(StructureError, match="qkv_rope@1"):
        structures.get("qkv_rope").bind(make_host("llama").model.layers[0].self_attn, [odd])


def test_binding_by_hand_refuses_below_its_floor_and_what_does_not_fit():
    model, x = make_host("llama", mlp_bias=True), torch.randn(4, 64)
    good = make_host("llama").model.layers[0].mlp
    with pytest.raises(GateRefused, match=r"need 0\.999999"):
        structures.get("decoder_ffn").bind(good, [x], floor=0.999999, format="int8")
    assert structures.get("decoder_ffn").bind(good, [x], floor=0.99, format="int8").certification["kernel"]
    structures.get("decoder_ffn").bind(good, [x], floor=0.99, format="fp8")
    with pytest.raises(StructureError, match="bias"):
        structures.get("decoder_ffn").bind(model.model.layers[0].mlp, [x])
    with pytest.raises(StructureError, match="D = 64"):
        structures.get("decoder_ffn").bind(good, [torch.randn(4, 63)])
    with pytest.raises(StructureError, match="calibration"):
        structures.get("decoder_ffn").bind(good, [])
    with pytest.raises(StructureError, match="pipeline"):
        structures.get("autoregressive_decode_pipeline")


# ---- decisions


def test_a_decision_is_taken_a_pin_goes_first_and_an_unknown_name_falls_through(tmp_path, ids, config):
    model = make_host("llama")
    host = structures.auto_swaps(model, lambda: model(ids), scheme="none", config=config).host
    family = "decoder_layer_decode"
    assert decisions.resolve(family, host, store=tmp_path) == decisions.Resolution("seats", "default")
    entry = decisions.record(family, "chain", {"seats": 2.0, "chain": 1.0}, device="cpu", store=tmp_path)
    assert decisions.resolve(family, host, store=tmp_path).winner == "chain"
    own = decisions.signature(host)
    decisions.record(family, "seats", {}, device="cpu", signature=own, store=tmp_path)
    assert decisions.resolve(family, host, store=tmp_path).winner == "seats"  # this host's own goes before any's
    assert decisions.resolve(family, host, pin="chain", store=tmp_path).source == "pin"
    found = decisions.resolve(family, host, pin="warp", store=tmp_path)
    assert (found.winner, found.source) == ("seats", "decision")
    assert found.fell_through == ("pin warp: 'warp' is no candidate",)
    for winner, times in [("warp", {}), ("seats", {"wrap": 1.0})]:
        with pytest.raises(StructureError, match="declared candidates"):
            decisions.record(family, winner, times, device="cpu", store=tmp_path)
    with pytest.raises(StructureError, match="need one of decoder_layer_decode"):
        decisions.record("layer", "seats", {}, device="cpu", store=tmp_path)
    other = tmp_path / "other"
    foreign = entry.model_copy(update={"device": "Another GPU"})
    foreign = foreign.model_copy(update={"digest": foreign.compute_digest()})
    decisions._append(foreign, other)
    assert decisions.resolve(family, host, store=other).source == "default"
    assert decisions.export_decisions(tmp_path / "all.jsonl", tmp_path) == 2
    assert decisions.import_decisions(tmp_path / "all.jsonl", other) == {"imported": 2, "kept_local": 0, "entries": 2}
    assert decisions.import_decisions(tmp_path / "all.jsonl", other)["kept_local"] == 2
    file = tmp_path / "decisions.jsonl"
    file.write_text(file.read_text().replace('"chain":1.0', '"chain":9.0'))
    with pytest.raises(StructureError, match="digest"):
        decisions.resolve(family, host, store=tmp_path)


def test_auto_takes_a_receipt_that_passed_and_nothing_else(tmp_path, ids, config):
    model, mine = make_host("llama"), replace(config, store=tmp_path)
    plan = structures.auto_swaps(model, lambda: model(ids), config=mine)
    assert plan.notes["scheme"] == {"name": "bf16_structural", "source": "default", "fell_through": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        judged = structures.attach(model, lambda: model(ids), scheme="w8a16_decode", min_speedup=0, config=mine)
    judged.detach()
    judged.save_receipt(tmp_path)
    plan = structures.auto_swaps(model, lambda: model(ids), config=mine)  # no ratio: it was not timed
    assert plan.notes["scheme"]["name"] == "bf16_structural"
    body = judged.receipt.body
    for ratio, agreement, wanted in [(1.3, 0.94, "bf16_structural"), (1.3, 0.99, "w8a16_decode")]:
        phases = [
            p | {"ratio": ratio, "gate": p["gate"] | {"metrics": p["gate"]["metrics"] | {"top1_agreement": agreement}}}
            for p in body["union"]["phases"]
        ]
        append_receipt(
            tmp_path / "receipts.jsonl", "attach", body | {"union": body["union"] | {"phases": phases}},
            judged.receipt.environment,
        )  # fmt: skip
        plan = structures.auto_swaps(model, lambda: model(ids), config=mine)
        assert plan.notes["scheme"]["name"] == wanted
    file = tmp_path / "receipts.jsonl"
    file.write_text(file.read_text().replace('"top1_agreement":0.94', '"top1_agreement":0.99'))
    plan = structures.auto_swaps(model, lambda: model(ids), config=mine)
    assert plan.notes["scheme"]["name"] == "bf16_structural"
    assert "digest" in plan.notes["scheme"]["fell_through"][0]


def test_a_captured_stage_whose_output_is_only_scaled_wrongly_is_found():
    stage = SimpleNamespace(replay=lambda: torch.ones(4), certification={})
    with pytest.raises(CaptureRefused, match=r"error 5\.00e-01"):
        _judge(stage, lambda: 2 * torch.ones(4), {}, lambda: None, 0.999)
    assert stage.certification["cosine"] == pytest.approx(1)
    _judge(stage, lambda: 1.01 * torch.ones(4), {}, lambda: None, 0.999)
