"""Alignment: it passes where ours is right, and names layer and substage where a fault was planted."""

import json
import sys
from dataclasses import replace

import pytest
import torch
import transformers

from microllm import ops
from microllm.errors import CheckpointError, ConfigError, EvidenceError, MissingExtraError
from microllm.io.resolve import resolve_model
from microllm.lab import align
from microllm.lab.align import AlignConfig, run_align
from microllm.lab.align_report import AlignReport, GreedyCheck
from microllm.lab.hf_twin import cast_twin, generate_greedily, load_twin
from microllm.model.rotary import Rotary
from microllm.step import DenseCache

TRAINED = ("tiny-qwen2", "tiny-qwen3")
RANDOM = ("llama", "qwen2", "qwen3")


def token_ids(count, vocab=97):
    return tuple(torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(3)).tolist())


def held_out_ids(directory, count):
    from microllm.io.tokenizer import load_tokenizer
    from tiny_models import held_out_text

    return tuple(load_tokenizer(resolve_model(str(directory))).encode(held_out_text()[:4000])[:count])


@pytest.fixture(scope="module")
def model_and_tokens(random_model, trained_model):
    """Return a function from a model's name to its directory and the tokens to compare on."""

    def get(name, count=64):
        if name in TRAINED:
            directory = trained_model(name)
            return directory, held_out_ids(directory, count)
        return random_model(name), token_ids(count)

    return get


def run(directory, tokens, *, num_greedy=8, **changes):
    return run_align(AlignConfig(model=str(directory), tokens=tokens, num_greedy=num_greedy, **changes))


def sites(rows):
    return {row.site for row in rows if row.kind == "output"}


# ---- what is right passes


@pytest.mark.parametrize("name", RANDOM + TRAINED)
def test_every_family_is_aligned_in_fp32_and_bf16_in_both_modes(name, model_and_tokens):
    directory, tokens = model_and_tokens(name)
    report = run(directory, tokens, epsilon=0.1)
    assert report.passed, report.verdict
    assert report.verdict.startswith("align: pass — 3 layers; fp32 logits max |Δ| ")
    assert [(r.dtype, r.mode) for r in report.runs] == [
        ("fp32", "free"), ("fp32", "teacher"), ("bf16", "free"), ("bf16", "teacher"),
    ]  # fmt: skip
    parts = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    parts += ["self_attn.q_norm", "self_attn.k_norm"] if name.endswith("qwen3") else []
    expected = {f"layers.{n}.{part}" for n in range(3) for part in parts} | {f"layers.{n}" for n in range(3)}
    expected |= {"embed_tokens", "norm", "root"} | (set() if name.endswith("qwen2") else {"lm_head"})
    for one in report.runs:
        assert sites(one.comparison.rows) == expected
        assert one.logits.num_positions == 64
    assert report.runs[0].logits.error.max_abs <= 2e-4
    assert report.greedy[0].tokens == report.greedy[0].reference_tokens
    assert len(report.greedy[0].tokens) == 8
    assert all(split.margin < 0.1 for one in report.runs for split in one.logits.splits)


