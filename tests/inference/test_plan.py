"""The plan gives what the Transformer gives: every family, prompts in chunks, one token at a time, batches."""

import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from microllm import SamplingParams, load
from microllm.config import ModelConfig
from microllm.errors import ConfigError, RequestError
from microllm.inference import packed_file, plan_weights
from microllm.inference.plan import Plan
from microllm.inference.plan_loading import is_four_bit, pack_checkpoint, probe_wide_dtype
from microllm.io.checkpoint import open_checkpoint, save_checkpoint
from microllm.io.demo import DEMO_SHA256
from microllm.io.gguf import hf_name
from microllm.io.resolve import ModelSource, resolve_model
from microllm.lab.quality import parse_quality_row
from microllm.model import Transformer, load_model
from microllm.model.transformer import Linear
from microllm.ops.packed import rounded

CONTEXT = 320
TINY = ModelConfig(
    family="llama", vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
)  # fmt: skip
FAMILIES = {
    "llama": TINY,
    "llama untied, biased": replace(TINY, tie_word_embeddings=False, qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen2": replace(TINY, family="qwen2", qkv_bias=True),
    "qwen3": replace(TINY, family="qwen3", qk_norm=True, head_dim=32, num_key_value_heads=4),
}
TOLERANCE = {"fp32": 2e-5, "bf16": 0.05, "int8": 0.05, "int4": 0.05}

OTHER_PROCESSOR = """
import json, sys
from pathlib import Path
import torch
from microllm.inference.plan import Plan
from microllm.inference.plan_loading import pack_checkpoint
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import ModelSource

found, ids = {}, torch.arange(40)[None]
for precision in ("fp32", "int4"):
    checkpoint = open_checkpoint(ModelSource("tiny", Path(sys.argv[1]), "directory"))
    plan = Plan(pack_checkpoint(checkpoint, precision, wide_dtype=torch.float32))
    cache = plan.new_cache(1, 41)
    logits = plan(ids, cache=cache)[0, -1], plan(ids[:, :1], cache=cache)[0, -1]
    found[precision] = [plan.weights.kernels, torch.stack(logits).tolist()]
print(json.dumps(found))
"""


def checkpoint_of(config, directory, seed=0):
    model = Transformer(config).initialise(seed, std=0.2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    save_checkpoint(directory, config, model.state_dict())
    return open_checkpoint(ModelSource("tiny", directory, "directory"))


def write_gguf(config, path):
    """Write a model as llama.cpp's converter does: layers in q4_1, tables in q8_0, llama's q and k rows permuted."""
    state = Transformer(config).initialise(0, std=0.15).state_dict()
    writer = gguf.GGUFWriter(path, config.family)
    for key, value in {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "context_length": CONTEXT,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
    }.items():  # fmt: skip
        writer.add_uint32(f"{config.family}.{key}", value)
    writer.add_float32(f"{config.family}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm")
    parts += ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    names += [f"blk.{layer}.{part}.weight" for layer in range(config.num_hidden_layers) for part in parts]
    for name in names:
        tensor = state.get(hf_name(name).removeprefix("model."))
        if tensor is None:
            continue
        if config.family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            halves = tensor.view(-1, 2, config.head_dim // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        kind = gguf.GGMLQuantizationType["Q4_1" if name.startswith("blk") else "Q8_0"]
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plan_of(checkpoint, precision):
    wide = torch.float32 if precision == "fp32" else torch.bfloat16
    return Plan(pack_checkpoint(checkpoint, precision, wide_dtype=wide), wide_dtype=wide)


def rounded_model(checkpoint, precision):
    """Return the model with each matrix rounded as the plan rounds it; the table stays as it is."""
    model = load_model(checkpoint)
    head = model.head_weight_VD.detach().clone()
    if precision in ("int8", "int4"):
        with torch.no_grad():
            for layer in model.layers:
                for matrix in layer.parameters():
                    if matrix.dim() == 2:
                        matrix.copy_(rounded(matrix, 4 if precision == "int4" else 8))
        model.lm_head = Linear(model.config.hidden_size, model.config.vocab_size, bias=False, like=head)
        model.lm_head.weight = torch.nn.Parameter(rounded(head, 8), requires_grad=False)
    return model


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(params=list(FAMILIES))
def family(request, tmp_path):
    checkpoint = checkpoint_of(FAMILIES[request.param], tmp_path / "m")
    return checkpoint, load_model(checkpoint)


@pytest.mark.parametrize("precision", list(TOLERANCE))
@torch.no_grad()
def test_prompts_and_single_tokens_give_the_models_logits(family, precision):
    checkpoint, model = family[0], rounded_model(family[0], precision)
    plan, ids = plan_of(checkpoint, precision), torch.randint(0, 160, (1, 300))
    expected = model(ids)[0]
    assert relative(plan(ids)[0], expected) < TOLERANCE[precision]
    cache, found = plan.new_cache(1, 300), []
    for start, end in [(0, 1), (1, 131), (131, 140), *((i, i + 1) for i in range(140, 300))]:
        found.append(plan(ids[:, start:end], cache=cache)[0])
    assert relative(torch.cat(found), expected) < TOLERANCE[precision]


@torch.no_grad()
def test_rows_of_a_batch_keep_to_themselves(family):
    checkpoint, model = family
    plan, ids = plan_of(checkpoint, "fp32"), torch.randint(0, 160, (3, 12))
    lengths = torch.tensor([12, 5, 9])
    caches = plan.new_cache(3, 40), model.new_cache(3, 40)
    for last_only in (True, False):
        found, expected = (
            m(ids, cache=c, num_tokens_B=lengths, last_only=last_only)
            for m, c in zip((plan, model), caches, strict=True)
        )
        real = torch.ones(3, 12, dtype=torch.bool) if last_only else torch.arange(12) < lengths[:, None]
        assert relative(found[real[:, : found.shape[1]]], expected[real[:, : found.shape[1]]]) < 2e-5
    for cache in caches:
        cache.take([2, 0])
    assert relative(plan(ids[:2, :1], cache=caches[0]), model(ids[:2, :1], cache=caches[1])) < 2e-5
    for cache in caches:
        cache.take([1])
    for token in range(4):
        one = ids[:1, token : token + 1]
        assert relative(plan(one, cache=caches[0]), model(one, cache=caches[1])) < 2e-5


def test_a_step_goes_with_its_cache_and_refuses_a_full_one(tmp_path):
    plan = plan_of(checkpoint_of(TINY, tmp_path / "m"), "fp32")
    cache = plan.new_cache(1, 2)
    for _ in range(2):
        plan(torch.tensor([[3]]), cache=cache)
    with pytest.raises(RequestError, match="make the cache larger"):
        plan(torch.tensor([[3]]), cache=cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert not plan._steps
    with pytest.raises(RequestError, match="at least one token"):
        plan(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(RequestError, match=str(CONTEXT)):
        plan(torch.zeros(1, CONTEXT + 1, dtype=torch.int64))


def test_two_caches_do_not_know_each_other(tmp_path):
    plan = plan_of(checkpoint_of(TINY, tmp_path / "m"), "int4")
    ids = torch.randint(0, 160, (2, 8))
    alone = []
    for row in ids:
        cache = plan.new_cache(1, 8)
        alone.append(torch.stack([plan(token.view(1, 1), cache=cache)[0, 0] for token in row]))
    caches = [plan.new_cache(1, 8) for _ in range(2)]
    mixed = [[plan(row[t].view(1, 1), cache=c)[0, 0] for row, c in zip(ids, caches, strict=True)] for t in range(8)]
    for row in range(2):
        assert torch.equal(torch.stack([step[row] for step in mixed]), alone[row])


def test_non_finite_weights_reach_the_logits_and_no_exception(tmp_path):
    checkpoint = checkpoint_of(TINY, tmp_path / "m")
    plan = plan_of(checkpoint, "fp32")
    for value in (torch.nan, torch.inf):
        plan.weights.layers[0].input_norm[0] = value
        cache = plan.new_cache(1, 4)
        assert not plan(torch.tensor([[3, 4]]), cache=cache, last_only=True).isfinite().all()
        assert not plan(torch.tensor([[3]]), cache=cache).isfinite().all()


# ---- the real model, and its packed form on the disk


@pytest.fixture(scope="module")
def packed_demo(tmp_path_factory):
    """The demo with a cache of packed weights of its own."""
    home = tmp_path_factory.mktemp("packed")
    source = resolve_model("demo")
    file = packed_file.PackedFile(home, source.path, "int4")
    weights = pack_checkpoint(open_checkpoint(source), "int4", wide_dtype=torch.bfloat16, packed_file=file)
    return home, source, weights


def test_auto_takes_the_demos_blocks_as_they_are(demo):
    checkpoint = open_checkpoint(resolve_model("demo"))
    assert is_four_bit(checkpoint)
    llm = load("demo", device="cpu")
    assert (llm.precision, llm.dtype) == ("int4", torch.float32)
    assert llm.model.weights.kernels == {"torch int4": 120, "torch int4 twice": 1}
    params = SamplingParams(temperature=0, max_tokens=12)
    text = "Question: What is the capital of France?\nAnswer: The capital of France is"
    assert "Paris" in llm.generate(text, params).text
    assert llm.generate(text, params).token_ids == llm.generate(text, params).token_ids
    assert isinstance(demo.model, Plan)
    with pytest.raises(ConfigError, match="need fp32 or bf16"):
        _ = llm.transformer


def test_what_auto_takes_for_the_demo_has_passed_the_quality_gate():
    lines = (Path(__file__).parents[2] / "lab" / "rows" / "quality.jsonl").read_text().splitlines()
    latest = {row.way: row for row in map(parse_quality_row, lines) if row.precision == "int4"}
    assert latest.keys() == {"decode", "prefill"}
    assert all(row.passed and row.model_sha256 == DEMO_SHA256 for row in latest.values())


def test_the_tokens_are_those_of_all_logits(packed_demo):
    """Greedy decoding looks at the largest logit alone; asked for log-probabilities it looks at all of them."""
    llm = load("demo", device="cpu")
    for text in ("The capital of France is", "Once upon a time", "def fibonacci(n):"):
        short = SamplingParams(temperature=0, max_tokens=30)
        whole = SamplingParams(temperature=0, max_tokens=30, logprobs=0)
        assert llm.generate(text, short).token_ids == llm.generate(text, whole).token_ids


def test_a_second_load_packs_nothing_and_gives_the_same_bits(packed_demo, monkeypatch):
    home, source, weights = packed_demo
    for name in ("int4_planes", "half_planes", "quantised_planes"):
        monkeypatch.setattr(plan_weights, name, lambda *_: pytest.fail("packed again"))
    again = packed_file.PackedFile(home, source.path, "int4")
    loaded = pack_checkpoint(open_checkpoint(source), "int4", wide_dtype=torch.bfloat16, packed_file=again)
    ids = torch.tensor([[1, 500, 9000]])
    first, second = (Plan(w, wide_dtype=torch.bfloat16)(ids) for w in (weights, loaded))
    assert torch.equal(first, second)
    assert [p.name for p in home.iterdir()] == [again.path.name]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "a flipped bit", "empty", "another key", "gone"])
def test_a_damaged_packed_file_is_made_anew(damage, tmp_path):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"some model")
    planes, shape = (torch.ones(16, 16, dtype=torch.uint8), torch.ones(1, 16, 2, dtype=torch.bfloat16)), (16, 16, 1)
    file = packed_file.PackedFile(tmp_path / "packed", source, "int4")
    file.facts["wide_dtype"] = "bfloat16"
    file.add("a", planes)
    file.save()
    again = packed_file.PackedFile(tmp_path / "packed", source, "int4")
    assert again.facts == {"wide_dtype": "bfloat16"}
    assert torch.equal(again.planes("a", shape)[0], planes[0])
    assert again.planes("b", shape) is None
    assert again.planes("a", (32, 16, 1)) is None
    assert again.planes("a", (16, 16, 2)) is None
    whole = file.path.read_bytes()
    match damage:
        case "truncated":
            file.path.write_bytes(whole[:-10])
        case "garbage":
            file.path.write_bytes(os.urandom(len(whole)))
        case "a flipped bit":
            file.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "empty":
            file.path.write_bytes(b"")
        case "another key":
            file.path.write_bytes(whole.replace(b"int4", b"int8"))
        case "gone":
            file.path.unlink()
    assert packed_file.PackedFile(tmp_path / "packed", source, "int4").planes("a", (16, 16, 1)) is None


def test_packed_files_are_named_by_content_and_few_stay(tmp_path):
    source, home = tmp_path / "model.gguf", tmp_path / "packed"
    for content in range(6):
        source.write_bytes(bytes([content]))
        file = packed_file.PackedFile(home, source, "int4")
        assert file.planes("a", (16, 16, 1)) is None
        file.add("a", (torch.ones(1), torch.ones(1)))
        file.save()
        os.utime(file.path, (content, content))
    assert len(list(home.iterdir())) == packed_file._KEEP


def test_a_place_that_takes_no_file_only_costs_the_time(tmp_path):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"some model")
    (tmp_path / "packed").write_text("a file where the directory should be")
    file = packed_file.PackedFile(tmp_path / "packed", source, "int4")
    file.add("a", (torch.ones(1), torch.ones(1)))
    file.save()
    assert (tmp_path / "packed").read_text().startswith("a file")


@pytest.mark.slow
def test_a_processor_without_avx512_runs_it_too(tmp_path):
    """Torch and oneDNN held to AVX2, and torch to no vectors at all, in processes of their own."""
    checkpoint_of(TINY, tmp_path / "m")
    (tmp_path / "other.py").write_text(OTHER_PROCESSOR)
    source = ModelSource("tiny", tmp_path / "m", "directory")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        both = {p: rounded_model(open_checkpoint(source), p) for p in ("fp32", "int4")}
        expected = {p: torch.stack((m(ids)[0, -1], m(torch.cat((ids, ids[:, :1]), 1))[0, -1])) for p, m in both.items()}
    for limits in ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, {"ATEN_CPU_CAPABILITY": "default"}):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "other.py"), str(tmp_path / "m")], env=os.environ | limits,
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        found = json.loads(done.stdout)
        assert found["fp32"][0] == {"oneDNN float32": 9}
        assert found["int4"][0] == {"torch int4": 8, "torch int8": 1}
        for precision, (_, logits) in found.items():
            assert relative(torch.tensor(logits), expected[precision]) < TOLERANCE[precision]


