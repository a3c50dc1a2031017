"""A real model: it answers, and its batches, streams and scores agree with each other."""

from dataclasses import replace

import pytest

from microllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_it_knows_the_capital_of_france(demo):
    completion = demo.chat(QUESTION, replace(GREEDY, max_tokens=32))
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] in demo.eos_ids
    assert "<|im_end|>" not in completion.text


def test_a_streamed_answer_stops_before_a_word(demo):
    stream = demo.chat(QUESTION, replace(GREEDY, max_tokens=32, stop="Paris"), stream=True)
    pieces = [piece.text for piece in stream]
    assert "".join(pieces) == stream.completion.text == "The capital of France is "
    assert stream.completion.finish_reason == "stop"


def test_a_batch_of_unequal_prompts_equals_single_runs(demo):
    prompts = [
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a land far away, there lived",
    ]
    for params in (GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=6, repetition_penalty=1.1)):
        together = demo.generate(prompts, params)
        assert [c.token_ids for c in together] == [demo.generate(p, params).token_ids for p in prompts]


def test_a_true_sentence_scores_better(demo):
    true, false = demo.score(["The capital of France is Paris.", "The capital of France is Oslo."])
    assert true.perplexity < false.perplexity < 1000
    completion = demo.generate("The capital of France is Paris.", replace(GREEDY, max_tokens=1, prompt_logprobs=0))
    got = [entry.logprob for entry in completion.prompt_logprobs[1:]]
    assert got == pytest.approx(list(true.logprobs[1:]), abs=1e-4)