@pytest.mark.parametrize("name", TRAINED)
def test_the_trained_models_have_learnt_their_text(name, trained_model):
    directory = trained_model(name)
    twin = load_twin(resolve_model(str(directory)))
    ids = torch.tensor([held_out_ids(directory, 200)])
    with torch.no_grad():
        logits = twin(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    assert loss < 5.0  # guessing costs 6.93
    margins = logits.topk(2).values
    assert (margins[..., 0] - margins[..., 1]).median() > 0.1  # ε of the test above
    if name == "tiny-qwen2":
        biases = [p for n, p in twin.named_parameters() if n.endswith("k_proj.bias")]
        assert all(25 < bias.abs().max() < 40 for bias in biases)


@torch.no_grad()
def test_a_cast_twin_is_what_transformers_loads_in_bf16(random_model):
    source = resolve_model(str(random_model("llama")))
    cast, loaded = cast_twin(load_twin(source), torch.bfloat16), load_twin(source, dtype=torch.bfloat16)
    ids = torch.tensor([token_ids(100)])
    assert torch.equal(cast(ids).logits, loaded(ids).logits)
    # why not twin.bfloat16(): that rounds the rotary frequencies too
    assert not torch.equal(load_twin(source).bfloat16()(ids).logits, loaded(ids).logits)


def test_generation_does_not_stop_early_and_returns_its_logits(trained_model):
    directory = trained_model("tiny-qwen2")
    twin = load_twin(resolve_model(str(directory)))
    tokens, logits = generate_greedily(twin, list(held_out_ids(directory, 20)), 12)
    assert len(tokens) == len(logits) == 12
    assert tokens == logits.argmax(-1).tolist()


# ---- planted faults


def perturbed(model):
    align.perturb_weight(model, "layers.1.self_attn.v_proj")


def wrong_rope_base(model):
    rope = replace(model.config.rope, theta=model.config.rope.theta * 3)
    model.rotary = Rotary(rope, model.config.head_dim, 128, torch.device("cpu"))


def swapped_matrices(model):
    mlp = model.layers[1].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


def swapped_roles(model):
    mlp = model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(ops.swiglu(mlp.up_proj(x), mlp.gate_proj(x)))


def dropped_bias(model):
    linear = model.layers[2].self_attn.q_proj
    linear.forward = lambda x: ops.linear(x, linear.weight)


def low_accumulation(model):
    """Sum a product's terms in bf16, four at a time, as a careless kernel would."""
    linear = model.layers[1].mlp.down_proj

    def forward(x):
        total = 0
        for at in range(0, x.shape[-1], 4):
            x_part, w_part = x[..., at : at + 4].bfloat16(), linear.weight[:, at : at + 4].bfloat16()
            total = (total + (x_part @ w_part.T)).bfloat16()
        return total.to(x.dtype)

    linear.forward = forward


FAULTS = {
    "perturbed weight": (perturbed, RANDOM + TRAINED, "layers.1", "layers.1.self_attn.v_proj"),
    "wrong rope base": (wrong_rope_base, RANDOM + TRAINED, "layers.0", "layers.0.self_attn"),
    "swapped gate and up matrices": (swapped_matrices, RANDOM, "layers.1", "layers.1.mlp.gate_proj"),
    "swapped gate and up roles": (swapped_roles, RANDOM, "layers.1", "layers.1.mlp"),
    "dropped bias": (dropped_bias, ("qwen2", "tiny-qwen2"), "layers.2", "layers.2.self_attn.q_proj"),
    "bf16 accumulation": (low_accumulation, RANDOM + TRAINED, "layers.1", "layers.1.mlp.down_proj"),
}
CASES = [(fault, name) for fault, (_, names, *_) in FAULTS.items() for name in names]


@pytest.mark.parametrize(("fault", "name"), CASES)
def test_a_planted_fault_is_localised(fault, name, model_and_tokens, monkeypatch):
    plant, _, layer, substage = FAULTS[fault]
    honest = align.load_model

    def faulty(*args, **kwargs):
        model = honest(*args, **kwargs)
        plant(model)
        return model

    monkeypatch.setattr(align, "load_model", faulty)
    directory, tokens = model_and_tokens(name)
    report = run(directory, tokens, num_greedy=2)
    assert not report.passed
    assert (report.fault.layer, report.fault.substage) == (layer, substage)
    assert f"FAIL — {layer}: " in report.verdict
    number = int(layer.removeprefix("layers."))
    for one in report.runs:
        if (fault, one.mode) == ("bf16 accumulation", "free") and one.dtype == "bf16":
            continue  # within the noise of a free run in bf16; teacher forcing shows it
        fault_found = one.comparison.fault
        assert (fault_found.layer, fault_found.substage) == (layer, substage), (one.dtype, one.mode)
        before = [row for row in one.comparison.layers() if int(row.site.split(".")[1]) < number]
        assert all(row.status == "pass" for row in before)
        if one.mode == "teacher" and fault != "wrong rope base":
            after = [row for row in one.comparison.rows if row.site.startswith(f"layers.{number + 1}")]
            assert all(row.status == "pass" for row in after), "the error leaked into the next block"


def test_a_fault_in_the_cache_alone_shows_in_the_greedy_tokens(trained_model, monkeypatch):
    honest = DenseCache.reserve
    monkeypatch.setattr(DenseCache, "reserve", lambda self, count: honest(self, count) - int(count == 1))
    directory = trained_model("tiny-qwen3")
    report = run(directory, held_out_ids(directory, 24), dtype="fp32")
    assert all(one.passed for one in report.runs)
    assert not report.passed
    assert report.fault is None
    assert "fp32 greedy tokens " in report.verdict
    assert "refused" in report.verdict


# ---- the demo


@pytest.mark.slow
def test_the_demo_is_aligned_and_its_report_is_written(demo_twin, tmp_path):
    config = AlignConfig(num_tokens=32, num_greedy=8, output=tmp_path)
    report = run_align(config, twin=demo_twin)
    assert report.passed, report.verdict
    assert report.num_layers == 30
    assert all(len(one.comparison.layers()) == 30 for one in report.runs)
    assert AlignReport.model_validate_json((tmp_path / "report.json").read_text()) == report
    page = (tmp_path / "report.md").read_text()
    assert report.verdict in page
    for layer in range(30):
        assert page.count(f"| layers.{layer} |") == 4
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"] == "pass"
    assert [stage["name"] for stage in manifest["stages"]][-1] == "report"


@pytest.mark.slow
def test_one_perturbed_weight_of_the_demo_is_found(demo_twin, tmp_path):
    config = AlignConfig(perturb="layers.7.mlp.up_proj", quick=True, output=tmp_path)
    report = run_align(config, twin=demo_twin)
    assert not report.passed
    assert (report.fault.layer, report.fault.substage) == ("layers.7", "layers.7.mlp.up_proj")
    assert "layers.7.mlp.up_proj" in report.verdict
    assert [len(report.tokens), len(report.runs), len(report.greedy[0].tokens)] == [32, 1, 8]
    assert "Perturbed on purpose: layers.7.mlp.up_proj.weight[" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "manifest.json").read_text())["status"] == "fail"


