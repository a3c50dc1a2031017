"""The profile: what lands in which category, that the parts are the whole, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from microllm import ops
from microllm.cli import main
from microllm.config import preset
from microllm.errors import ConfigError, EvidenceError, RequestError
from microllm.evidence.spans import TraceFile
from microllm.inference import LLM, load
from microllm.lab import profile as profile_module
from microllm.lab.profile import (
    ProfileConfig,
    StepProfile,
    describe_profile,
    profile_generation,
    profile_steps,
    write_profile,
)
from microllm.lab.profile_events import (
    OPERATOR,
    OUTSIDE,
    REGION,
    SITE,
    TRACED_STEPS,
    categorise,
    read_run,
)
from microllm.model import Transformer
from microllm.ops.linear import linear
from microllm.sampling import SamplingParams

CONFIG = ProfileConfig(short_steps=2, long_steps=22, repeats=3)
QUICK = ProfileConfig(short_steps=1, long_steps=9, repeats=2)
PROMPT = list(range(20))
LAYERS = 2
REPOSITORY = Path(__file__).resolve().parents[2]


class ByteTokenizer:
    """As much of a tokenizer as generation asks for; its own text stream as well."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def known_ids_mask(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bool)

    def stream(self) -> ByteTokenizer:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def new_llm() -> LLM:
    model = Transformer(preset("tiny", max_position_embeddings=64)).initialise(seed=0).eval()
    return LLM(model.requires_grad_(False), ByteTokenizer(), name="tiny")


@pytest.fixture(scope="module")
def found() -> tuple[StepProfile, TraceFile]:
    return profile_generation(new_llm(), PROMPT, SamplingParams(temperature=0.8, top_p=0.9), CONFIG)


def rows(profile: StepProfile):
    return {row.name: row for row in profile.categories}, {row.name: row for row in profile.gaps}


def test_the_parts_are_the_whole_step(found):
    profile, _ = found
    assert profile.share_sum == pytest.approx(1, abs=0.02)
    assert sum(r.ms for r in (*profile.categories, *profile.gaps)) == pytest.approx(profile.profiled_step_ms, rel=0.02)
    assert profile.step_ms > 0


def test_calls_are_those_of_one_decoding_step_and_the_prompt_drops_out(found):
    """Counted by hand: seven products a layer, one lookup and one product with the head, and no training."""
    categories, _ = rows(found[0])
    assert categories["GEMM"].calls == 7 * LAYERS
    for name in ("attention", "KV store", "norm/rope", "embedding/head", "elementwise", "cast/copy", "sampling"):
        assert categories[name].calls == int(categories[name].calls) > 0, name
    assert all(categories[name].ms > 0 for name in ("GEMM", "attention", "norm/rope"))
    assert categories["optimizer"].calls == categories["collective"].calls == 0


def test_allocations_copies_and_waits_have_sources(found):
    """The products' outputs, fp32, one row: q k v o, gate up down of both layers, and the logits."""
    products = [
        r for r in found[0].memory if (r.kind, r.operator, r.source) == ("allocation", "aten::mm", "ops.linear")
    ]
    width, kv, hidden, vocab = 128, 64, 384, 512
    assert [(r.calls, r.bytes) for r in products] == [
        (7 * LAYERS + 1, 4 * (LAYERS * (2 * width + 2 * kv + 2 * hidden + width) + vocab))
    ]
    kinds = {(r.kind, r.source) for r in found[0].memory}
    assert {("copy", "ops.attention"), ("synchronisation", "ops.kv_store"), ("allocation", "ops.rope")} <= kinds
    assert all(r.calls > 0 for r in found[0].memory)
    assert found[0].peak_bytes["cpu"] > 0


