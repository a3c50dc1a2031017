"""The engine: what its requests get, when they give their pages back, and what it refuses."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from microllm import SamplingParams, ops
from microllm.cli import main
from microllm.errors import ConfigError, RequestError
from microllm.inference import LLM, verify
from microllm.inference import engine as engine_module
from microllm.inference.draft_model import ModelProposer
from microllm.inference.engine import Engine
from microllm.inference.engine_config import EngineConfig
from microllm.inference.plan import Plan
from microllm.model import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=30, seed=5, logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, max_tokens=3, seed=5),
    SamplingParams(temperature=1.5, top_p=0.9, max_tokens=25, seed=-1, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=17, repetition_penalty=1.3, min_tokens=17, prompt_logprobs=1),
    SamplingParams(temperature=1.0, min_p=0.02, max_tokens=1, logit_bias={70: 4.0}, seed=9),
]


def engine_of(llm, *, pages=None, **options):
    if pages is not None:
        size = options.get("page_tokens", 16)
        options["kv_bytes"] = pages * size * llm.config.kv_bytes_per_token("float32")
    return Engine(llm, EngineConfig(**options))


def drain(engine):
    while engine.has_work:
        engine.step()


def counted(engine, monkeypatch):
    """Return the list that fills with the number of tokens of every step."""
    counts, run = [], engine._runner.run

    def watched(chunks):
        counts.append(sum(len(chunk.token_ids) for chunk in chunks))
        return run(chunks)

    monkeypatch.setattr(engine._runner, "run", watched)
    return counts


# ---- what requests get


def test_requests_of_every_kind_get_what_the_plain_loop_gives(llm, prompts):
    engine = engine_of(llm, max_rows=4, max_step_tokens=20)
    requests = [engine.add(prompt, kind)[0] for prompt, kind in zip(prompts, KINDS, strict=True)]
    drain(engine)
    for request, prompt, kind in zip(requests, prompts, KINDS, strict=True):
        want, got = llm.generate(prompt, kind), request.completion
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        assert got.timings.total_ms >= got.timings.ttft_ms >= got.timings.prefill_ms > 0
        for ours, theirs in [(got.logprobs, want.logprobs), (got.prompt_logprobs, want.prompt_logprobs)]:
            assert (ours is None) == (theirs is None)
            for a, b in zip(ours or (), theirs or (), strict=True):
                assert (a is None) == (b is None)
                assert a is None or a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_list_gives_a_list_in_order_with_its_choices_and_one_gives_one(llm, prompts):
    params = SamplingParams(temperature=1, max_tokens=6, seed=3, n=2)
    engine = engine_of(llm, max_rows=3)
    got, want = engine.generate(prompts, params), llm.generate(prompts, params)
    assert [(c.index, c.prompt_token_ids, c.token_ids) for c in got] == [
        (c.index, c.prompt_token_ids, c.token_ids) for c in want
    ]
    assert engine.generate("x", replace(params, n=1)).token_ids == llm.generate("x", replace(params, n=1)).token_ids
    with pytest.raises(RequestError, match="got n=2 for one prompt"):
        engine.generate("x", params)


def test_choices_and_equal_prompts_are_prefilled_once(llm, monkeypatch):
    engine = engine_of(llm, page_tokens=4)
    counts = counted(engine, monkeypatch)
    params = SamplingParams(temperature=1, max_tokens=2, seed=3, n=4)
    got = engine.generate(["Once upon a time there were"], params)
    length = len(got[0].prompt_token_ids)
    assert counts[0] == length
    assert sum(counts) <= length + 3 * 4 + 4
    assert engine.report().num_prefix_tokens == 3 * ((length - 1) // 4 * 4)


def test_a_long_prompt_does_not_hold_up_who_decodes(llm, monkeypatch):
    engine = engine_of(llm, max_rows=2, max_step_tokens=10)
    (first,) = engine.add("x", replace(GREEDY, max_tokens=20))
    engine.step()
    (second,) = engine.add("y" * 60, GREEDY)
    counts = counted(engine, monkeypatch)
    seen = []
    while second.state in ("waiting", "prefilling"):
        engine.step()
        seen.append(len(first.sequence.token_ids))
    assert seen == list(range(2, 2 + len(seen)))
    assert counts[:6] == [10] * 6
    assert second.state == "decoding"
    drain(engine)
    assert (first.state, first.finish_reason) == ("finished", "length")


def test_logits_that_are_not_finite_end_one_request_alone(spoiled):
    engine = engine_of(spoiled, page_tokens=4)
    params = replace(GREEDY, logprobs=1)
    bad, *others = engine.generate(["so wow!", "the cat", "x"], params)
    assert (bad.finish_reason, bad.token_ids, bad.logprobs) == ("error", (), ())
    assert "non-finite logits at step 0" in bad.error
    assert [c.token_ids for c in others] == [spoiled.generate(p, params).token_ids for p in ("the cat", "x")]
    again = engine.generate("so wow", params)
    assert again.token_ids == spoiled.generate("so wow", params).token_ids


@pytest.mark.parametrize("cancelled", [False, True])
def test_pages_of_a_prompt_that_turns_out_not_finite_are_never_found(spoiled, cancelled):
    engine = engine_of(spoiled, page_tokens=4, max_rows=1, max_step_tokens=9)
    (bad,) = engine.add("so wow! and more", GREEDY)
    engine.step()
    assert bad.num_computed == 9
    if cancelled:
        engine.cancel(bad)
    drain(engine)
    assert bad.finish_reason == ("cancelled" if cancelled else "error")
    assert engine.report().num_cached_pages == 0
    (good,) = engine.add("so warm", replace(GREEDY, logprobs=1))
    drain(engine)
    assert good.cached_prefix_tokens == 0
    assert good.completion.token_ids == spoiled.generate("so warm", GREEDY).token_ids
    assert good.finish_reason == "length"


@pytest.mark.parametrize("broken", ["choose_tokens", "token_logprobs"])
def test_what_fails_for_one_row_ends_that_one_alone(llm, monkeypatch, broken):
    engine, function, calls = engine_of(llm), getattr(verify, broken), []

    def fails_once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no room")
        return function(*arguments)

    monkeypatch.setattr(verify, broken, fails_once)
    params = replace(GREEDY, max_tokens=1, logprobs=1)
    first, second = (engine.add(prompt, params)[0] for prompt in ("the cat", "x"))
    drain(engine)
    assert (first.finish_reason, second.finish_reason) == ("length", "error")
    assert "got MemoryError while its next token was chosen: no room" in second.completion.error
    assert first.completion.token_ids == llm.generate("the cat", params).token_ids
    assert engine.scheduler.allocator.num_held == 0
    assert engine.generate("x", params).token_ids == llm.generate("x", params).token_ids


def test_a_failure_after_some_have_ended_leaves_an_engine_that_goes_on(llm, monkeypatch):
    engine = engine_of(llm, deterministic=False)
    params = replace(GREEDY, max_tokens=1)
    first, second = (engine.add(prompt, params)[0] for prompt in ("the cat", "x"))
    with monkeypatch.context() as patch:
        patch.setattr(second.sequence, "accept", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            engine.step()
    assert (first.finish_reason, second.finish_reason) == ("length", None)
    drain(engine)
    assert [r.state for r in (first, second)] == ["finished"] * 2
    for request, prompt in ((first, "the cat"), (second, "x")):
        assert request.completion.token_ids == llm.generate(prompt, params).token_ids
    assert engine.scheduler.allocator.num_held == 0


def test_a_token_that_was_not_chosen_has_no_origin(spoiled):
    engine = engine_of(spoiled, diagnose=True)
    (request,) = engine.add("so wow!", GREEDY)
    drain(engine)
    assert (request.finish_reason, request.origins) == ("error", [])


@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_stops_come_before_length(llm, kind):
    params = SamplingParams(temperature=1, seed=2, max_tokens=30)
    free = llm.generate("the cat", params)
    stop = [free.text[9:11]] if kind == "stop" else [free.token_ids[12]]
    params = replace(params, **{kind: stop})
    want, got = llm.generate("the cat", params), engine_of(llm, speculate=4).generate("the cat", params)
    assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
    exactly = replace(params, max_tokens=len(want.token_ids))
    assert engine_of(llm).generate("the cat", exactly).finish_reason == "stop"


def test_a_failing_step_leaves_an_engine_that_goes_on(llm, monkeypatch):
    engine = engine_of(llm, page_tokens=4)
    (request,) = engine.add("the cat sat on", GREEDY)
    for count in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run", lambda chunks: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                engine.step()
        assert len(request.sequence.token_ids) == count
        engine.step()
    drain(engine)
    assert request.completion.token_ids == llm.generate("the cat sat on", GREEDY).token_ids


# ---- streams and cancels


def test_streams_side_by_side_give_whole_texts(llm):
    engine = engine_of(llm)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=15, logprobs=0) for seed in (1, 2)]
    streams = [engine.stream("the cat", p) for p in params]
    texts, tokens = ["", ""], [[], []]
    while any(stream.request.finish_reason is None for stream in streams):
        for i, stream in enumerate(streams):
            piece = next(stream, None)
            if piece is not None:
                texts[i] += piece.text
                tokens[i] += piece.token_ids
    for i, stream in enumerate(streams):
        for piece in stream:
            texts[i] += piece.text
            tokens[i] += piece.token_ids
        want = llm.generate("the cat", params[i])
        assert (texts[i], tuple(tokens[i])) == (want.text, want.token_ids)
        assert stream.completion.token_ids == want.token_ids
        assert next(stream, None) is None


def test_closing_a_stream_cancels_and_frees(llm):
    engine = engine_of(llm)
    with engine.stream("the cat", replace(GREEDY, max_tokens=60)) as pieces:
        next(pieces)
        with pytest.raises(RequestError, match="got a stream that still runs"):
            _ = pieces.completion
        assert engine.report().kv.active_bytes > 0
    assert (pieces.completion.finish_reason, next(pieces, None)) == ("cancelled", None)
    assert engine.report().kv.active_bytes == 0
    assert not engine.has_work
    with pytest.raises(RequestError, match="got an empty prompt"):
        engine.stream([])


def test_cancel_works_in_every_state_and_twice(llm):
    engine = engine_of(llm, max_rows=2, max_step_tokens=8, page_tokens=4)
    free = engine.scheduler.allocator.num_free
    decoding, prefilling, waiting = (engine.add(p, GREEDY)[0] for p in ("x", "y" * 50, "z"))
    engine.step()
    engine.step()
    assert [r.state for r in (decoding, prefilling, waiting)] == ["decoding", "prefilling", "waiting"]
    for request in (waiting, prefilling, decoding):
        pages = len(request.pages)
        before = engine.scheduler.allocator.num_free
        for _ in range(2):
            engine.cancel(request)
            assert engine.scheduler.allocator.num_free == before + pages
            assert (request.state, request.finish_reason, request.pages) == ("finished", "cancelled", [])
    assert not engine.has_work
    assert engine.scheduler.allocator.num_free == free
    (done,) = engine.add("x", GREEDY)
    drain(engine)
    engine.cancel(done)
    assert done.finish_reason == "length"
    assert done.completion.token_ids == llm.generate("x", GREEDY).token_ids


def test_cancel_frees_what_cannot_be_decoded_and_refuses_another_engines(llm, monkeypatch):
    engine = engine_of(llm)
    (request,) = engine.add("the cat", GREEDY)
    engine.step()
    with pytest.raises(RequestError, match="got request 0 of another engine; need one of this"):
        engine_of(llm).cancel(request)
    assert request.finish_reason is None
    monkeypatch.setattr(request.sequence, "_checked", lambda text: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        engine.cancel(request)
    assert (request.state, request.finish_reason) == ("finished", "cancelled")
    assert engine.scheduler.allocator.num_held == 0
    assert not engine.has_work


def test_threads_may_call_at_once(llm, prompts):
    engine = engine_of(llm, max_rows=3)
    params = SamplingParams(temperature=1, seed=4, max_tokens=10)
    got = {}

    def work(i):
        got[i] = engine.generate(prompts[i], params).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == {i: llm.generate(prompt, params).token_ids for i, prompt in enumerate(prompts)}


# ---- pages


@pytest.mark.parametrize("page_tokens", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("length", [4, 15, 16, 17, 32, 64])
def test_prompts_that_end_at_a_page_border_hit_and_still_compute_a_token(llm, page_tokens, length, monkeypatch):
    engine = engine_of(llm, page_tokens=page_tokens)
    prompt = [4 + i % 50 for i in range(length)]
    miss = engine.generate(prompt, replace(GREEDY, logprobs=1))
    counts = counted(engine, monkeypatch)
    (request,) = engine.add(prompt, replace(GREEDY, logprobs=1))
    drain(engine)
    hit = request.completion
    assert request.cached_prefix_tokens == (length - 1) // page_tokens * page_tokens
    assert counts[0] == length - request.cached_prefix_tokens >= 1
    assert (hit.token_ids, hit.logprobs) == (miss.token_ids, miss.logprobs)


def test_an_answer_is_found_again_as_part_of_the_next_prompt(llm):
    engine = engine_of(llm, page_tokens=4)
    first = engine.generate([5, 6, 7], replace(GREEDY, max_tokens=20, logprobs=1))
    turn = [5, 6, 7, *first.token_ids, 9, 8]
    (request,) = engine.add(turn, replace(GREEDY, logprobs=1))
    drain(engine)
    assert request.cached_prefix_tokens == 20
    fresh = engine_of(llm).generate(turn, replace(GREEDY, logprobs=1))
    assert (request.completion.token_ids, request.completion.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_salts_cancelled_prompts_and_prompt_logprobs_do_not_share(llm):
    engine = engine_of(llm, page_tokens=4, max_step_tokens=80)
    prompt = list(range(10, 30))

    def hit(params=GREEDY, salt=b""):
        (request,) = engine.add(prompt, params, salt=salt)
        drain(engine)
        return request.cached_prefix_tokens

    (cancelled,) = engine.add(prompt, GREEDY)
    engine.cancel(cancelled)
    assert hit() == 0
    assert hit(salt=b"another") == 0
    assert hit(replace(GREEDY, prompt_logprobs=0)) == 0
    assert hit() == 16
    assert hit(salt=b"another") == 16


def test_out_of_pages_preempts_the_youngest_and_nobody_notices(llm):
    engine = engine_of(llm, page_tokens=4, pages=8, max_rows=3)
    prompts = [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]
    requests = [engine.add(p, replace(GREEDY, max_tokens=20, logprobs=1))[0] for p in prompts]
    states = set()
    while engine.has_work:
        engine.step()
        states |= {request.state for request in requests}
    assert states == {"prefilling", "decoding", "preempted", "waiting", "finished"} - {"prefilling", "waiting"}
    assert requests[0].preemptions == 0 < requests[2].preemptions
    assert engine.report().num_preemptions == sum(r.preemptions for r in requests)
    serial = engine_of(llm, scheduler="serial")
    for request, prompt in zip(requests, prompts, strict=True):
        want = serial.generate(prompt, replace(GREEDY, max_tokens=20, logprobs=1))
        assert (request.completion.token_ids, request.completion.logprobs) == (want.token_ids, want.logprobs)


def test_the_pool_obeys_its_limit_and_says_what_is_wasted(llm):
    engine = engine_of(llm, pages=9, page_tokens=4)
    per_token = llm.config.kv_bytes_per_token("float32")
    assert engine.report().kv.allocated_bytes == 9 * 4 * per_token == engine.pool.num_bytes
    engine.add([5, 6, 7, 8, 9], GREEDY)
    engine.step()
    assert (engine.report().kv.active_bytes, engine.report().kv.wasted_bytes) == (8 * per_token, 3 * per_token)
    unlimited = engine_of(llm, max_rows=2)
    assert unlimited.pool.num_pages == 2 * llm.config.max_position_embeddings // 16


@pytest.mark.parametrize("kv", ["bf16", "fp8", ("fp32", "fp8")])
def test_pages_of_other_dtypes_take_fewer_bytes_and_keep_the_bits_of_a_row(llm, kv, prompts):
    params = replace(GREEDY, logprobs=1)
    engine = engine_of(llm, kv_dtype=kv, page_tokens=4, max_step_tokens=70)
    itemsizes = {"bf16": 4, "fp8": 2}.get(kv, 5)
    assert engine.pool.page_bytes == 4 * llm.config.num_key_value_heads * llm.config.head_dim * 2 * itemsizes
    together = engine.generate(prompts, params)
    serial = engine_of(llm, kv_dtype=kv, scheduler="serial").generate(prompts, params)
    assert [(c.token_ids, c.logprobs) for c in together] == [(c.token_ids, c.logprobs) for c in serial]
    exact = llm.generate(prompts, params)
    first = [abs(a.logprobs[0].logprob - b.logprobs[0].logprob) for a, b in zip(together, exact, strict=True)]
    assert 0 < max(first) < 0.5


def test_without_the_promise_of_bits_tokens_are_still_right(llm, prompts):
    engine = engine_of(llm, deterministic=False, pages=12, page_tokens=4, max_rows=4)
    got = engine.generate(prompts, GREEDY)
    assert [c.token_ids for c in got] == [c.token_ids for c in llm.generate(prompts, GREEDY)]


# ---- speculation


@pytest.mark.parametrize("drafts", [1, 4, 7])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3, logit_bias={70: 8.0, 71: 8.0})])
def test_guessing_ahead_changes_no_token_and_reports_what_it_won(llm, drafts, params):
    params = replace(params, max_tokens=60, logprobs=2)
    engine = engine_of(llm, speculate=drafts, page_tokens=4, max_rows=8)
    prompts = ["serving " * 4, "the the the the the", "x"]
    got, want = engine.generate(prompts, params), engine_of(llm, scheduler="serial").generate(prompts, params)
    assert [(c.token_ids, c.logprobs) for c in got] == [(c.token_ids, c.logprobs) for c in want]
    report = engine.report()
    assert report.num_drafts_proposed >= report.num_drafts_accepted > 0
    assert report.num_steps < max(len(c.token_ids) for c in got) + 3


def test_a_guess_beyond_a_stop_is_not_taken(llm):
    letter = llm.tokenizer.encode("a")[-1]
    params = replace(GREEDY, logit_bias={letter: 100.0}, stop=["aaa"], max_tokens=9)
    engine = engine_of(llm, speculate=7, max_rows=2)
    (request,) = engine.add("aaaa", params)
    drain(engine)
    assert (request.completion.token_ids, request.finish_reason) == ((letter,) * 3, "stop")
    assert request.finished_step == 2
    assert engine.report().num_drafts_accepted == 1


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3, logit_bias={70: 8.0, 71: 8.0})])
def test_a_draft_model_guesses_and_changes_no_token(llm, params):
    params = replace(params, max_tokens=40, logprobs=1)
    prompts = ["the cat", "x", "Once upon a time"]
    want = [(c.token_ids, c.logprobs) for c in engine_of(llm, scheduler="serial").generate(prompts, params)]
    rates = []
    for seed in (0, 1):  # the model itself, and one that guesses otherwise
        draft = LLM(Transformer(llm.config).initialise(seed, std=0.3).eval(), llm.tokenizer)
        config = EngineConfig(speculate=3, page_tokens=4, max_rows=8)
        engine = Engine(llm, config, draft=draft)
        assert [(c.token_ids, c.logprobs) for c in engine.generate(prompts, params)] == want
        rates.append(engine.report().num_drafts_accepted / engine.report().num_drafts_proposed)
    assert rates[1] < 0.5
    if params.temperature == 0:
        assert rates[0] > 0.8, rates


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5])
def test_a_draft_model_goes_on_from_any_part_of_its_guess(llm, taken):
    def fresh(tokens):
        return ModelProposer(llm.model, 60)(tokens, 4)

    proposer, text = ModelProposer(llm.model, 60), [5, 6, 7]
    for _ in range(4):
        guess = proposer(text, 4)
        assert guess == fresh(text)
        text = [*text, *guess[:taken], 9, 10][: len(text) + max(taken, 1)]
    assert proposer([5] * 58, 4) == []


def test_a_draft_models_cache_lives_while_its_request_runs(llm):
    engine = Engine(llm, EngineConfig(speculate=3, max_rows=1), draft=llm)
    first, second = (engine.add("the cat", GREEDY)[0] for _ in range(2))
    assert engine.report().draft_bytes == 0
    engine.step()
    engine.step()
    assert engine.report().draft_bytes == llm.model.new_cache(1, first.prompt_length + 12).num_bytes
    assert second.draft.num_bytes == 0
    engine.cancel(first)
    assert first.draft.num_bytes == engine.report().draft_bytes == 0
    drain(engine)
    assert second.completion.token_ids == llm.generate("the cat", GREEDY).token_ids
    assert engine.report().num_drafts_failed == 0


@pytest.mark.parametrize("bad", [{1}, {2, 3, 7}])
def test_a_draft_model_that_fails_costs_guesses_and_no_token(llm, monkeypatch, bad):
    calls, forward = [], Transformer(llm.config).initialise(0, std=0.3).eval()

    class Faulty:
        config, new_cache = forward.config, staticmethod(forward.new_cache)

        def __call__(self, *arguments, **options):
            calls.append(arguments)
            logits = forward(*arguments, **options)
            if len(calls) in bad:  # its cache has the tokens by now
                raise MemoryError
            return logits

    draft = SimpleNamespace(config=llm.config, model=Faulty())
    engine = Engine(llm, EngineConfig(speculate=3), draft=draft)
    got = engine.generate(["the cat", "x"], replace(GREEDY, max_tokens=30))
    assert [c.token_ids for c in got] == [
        c.token_ids for c in llm.generate(["the cat", "x"], replace(GREEDY, max_tokens=30))
    ]
    report = engine.report()
    assert report.num_drafts_failed == len(bad)
    assert report.num_drafts_accepted > 0.8 * report.num_drafts_proposed > 0


def test_a_draft_model_of_another_vocabulary_or_without_a_number_of_tokens_is_refused(llm):
    other = SimpleNamespace(config=SimpleNamespace(vocab_size=99))
    with pytest.raises(ConfigError, match="got a draft model of 99 tokens and speculate=2; need the model's own 280"):
        Engine(llm, EngineConfig(speculate=2), draft=other)
    with pytest.raises(ConfigError, match="speculate=0; need"):
        Engine(llm, EngineConfig(), draft=llm)


def test_a_diagnosed_token_says_where_it_was_made_and_costs_nothing_otherwise(llm):
    params = replace(GREEDY, max_tokens=30, logprobs=2, logit_bias={70: 12.0})
    engine = engine_of(llm, diagnose=True, speculate=4, max_rows=4)
    (other,) = engine.add("x", replace(GREEDY, max_tokens=2))
    (request,) = engine.add("the the the the the", params)
    drain(engine)
    assert [o.token_id for o in request.origins] == list(request.completion.token_ids)
    assert [o.position for o in request.origins] == [request.prompt_length + i for i in range(30)]
    assert {o.producer for o in request.origins} == {"prefill", "decode", "verify"}
    first = request.origins[0]
    assert (first.producer, first.step, first.num_rows) == ("prefill", 0, 2)
    assert first.num_tokens == request.prompt_length + other.prompt_length
    for origin, logprob in zip(request.origins, request.completion.logprobs, strict=True):
        assert [i for i, _ in origin.best] == [i for i, _ in logprob.top]
        assert origin.margin == pytest.approx(logprob.top[0][1] - logprob.top[1][1], abs=1e-4)
    plain = engine_of(llm)
    (request,) = plain.add("x", GREEDY)
    drain(plain)
    assert request.origins == []


def test_the_command_explains_a_token(llm, monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr("microllm.inference.load", lambda *_, **options: loaded.append(options["precision"]) or llm)
    command = ["generate", "--raw", "--prompt", "the cat", "--temperature", "0", "--max-tokens", "5", "--explain-token"]
    want = llm.generate("the cat", replace(GREEDY, max_tokens=5))
    assert main([*command, "2"]) == 0
    shown = capsys.readouterr().out
    assert want.text in shown
    position = len(want.prompt_token_ids) + 2
    assert f"token 2: {want.token_ids[2]}, at position {position}, made by decode in step 2, in fp32" in shown
    assert "1 requests and 1 tokens in the step" in shown
    assert main([*command, "5"]) == 2
    assert "got --explain-token 5; need 0 to 4, the answer's tokens" in capsys.readouterr().err
    main([*command, "0", "--device", "cpu", "--precision", "bf16"])
    main([*command[:-1], "--device", "cpu"])
    assert loaded[-2:] == ["bf16", "auto"], "only what asks for an engine, and leaves the precision open, gets fp32"
    assert set(loaded[:-2]) <= {"fp32", "auto"}
    main([*command, "0", "--device", "cpu"])
    assert loaded[-1] == "fp32"


# ---- refusals


def test_a_request_larger_than_the_pool_is_refused_and_none_of_its_list_runs(llm):
    engine = engine_of(llm, pages=3)
    with pytest.raises(
        RequestError, match=r"got a request of up to 50 tokens \(2 of them its prompt's\); need at most"
    ):
        engine.generate(["x", "x"], SamplingParams(max_tokens=48))
    with pytest.raises(RequestError, match="lower max_tokens or raise kv_bytes"):
        engine.generate(["x", "y" * 60], SamplingParams(max_tokens=8))
    assert not engine.has_work
    assert len(engine.generate("x", replace(GREEDY, max_tokens=47)).token_ids) == 47


def test_the_engines_own_context_ends_a_sequence_and_refuses_a_longer_prompt(llm):
    engine = engine_of(llm, max_context=20)
    assert len(engine.generate([5] * 15, replace(GREEDY, max_tokens=50)).token_ids) == 5
    with pytest.raises(RequestError, match="got a prompt of 20 tokens; need at most 19"):
        engine.add([5] * 20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduler": "fair"}, "got scheduler 'fair'; need continuous or serial"),
        ({"max_rows": 0}, "got max_rows=0; need a whole number from 1"),
        ({"max_rows": True}, "got max_rows=True"),
        ({"page_tokens": 24}, "got page_tokens=24; need a power of two"),
        ({"page_tokens": 512}, "need a whole number from 1 to 256"),
        ({"kv_bytes": 0}, "got kv_bytes=0"),
        ({"speculate": 8}, "got speculate=8; need a whole number from 0 to 7"),
        ({"max_step_tokens": 1}, "got max_step_tokens=1; need a whole number from 2"),
        ({"max_rows": 64, "max_step_tokens": 64}, "got max_step_tokens=64; need more than 64"),
        ({"max_rows": 64, "max_step_tokens": 300, "speculate": 4}, "need more than 320"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)


@pytest.mark.parametrize(("rows", "drafts", "tokens"), [(64, 0, 512), (64, 7, 960), (1, 4, 516), (4096, 7, 36864)])
def test_a_step_has_room_for_every_number_of_rows_and_guesses(rows, drafts, tokens):
    config = EngineConfig(max_rows=rows, speculate=drafts)
    assert config.step_tokens == tokens
    assert config.min_chunk >= min(rows, 448)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_packed_weights_are_refused_by_name_and_before_anything_loads(precision):
    llm = SimpleNamespace(precision=precision, config=None, model=Plan.__new__(Plan))
    words = rf'got {precision} weights packed for a CPU; the engine runs fp32, .* there; load\(..., precision="fp32"\)'
    with pytest.raises(ConfigError, match=words):
        Engine(llm)


def test_an_engine_has_its_weights_before_it_looks_for_free_memory(llm, monkeypatch):
    order = []

    class Watched(LLM):
        @property
        def transformer(self):
            order.append("weights")
            return self.model

    count = engine_module.count_pages
    monkeypatch.setattr(engine_module, "count_pages", lambda *a, **k: order.append("memory") or count(*a, **k))
    Engine(Watched(llm.model, llm.tokenizer), EngineConfig(max_rows=1))
    assert order == ["weights", "memory"]


def test_a_salt_is_bytes(llm):
    with pytest.raises(RequestError, match="got a salt of type str; need bytes"):
        engine_of(llm).add("x", GREEDY, salt="me")


def test_a_steps_head_multiplies_only_where_a_token_is_wanted(llm, monkeypatch):
    engine = engine_of(llm, max_rows=1, max_step_tokens=9)
    (request,) = engine.add("y" * 30, replace(GREEDY, max_tokens=2))
    heads, linear = [], ops.linear

    def watched(x, weight, bias=None, *, out=None):
        heads.append(weight.shape[0] == llm.config.vocab_size)
        return linear(x, weight, bias, out=out)

    monkeypatch.setattr(ops, "linear", watched)
    drain(engine)
    assert engine.report().num_steps == 5
    assert sum(heads) == 2
    assert request.completion.token_ids == llm.generate("y" * 30, replace(GREEDY, max_tokens=2)).token_ids


def test_a_request_says_when_things_happened(llm):
    engine = engine_of(llm)
    (request,) = engine.add("x", GREEDY)
    assert (request.first_token_s, request.finished_s) == (None, None)
    drain(engine)
    assert request.submitted_s < request.first_token_s < request.finished_s
    seconds = request.finished_s - request.submitted_s
    assert request.completion.timings.total_ms == pytest.approx(1e3 * seconds)


@pytest.mark.parametrize("call", ["add", "stream", "generate"])
def test_bad_prompts_and_parameters_are_refused_at_once(llm, call):
    engine = engine_of(llm)
    for prompt, params, words in [
        ([], None, "empty prompt"), ([999], None, "got token ids"), ("x", {}, "got params of type dict"),
        ("x", SamplingParams(stop_token_ids=[280]), "stop_token_ids"),
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=words):
            getattr(engine, call)(prompt, params)
    assert not engine.has_work