@pytest.mark.slow
def test_the_demo_is_aligned_up_to_512_tokens(demo_twin):
    report = run_align(AlignConfig(num_tokens=512), twin=demo_twin)
    assert report.passed, report.verdict
    assert report.runs[0].logits.error.max_abs <= 2e-4
    assert report.runs[0].logits.num_positions == 512


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 65}, "got 64 tokens, num_tokens=65"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"tokens": (1, 97)}, "of ids 1 to 97"),
        ({"tokens": (1, -1)}, "of ids -1 to 1"),
        ({"tokens": (1,) * 121}, "got 121 tokens"),
        ({"num_greedy": 0}, "and 0 greedy ones"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(changes, message, random_model):
    config = AlignConfig(model=str(random_model("llama")), **{"num_greedy": 8, "tokens": token_ids(64), **changes})
    with pytest.raises(EvidenceError, match=message):
        run_align(config)


def test_unmatched_work_is_refused(random_model):
    config = AlignConfig(model=str(random_model("llama")), tokens=token_ids(16))
    twin = load_twin(resolve_model(config.model))
    with pytest.raises(EvidenceError, match=r"do not fit, first embed_tokens.weight: .*bfloat16"):
        run_align(config, twin=cast_twin(twin, torch.bfloat16))
    other = load_twin(resolve_model(str(random_model("qwen3"))))
    with pytest.raises(EvidenceError, match=r"do not fit, first layers.0.self_attn.k_norm.weight"):
        run_align(config, twin=other)


def test_a_site_that_is_not_there_is_refused_with_a_near_one(random_model):
    config = AlignConfig(model=str(random_model("llama")), tokens=token_ids(16), perturb="layers.1.mlp.up")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        run_align(config)


def test_a_failed_stage_leaves_a_manifest_that_names_it(random_model, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise CheckpointError("got a broken file")

    monkeypatch.setattr(align, "load_twin", broken)
    (tmp_path / "report.json").write_text("of an older run")
    config = AlignConfig(model=str(random_model("llama")), tokens=token_ids(16), output=tmp_path)
    with pytest.raises(CheckpointError) as caught:
        run_align(config)
    assert caught.value.__notes__ == ["align failed in stage 'twin'"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"] == "error"
    assert [(s["name"], s["status"]) for s in manifest["stages"]] == [("tokens", "done"), ("twin", "error")]
    assert manifest["stages"][1]["error"] == "CheckpointError: got a broken file"
    assert not (tmp_path / "report.json").exists()


def test_missing_extras_are_named(random_model, tmp_path, monkeypatch):
    config = AlignConfig(model=str(random_model("llama")), tokens=token_ids(16), output=tmp_path)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtraError, match=r"microllm\[hf\]"):
            run_align(config)
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"microllm\[plot\]"):
            run_align(config)
        with pytest.raises(MissingExtraError, match=r"microllm\[hf\]"):
            load_twin(replace(resolve_model(config.model), kind="gguf"))


def test_a_model_that_transformers_does_not_load_is_refused(random_model, tmp_path, capfd):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text((random_model("llama") / "config.json").read_text())
    with pytest.raises(CheckpointError, match="which transformers does not load"):
        load_twin(resolve_model(str(directory)))
    level = transformers.utils.logging.get_verbosity()
    load_twin(resolve_model(str(random_model("llama"))))
    assert transformers.utils.logging.get_verbosity() == level
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert capfd.readouterr().err == ""


def test_a_refused_split_fails_and_an_accepted_one_is_told():
    from microllm.evidence.logits import greedy_splits

    logits = torch.zeros(3, 5)
    logits[:, 1], logits[:, 2] = 1.0, 0.9
    for epsilon, passed, word in ((0.05, False, "refused"), (0.2, True, "accepted")):
        splits = greedy_splits([(1, 2, 1)], [(1, 1, 1)], [logits], epsilon=epsilon)
        check = GreedyCheck(dtype="bf16", tokens=(1, 2, 1), reference_tokens=(1, 1, 1), epsilon=epsilon, splits=splits)
        assert check.passed is passed
        assert str(check) == f"1/3 equal (then a split at margin 0.100, ε {epsilon:g}: {word})"
