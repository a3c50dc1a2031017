"""The same loop on a GPU: every kind of request, and the tokens that the CPU gives in fp32."""

import copy
from dataclasses import replace

import pytest
import torch

from microllm import LLM, SamplingParams
from microllm.inference import Engine, EngineConfig
from microllm.inference.placement import choose_device

KINDS = [
    SamplingParams(temperature=0, max_tokens=20, min_tokens=20, logprobs=2, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, n=2, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, seed=6, max_tokens=9, logit_bias={70: 3.0}),
]


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
