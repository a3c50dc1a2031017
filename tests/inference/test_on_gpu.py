"""The same loop on a GPU: every kind of request, and the tokens that the CPU gives in fp32."""

import copy
import gc
import random
from dataclasses import replace

import pytest
import torch

from microllm import LLM, SamplingParams, ops, preset
from microllm.inference import Engine, EngineConfig
from microllm.inference.placement import choose_device
from microllm.lab.probe import ProbeConfig, probe_batch_invariance
from microllm.lab.random_model import random_llm
from microllm.model import Transformer

KINDS = [
    SamplingParams(temperature=0, max_tokens=20, min_tokens=20, logprobs=2, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, n=2, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, seed=6, max_tokens=9, logit_bias={70: 3.0}),
]


SHAPE = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip


def small(llm, device, dtype):
    """Return a random model of shapes that every kernel takes."""
    model = Transformer(preset("tiny", **SHAPE), dtype=dtype, device=device).initialise(3, std=0.2).eval()
    return LLM(model.requires_grad_(False), llm.tokenizer)


def draw_work(draw, count):
    """Return prompts with their parameters: page borders, shared beginnings, all kinds of choosing."""
    shared, work = [draw.randrange(2, 260) for _ in range(64)], []
    for number in range(count):
        length = draw.choice([1, 2, 7, 15, 16, 17, 31, 32, 33, 40, 63])
        prompt = shared[:length] if draw.random() < 0.4 else [draw.randrange(2, 260) for _ in range(length)]
        params = SamplingParams(temperature=draw.choice([0, 0.9]), seed=number, max_tokens=draw.randint(1, 40))
        more = draw.choice([{}, {}, {"top_p": 0.9}, {"logprobs": 1}, {"repetition_penalty": 1.2}, {"ignore_eos": True}])
        work.append((prompt, replace(params, **more)))
    return work


@pytest.mark.parametrize(
    ("device", "dtype", "count"),
    [("cpu", torch.float32, 24), pytest.param("cuda", torch.bfloat16, 200, marks=pytest.mark.gpu)],
)
def test_requests_that_come_and_go_in_a_tiny_pool_get_the_bits_of_serial(llm, device, dtype, count):
    draw, model = random.Random(5), small(llm, device, dtype)
    work = draw_work(draw, count)
    config = EngineConfig(max_rows=12, deterministic=True, max_context=128)
    serial = Engine(model, replace(config, scheduler="serial"))
    truth = [serial.generate(*each) for each in work]
    page = serial.pool.page_bytes
    engine = Engine(model, replace(config, kv_bytes=24 * page, max_step_tokens=80))
    waiting, running, cancelled = list(zip(work, truth, strict=True)), [], set()
    while waiting or engine.has_work:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if waiting:
                (prompt, params), want = waiting.pop()
                running.append((engine.add(prompt, params)[0], want))
        engine.step()
        report = engine.report()
        assert report.kv.wasted_bytes <= report.num_running * page
        if running and draw.random() < 0.03:
            request = draw.choice(running)[0]
            cancelled |= {request.number} if request.finish_reason is None else set()
            engine.cancel(request)
    for request, want in running:
        got = request.completion
        ends = len(got.token_ids) if request.number in cancelled else len(want.token_ids)
        assert got.token_ids == want.token_ids[:ends]
        assert got.logprobs == (None if want.logprobs is None else want.logprobs[:ends])
    assert engine.report().num_preemptions > 0
    assert engine.report().num_prefix_tokens > 0
    assert engine.report().kv.active_bytes == 0
    assert cancelled


def run_mix(engine, count):
    """Run requests of lengths and parameters of all kinds that need nothing from the host."""
    draw = random.Random(1)
    for number in range(count):
        prompt = [draw.randrange(2, 260) for _ in range(draw.randint(1, 60))]
        temperature, top_k = draw.choice([0, 0.8]), draw.choice([0, 20])
        engine.add(prompt, SamplingParams(temperature=temperature, top_k=top_k, seed=number, max_tokens=30))
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    ("device", "steps"),
    [("cpu", "plain"), ("cpu", "uncaptured"), pytest.param("cuda", "auto", marks=pytest.mark.gpu)],
)
def test_a_warm_engine_replays_and_launches_nothing_by_itself(llm, device, steps):
    model = small(llm, device, torch.float32 if device == "cpu" else torch.bfloat16)
    engine = Engine(model, EngineConfig(max_rows=8, max_context=128, steps=steps, prefix_cache=False))
    engine.prewarm()
    for _ in range(2):
        run_mix(engine, 12)
    cold = engine._runner.num_cold
    with ops.ledger() as ran:
        run_mix(engine, 12)
    assert engine._runner.num_cold == cold
    launched = {entry.op for entry in ran} & {"linear", "norm_linear", "attention_step", "attention_decode", "rms_norm"}
    assert bool(launched) == (device == "cpu")  # what this asks of a GPU is false wherever steps are not captured


