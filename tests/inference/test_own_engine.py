"""``LLM``'s own calls on the engine: the same completions and pieces, one engine kept, and who needs the eager form."""

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from microllm import LLM, SamplingParams, ops
from microllm.config import preset
from microllm.inference import Engine
from microllm.inference.own_engine import OwnEngines, is_plain, runs_captured
from microllm.model import Transformer

KINDS = [
    SamplingParams(temperature=0, max_tokens=21, ignore_eos=True),
    SamplingParams(temperature=1, seed=2, max_tokens=30, stop=("e",), min_tokens=2),
    SamplingParams(temperature=0.7, seed=3, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.2, seed=4, max_tokens=12, repetition_penalty=1.3, logit_bias={70: 3.0}),
]


@pytest.fixture
def made():
    return []


@pytest.fixture
def own(llm, made):
    """The tiny model, routed as on a GPU; the fused pass is called and not captured."""

    def make(llm, config):
        made.append(Engine(llm, replace(config, steps="uncaptured", deterministic=False)))
        return made[-1]

    routed = LLM(llm.model, llm.tokenizer, name="tiny")
    routed._engines = OwnEngines(make, lambda model: not ops.is_watched())
    return routed


def assert_same(got, want):
    """All of a completion but its times; log-probabilities nearly, for sums may come in another order."""
    for name in ("token_ids", "text", "finish_reason", "index"):
        assert getattr(got, name) == getattr(want, name)
    for ours, theirs in ((got.logprobs, want.logprobs), (got.prompt_logprobs, want.prompt_logprobs)):
        for a, b in zip(ours or (), theirs or (), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-3))


@pytest.mark.parametrize("params", KINDS)
def test_completions_and_pieces_are_those_of_the_eager_loop(llm, own, made, prompts, params):
    two = replace(params, n=2)
    for got, want in zip(own.generate(prompts, two), llm.generate(prompts, two), strict=True):
        assert_same(got, want)
    eager, stream = llm.stream(prompts[0], params), own.stream(prompts[0], params)
    assert [(p.text, p.token_ids, p.finish_reason) for p in stream] == [
        (p.text, p.token_ids, p.finish_reason) for p in eager
    ]
    assert_same(stream.completion, eager.completion)
    assert len(made) == 1
    assert made[0].report().kv.active_bytes == 0


def test_the_second_call_finds_everything_ready(own, made, prompts):
    for _ in range(3):
        own.generate(prompts, KINDS[0])
        num_cold = made[0]._runner.num_cold
    own.generate(prompts, KINDS[0])
    assert (len(made), made[0]._runner.num_cold) == (1, num_cold)
    assert [made[0].config.max_rows, made[0].context] == [8, own.config.max_position_embeddings]


def test_more_sequences_or_tokens_than_fit_get_a_larger_engine_and_the_same_answers(own, made, prompts):
    answer = own.generate(prompts[0], KINDS[0]).token_ids
    with own.stream(prompts[0], KINDS[0]) as stream:
        head = [next(stream).token_ids[0] for _ in range(3)]
        many = own.generate(prompts * 4, replace(KINDS[0], max_tokens=60))
        assert len(made) == 2
        assert made[1].pool.num_pages > made[0].pool.num_pages
        assert made[1].config.max_rows == 32
        assert (*head, *(p.token_ids[0] for p in stream)) == answer
    assert [c.token_ids[:21] for c in many[::6]] == [answer] * 4
    assert own.generate(prompts[0], KINDS[0]).token_ids == answer
    assert len(made) == 2


def test_a_request_picks_its_engine_by_its_own_length_whatever_came_before(llm, made):
    config = preset("tiny", vocab_size=280, max_position_embeddings=4096)
    wide = LLM(Transformer(config).initialise(1, std=0.2).eval(), llm.tokenizer)
    wide._engines = OwnEngines(lambda llm, config: made.append(Engine(llm, config)) or made[-1], lambda model: True)
    for length in (5, 1020, 5):
        wide.generate([7] * length, SamplingParams(temperature=0, max_tokens=8))
    assert [engine.context for engine in made] == [1024, 4096]


def test_closing_a_stream_frees_its_pages_and_its_text_ends_where_it_was_read(llm, own, made):
    with own.stream("the cat", KINDS[0]) as stream:
        pieces = [next(stream) for _ in range(2)]
    assert stream.completion.finish_reason == "cancelled"
    assert list(stream) == []
    assert made[0].report().kv.active_bytes == 0
    assert all(len(piece.token_ids) == 1 for piece in pieces)


def test_threads_share_an_engine_and_get_their_own_answers(llm, own, prompts):
    expected, answers = [c.token_ids for c in llm.generate(prompts, KINDS[0])], {}

    def ask(i):
        answers[i] = own.generate(prompts[i], KINDS[0]).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(prompts))] == expected


def test_weights_that_moved_get_a_new_engine(own, made):
    before = own.generate("the cat", KINDS[0]).token_ids
    norm = own.transformer.norm
    old = norm.weight
    try:
        norm.weight = torch.nn.Parameter(-old.detach())
        assert own.generate("the cat", KINDS[0]).token_ids != before
        assert len(made) == 2
    finally:
        norm.weight = old


def test_no_circle_keeps_a_model_and_its_engines_alive(own, made):
    own.generate("the cat", KINDS[0])
    gone = weakref.ref(made.pop())
    gc.disable()
    try:
        own._engines = None
        assert gone() is None
    finally:
        gc.enable()


def test_whoever_looks_at_parts_gets_the_eager_form(own, made):
    model = own.transformer
    assert not runs_captured(model)  # it is on a CPU
    assert is_plain(model)
    handle = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not is_plain(model)
    handle.remove()
    plain, model.layers[0].mlp.up_proj = model.layers[0].mlp.up_proj, torch.nn.Linear(32, 64, bias=False)
    assert not is_plain(model)
    model.layers[0].mlp.up_proj = plain
    with ops.ledger() as ran:
        own.generate("the cat", KINDS[0])
    assert any(entry.op == "swiglu" for entry in ran)
    assert made == []
    assert own.uncaptured()._engines is None