def test_files(found, tmp_path):
    profile, timeline = found
    write_profile(tmp_path / "new", profile, timeline)
    assert StepProfile.model_validate_json((tmp_path / "new" / "profile.json").read_text()) == profile
    read = TraceFile.model_validate_json((tmp_path / "new" / "timeline.json").read_text())
    assert read == timeline
    spans = [e for e in read.traceEvents if e.ph == "X"]
    assert [e.name for e in spans].count("model") == TRACED_STEPS
    assert [e.name for e in spans].count("operator:linear") == TRACED_STEPS * (7 * LAYERS + 1)
    assert min(e.ts for e in spans) == 0
    assert {e.tid for e in spans} == {e.tid for e in read.traceEvents if e.ph == "M"}
    text = (tmp_path / "new" / "profile.txt").read_text()
    for words in ("GEMM", "host gaps", "under the profiler", "allocations:", "aten::mm in ops.linear", "peak on cpu"):
        assert words in text


def test_planted_work_and_planted_waiting_are_found():
    llm, matrix = new_llm(), torch.ones(800, 800)
    least = min(timeit.repeat(lambda: torch.mm(matrix, matrix), number=1, repeat=5))  # other work only adds
    llm.model.layers[0].mlp.register_forward_hook(lambda *_: (torch.mm(matrix, matrix), None)[1])
    llm.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    profile, _ = profile_generation(llm, PROMPT, SamplingParams(temperature=0), QUICK)
    categories, gaps = rows(profile)
    assert categories["GEMM"].calls == 7 * LAYERS + 1
    assert categories["GEMM"].ms > 500 * least  # half of it: the two runs that are told apart have noise of their own
    assert profile.gaps[0].name == "layers.*.self_attn"
    assert gaps["layers.*.self_attn"].ms > 8
    assert profile.step_ms > 8
    assert profile.share_sum == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("site", "operator", "names", "category"),
    [
        ("layers.*.mlp.up_proj", "linear", ("aten::linear", "aten::addmm"), "GEMM"),
        ("", "linear", ("aten::linear", "aten::mm"), "embedding/head"),
        ("lm_head", "linear", ("aten::linear", "aten::mm"), "embedding/head"),
        ("layers.*.self_attn", "rope", ("aten::mul",), "norm/rope"),
        ("layers.*.self_attn", "attention", ("aten::matmul", "aten::bmm"), "attention"),
        ("layers.*.self_attn", "attention", ("aten::reshape", "aten::clone", "aten::copy_"), "cast/copy"),
        ("layers.*.self_attn", "kv_store", ("aten::index_put_",), "KV store"),
        ("layers.*", "", ("aten::add",), "elementwise"),
        (OUTSIDE, "", ("aten::item",), "sampling"),
        # somebody else's module tree, where only modules and names speak
        ("model.layers.*.self_attn", "", ("aten::softmax",), "attention"),
        ("model.layers.*.self_attn.q_proj", "", ("aten::linear", "aten::addmm"), "GEMM"),
        ("model.layers.*.input_layernorm", "", ("aten::pow",), "norm/rope"),
        (OUTSIDE, "", ("Optimizer.step#AdamW.step", "aten::mul"), "optimizer"),
        # kernels of a replayed graph
        ("?", "", ("nvjet_tst_64x8_64x16_1x2_h_bz_TNT",), "GEMM"),
        ("?", "", ("void flash_fwd_splitkv_kernel",), "attention"),
        ("?", "", ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL",), "collective"),
        ("?", "", ("Memcpy DtoD (Device -> Device)",), "cast/copy"),
        ("?", "", ("_fused_rms_norm_kernel",), "norm/rope"),
        ("?", "", ("something_new",), "other"),
    ],
)
def test_categories(site, operator, names, category):
    assert categorise(site, operator, names) == category


class FakeEvent(SimpleNamespace):
    """An event as the profiler gives it: a method for each field."""

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        return value if name.startswith("__") else lambda: value