def test_the_probe_chooses_the_faster_of_what_it_timed():
    facts = probe_wide_dtype(TINY)
    times = {name.removesuffix("_ms"): took for name, took in facts.items() if name.endswith("_ms")}
    assert facts["wide_dtype"] == min(times, key=times.get)
    assert "float32" in times


def test_load_refuses_what_the_cpu_path_has_not(tmp_path):
    for options, words in (
        ({"precision": "int3"}, "int3"),
        ({"num_threads": 0}, "num_threads=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            load("demo", device="cpu", **options)


def test_num_threads_is_the_processs(tmp_path):
    before = torch.get_num_threads()
    try:
        load("demo", device="cpu", num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_saved_planes_are_plain_safetensors(packed_demo):
    home, _, _ = packed_demo
    (path,) = home.iterdir()
    names = load_file(path).keys()
    assert {"layers.0.qkv.codes", "head.low.scales"} <= set(names)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_blocks_of_a_gguf_file_give_the_logits_of_its_dequantised_weights(family, tied, tmp_path):
    """q4_1 layers and q8_0 tables, llama's query and key rows in the converter's own order."""
    config = replace(FAMILIES[family], tie_word_embeddings=tied)
    path = write_gguf(config, tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(ModelSource("tiny", path, "gguf"))
    assert is_four_bit(checkpoint)
    plan, model = plan_of(checkpoint, "int4"), load_model(checkpoint, dtype=torch.float32)
    assert plan.weights.kernels == {"torch int4": 8, "torch int4 twice": 1}
    ids = torch.randint(0, 160, (1, 60))
    expected = model(ids)[0]
    assert relative(plan(ids)[0], expected) < 0.03
    cache = plan.new_cache(1, 60)
    found = torch.cat([plan(ids[:, t : t + 1], cache=cache, last_only=True)[0] for t in range(60)])
    assert relative(found, expected) < 0.03
    for num_rows in (3, 12):
        rows = ids.view(12, 5)[:num_rows]
        cache = plan.new_cache(num_rows, 6)
        plan(rows, cache=cache)
        again = plan(rows[:, :1], cache=cache, last_only=True)[:, 0]
        assert relative(again, model(torch.cat((rows, rows[:, :1]), 1))[:, -1]) < 0.03