@pytest.mark.gpu
def test_peak_memory_is_weights_pool_and_arena():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = random_llm("smollm2-135m", "cuda", torch.bfloat16)
    pool = min(8 << 30, torch.cuda.mem_get_info()[0] // 2)
    engine = Engine(model, EngineConfig(max_rows=64, max_context=8192, kv_bytes=pool))
    prompts = [[(7 * row + i) % 4000 + 5 for i in range(100 + 11 * row)] for row in range(64)]
    for temperature in (0, 0.8):
        engine.generate(prompts, SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True))
    memory = engine.memory()
    assert memory.peak_bytes - before == pytest.approx(memory.accounted_bytes, rel=0.02), memory


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_surrounding_gives_the_same_bits(llm, dtype):
    results = probe_batch_invariance(small(llm, "cuda", dtype), ProbeConfig())
    assert [r for r in results if not r.passed] == []
    assert {"alone, not captured", "in bursts of steps, amid 63 strangers"} <= {r.case for r in results}


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu(llm, prompts):
    assert choose_device("auto").type == "cuda"
    on_gpu = LLM(copy.deepcopy(llm.model).to("cuda"), llm.tokenizer, captured=False)
    for params in KINDS:
        expected, got = llm.generate(prompts, params), on_gpu.generate(prompts, params)
        assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert on_gpu.score("the cat").sum_logprob == pytest.approx(llm.score("the cat").sum_logprob, abs=1e-3)
    assert on_gpu.logits("the cat").device.type == "cuda"


@pytest.mark.gpu
def test_the_captured_engine_gives_the_tokens_of_the_cpu_and_captures_no_shape_twice(llm, prompts):
    on_gpu = LLM(copy.deepcopy(llm.transformer).to("cuda"), llm.tokenizer)
    engine = Engine(on_gpu, EngineConfig(max_rows=8))
    for params in (*KINDS, replace(KINDS[0], logprobs=None, prompt_logprobs=None)):
        expected, got = llm.generate(prompts, params), engine.generate(prompts, params)
        assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    engine.generate(prompts, KINDS[2])
    captured = engine._runner.graphs.num_captured
    assert captured > 0
    engine.generate([prompt + " a" for prompt in prompts], replace(KINDS[2], max_tokens=7))
    engine.generate(prompts, KINDS[2])
    assert engine._runner.graphs.num_captured <= captured + 2  # a width of prompts may be new, a number of rows is not
    assert engine.report().kv.active_bytes == 0


@pytest.mark.gpu
def test_generate_runs_captured_keeps_its_engine_and_gives_the_eager_tokens(llm, prompts):
    on_gpu = LLM(copy.deepcopy(llm.transformer).to("cuda"), llm.tokenizer)
    eager = on_gpu.uncaptured()
    for params in KINDS:
        for _ in range(3):
            got = on_gpu.generate(prompts, params)
        assert [c.token_ids for c in got] == [c.token_ids for c in eager.generate(prompts, params)]
        one = replace(params, n=1)
        pieces = list(on_gpu.stream(prompts[0], one))
        assert [(p.text, p.token_ids) for p in pieces] == [(p.text, p.token_ids) for p in eager.stream(prompts[0], one)]
    (kept,) = on_gpu._engines._kept.values()
    captured = kept.engine._runner.graphs.num_captured
    assert captured > 0
    on_gpu.generate(prompts, KINDS[2])
    assert kept.engine._runner.graphs.num_captured == captured
    assert list(on_gpu._engines._kept.values()) == [kept]


@pytest.mark.gpu
def test_a_prewarmed_engine_captures_nothing_more_for_a_lone_request(llm):
    engine = Engine(LLM(copy.deepcopy(llm.transformer).to("cuda"), llm.tokenizer), EngineConfig(max_rows=8))
    report = engine.prewarm()
    captured = engine._runner.graphs.num_captured
    assert captured == len(report.shapes) > 0
    assert engine.prewarm().shapes == ()
    for params in (KINDS[2], replace(KINDS[2], temperature=0)):
        (request,) = engine.add("the cat", params)
        while engine.has_work:
            engine.step()
        assert not request.cold
    assert engine._runner.graphs.num_captured == captured


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_repeats_itself_and_streams(llm, dtype):
    half = LLM(copy.deepcopy(llm.model).to("cuda", dtype), llm.tokenizer)
    params = replace(KINDS[1], n=1)
    assert half.generate("the cat", params).token_ids == half.generate("the cat", params).token_ids
    pieces = list(half.stream("the cat", params))
    assert tuple(t for p in pieces for t in p.token_ids) == half.generate("the cat", params).token_ids