def event(name, start, end, *, device="CPU", thread=1, id=0, linked=0, annotation=False, row=1):
    return FakeEvent(
        name=name, start_ns=start, end_ns=end, duration_ns=end - start, device_type=SimpleNamespace(name=device),
        start_thread_id=thread, correlation_id=id, linked_correlation_id=linked, is_user_annotation=annotation,
        device_resource_id=row,
    )  # fmt: skip


def gpu_events() -> list[FakeEvent]:
    """A step on a GPU: a product, a kernel launched by no operator of torch, and a replayed graph; times in µs."""
    us = 1000
    cuda = {"device": "CUDA", "row": 7}
    return [
        event("Activity Buffer Request", 0, 900 * us, thread=99),
        event(REGION, 0, 1000 * us),
        event(SITE, 10 * us, 300 * us),
        event(SITE + "layers.0.mlp.up_proj", 10 * us, 100 * us),
        event(OPERATOR + "linear", 10 * us, 100 * us),
        event("aten::mm", 20 * us, 60 * us, id=5),
        event("cudaLaunchKernel", 50 * us, 55 * us, thread=77, id=900, linked=5),
        event(SITE + "norm", 120 * us, 200 * us),
        event(OPERATOR + "rms_norm", 120 * us, 200 * us, id=6),
        event("cuLaunchKernelEx", 150 * us, 155 * us, thread=77, id=901),
        event("cudaGraphLaunch", 400 * us, 410 * us, thread=77, id=902),
        event("some_gemm_kernel", 100 * us, 300 * us, id=900, linked=5, **cuda),
        event("_kernel", 310 * us, 330 * us, id=901, **cuda),
        event("flash_fwd", 500 * us, 600 * us, id=902, **cuda),
        event("lone_kernel", 600 * us, 650 * us, id=0, linked=5, **cuda),
        event("my range", 100 * us, 650 * us, annotation=True, **cuda),
        event(REGION, 100 * us, 650 * us, **cuda),
    ]


def test_a_device_timeline_is_told_apart_by_who_launched_what():
    run = read_run(gpu_events(), 1.0, cuda=True)
    calls, ms, host_ms, gap_ms = (
        {name: round(total, 6) for (c, name), total in run.totals.items() if c == column and total}
        for column in ("calls", "ms", "host_ms", "gap_ms")
    )
    assert calls == {"GEMM": 2, "norm/rope": 1, "attention": 1}
    assert ms == {"GEMM": 0.25, "norm/rope": 0.02, "attention": 0.1}
    assert host_ms == {"GEMM": 0.04}
    assert gap_ms == {"ops.linear": 0.1, "ops.rms_norm": 0.01, "a replayed graph": 0.17, OUTSIDE: 0.35}
    assert sum((*ms.values(), *gap_ms.values())) == pytest.approx(run.wall_ms)
    streams = [e for e in run.timeline().traceEvents if e.tid == 7 and e.ph == "X"]
    assert [e.name for e in streams] == ["some_gemm_kernel", "_kernel", "flash_fwd", "lone_kernel"]
    assert all(e.cat == "stream" for e in streams)


def test_a_device_that_was_not_traced_is_refused():
    with pytest.raises(EvidenceError, match="no trace of the CUDA device"):
        read_run([e for e in gpu_events() if e.device_type().name == "CPU"], 1.0, cuda=True)


def test_parts_that_are_not_the_whole_are_refused(found):
    profile, _ = found
    doubled = tuple(row.model_copy(update={"share": 2 * row.share}) for row in profile.categories)
    with pytest.raises(EvidenceError, match="add up to"):
        profile_module._check(profile.model_copy(update={"categories": doubled}))
    with pytest.raises(EvidenceError, match="need both above 0"):
        profile_module._check(profile.model_copy(update={"step_ms": -0.1}))
    profile_module._check(profile)


def test_misuse():
    llm = new_llm()
    for fields in ({"short_steps": 5, "long_steps": 5}, {"short_steps": 0}, {"repeats": 0}):
        with pytest.raises(ConfigError, match="need at least one step"):
            ProfileConfig(**fields)
    with pytest.raises(RequestError, match="need n=1"):
        profile_generation(llm, PROMPT, SamplingParams(n=2), CONFIG)
    with pytest.raises(EvidenceError, match=r"got 4 tokens \(length\); need 22"):
        profile_generation(llm, [1] * 60, SamplingParams(), CONFIG)


def test_nothing_stays_behind_when_the_work_fails():
    llm = new_llm()
    calls = []

    def work(steps: int) -> None:
        calls.append(ops.linear is linear)
        llm.model(torch.tensor([[1]]))
        if len(calls) == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        profile_steps(work, llm.model, CONFIG, name="broken")
    assert calls == [True, False]
    assert ops.linear is linear
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in llm.model.modules())


@pytest.fixture
def tiny_named(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr("microllm.inference.load", lambda *_, **__: new_llm())
    return "tiny"


def test_the_command(capsys, tmp_path, tiny_named):
    words = ["profile", "--short-steps", "1", "--long-steps", "21", "--repeats", "2", "--output", str(tmp_path)]
    words += ["--json", "--", "generate", "--model", tiny_named, "--prompt", "abc", "--raw", "--max-tokens", "2"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    shares = [row["share"] for row in (*printed["categories"], *printed["gaps"])]
    assert sum(shares) == pytest.approx(1, abs=0.02)
    assert (printed["short_steps"], printed["long_steps"]) == (1, 21)
    assert {path.name for path in tmp_path.iterdir()} == {"profile.json", "profile.txt", "timeline.json"}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "got no command to profile; need one of generate"),
        (["--", "bench", "startup"], "got command 'bench' to profile; need one of generate"),
        (["--", "train"], "got command 'train' to profile; need one of generate"),
    ],
)
def test_what_cannot_be_profiled_is_refused(capsys, words, complaint):
    assert main(["profile", *words]) == 2
    assert capsys.readouterr().err.startswith(f"microllm: {complaint}")


@pytest.mark.slow
def test_the_tool_for_the_gpu_needs_torch_and_pydantic_alone(tmp_path):
    """Here on the CPU, with everything else that the package depends on out of reach."""
    absent = ["tyro", "rich", "jinja2", "tokenizers", "safetensors", "platformdirs", "triton", "transformers"]
    program = (
        f"import runpy, sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
        f"sys.argv[1:] = ['--output', {str(tmp_path)!r}, '--preset', 'tiny', '--device', 'cpu', '--dtype', 'float32',"
        " '--short-steps', '1', '--long-steps', '21']\n"
        "runpy.run_path('tools/gpu_profile.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "generate with random tiny, cpu float32: a steady step" in done.stdout
    TraceFile.model_validate_json((tmp_path / "timeline.json").read_text())


@pytest.mark.gpu
def test_on_a_gpu():
    model = Transformer(preset("tiny"), device="cuda", dtype=torch.bfloat16).initialise(seed=0).eval()
    llm = LLM(model.requires_grad_(False), ByteTokenizer(), name="tiny")
    profile, timeline = profile_generation(llm, PROMPT, SamplingParams(temperature=0), CONFIG)
    categories, _ = rows(profile)
    assert categories["GEMM"].calls >= 7 * LAYERS
    assert categories["attention"].ms > 0
    assert profile.share_sum == pytest.approx(1, abs=0.02)
    assert any(e.cat == "stream" for e in timeline.traceEvents)
    assert "host ms" in describe_profile(profile)


@pytest.mark.slow
def test_a_plan_of_packed_weights_is_profiled_too():
    """Its products are found though it has no modules, and its shares add up."""
    llm = load("demo", device="cpu")
    profile, _ = profile_generation(llm, PROMPT, SamplingParams(temperature=0), QUICK)
    share = {row.name: row.share for row in profile.categories}
    assert share["GEMM"] > 0.3
    assert abs(profile.share_sum - 1) < 0.02
