"""Bursts and captured passes, uncaptured on a CPU: the tokens of the plain engine, whatever comes and goes."""

import random
from dataclasses import replace

import pytest
import torch

from microllm import SamplingParams, ops
from microllm.errors import ConfigError
from microllm.inference import Engine, EngineConfig
from microllm.inference.graph_runner import padded_width
from microllm.inference.paged_forward import Arena, PagedForward
from microllm.step import RowGroup

GREEDY = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, seed=3, top_k=40, max_tokens=17)


def with_bursts(llm, **options):
    """Return an engine that runs as on a GPU."""
    return Engine(llm, EngineConfig(deterministic=False, steps="uncaptured", **options))


def until_a_burst_is_under_way(engine):
    for _ in range(20):
        if engine._bursts.under_way:
            return
        engine.step()
    raise AssertionError("no burst in 20 steps")


@pytest.fixture
def plain(llm):
    return Engine(llm, EngineConfig(deterministic=False))


def tokens(completions):
    return [(c.token_ids, c.text, c.finish_reason) for c in completions]


def test_what_is_prewarmed_is_made_once_and_leaves_no_request_cold(llm, plain, prompts):
    engine = with_bursts(llm, max_rows=6, max_step_tokens=96)
    report = engine.prewarm()
    shapes = {(shape.kind, shape.num_rows, shape.width) for shape in report.shapes}
    assert shapes == {(kind, rows, 1) for kind in ("decode", "greedy", "sampled") for rows in (1, 2, 4, 8)} | {
        ("prompt", 1, width) for width in (16, 32, 48, 64, 80, 96)
    }
    tables = engine._runner.forward.table_bytes + engine._runner._tables.num_bytes
    assert report.num_bytes + tables == engine.memory().arena_bytes
    assert report.num_bytes > 0 < report.ms
    assert engine.prewarm().shapes == ()
    for text, params in zip(prompts, (GREEDY, WARM, replace(GREEDY, logprobs=1)) * 2, strict=True):
        (request,) = engine.add(text, params)
        while engine.has_work:
            engine.step()
        assert not request.cold
        assert request.completion.token_ids == plain.generate(text, params).token_ids


def test_who_meets_a_shape_first_is_cold(llm):
    engine, colds = with_bursts(llm), []
    engine.prewarm(buckets=(1,), lengths=(4,))
    for rows in (1, 2, 2, 2):  # prompts of two rows are captured when they are met again
        requests = [engine.add("the", replace(GREEDY, seed=row))[0] for row in range(rows)]
        while engine.has_work:
            engine.step()
        colds.append({request.cold for request in requests})
    assert colds == [{False}, {True}, {True}, {False}]


@pytest.mark.parametrize(
    "wrong", [{"buckets": (0,)}, {"buckets": (3,)}, {"lengths": (0,)}, {"lengths": (500,)}, {"buckets": 2},
              {"buckets": "2"}, {"buckets": (1.5,)}, {"buckets": (True,)}, {"lengths": (None,)}],
)  # fmt: skip
def test_shapes_that_no_step_has_are_refused(llm, wrong):
    with pytest.raises(ConfigError, match=f"got {next(iter(wrong))}=.*need a list of whole numbers from 1 to"):
        with_bursts(llm, max_rows=2).prewarm(**wrong)


def test_empty_lists_ask_for_no_shape(llm):
    engine = with_bursts(llm, max_rows=2)
    assert engine.prewarm(buckets=(), lengths=()).shapes == ()
    assert {shape.kind for shape in engine.prewarm(buckets=[], lengths=[4]).shapes} == {"prompt"}


def test_a_cpu_has_nothing_to_make(plain):
    assert plain.prewarm().shapes == ()
    (request,) = plain.add("the", GREEDY)
    plain.step()
    assert not request.cold


@pytest.mark.parametrize("params", [GREEDY, WARM, replace(GREEDY, logprobs=2), replace(WARM, repetition_penalty=1.3)])
def test_bursts_give_the_tokens_of_the_plain_engine(llm, plain, prompts, params):
    engine = with_bursts(llm)
    assert tokens(engine.generate(prompts, params)) == tokens(plain.generate(prompts, params))
    assert engine.report().kv.active_bytes == engine.pool.page_bytes * 0
    assert not engine._bursts.under_way


def test_a_burst_runs_where_the_host_has_no_say(llm, prompts):
    engine, steps = with_bursts(llm), []
    begin = engine._bursts.begin
    engine._bursts.begin = lambda chunks: steps.append(begin(chunks)) or steps[-1]
    engine.generate(prompts, GREEDY)
    assert any(steps)
    steps.clear()
    engine.generate(prompts, replace(GREEDY, logit_bias={5: 1.0}))
    assert steps
    assert not any(steps)


def test_rows_come_and_go_between_bursts(llm, plain, prompts):
    want = {text: plain.generate(text, GREEDY).token_ids for text in prompts}
    engine = with_bursts(llm, max_rows=2, page_tokens=4)
    waiting, running = list(prompts) * 2, []
    touched = set()
    while waiting or engine.has_work:
        if waiting:
            text = waiting.pop()
            running.append((text, engine.add(text, replace(GREEDY, max_tokens=5 + len(waiting)))[0]))
        touched |= {request.number for request in engine.step()}
    for text, request in running:
        assert request.completion.finish_reason == "length"
        assert list(request.completion.token_ids) == list(want[text][: len(request.completion.token_ids)])
    assert touched == {request.number for _, request in running}
    assert engine.report().kv.active_bytes == 0


def test_a_cancelled_row_gives_its_pages_back_and_the_others_go_on(llm, plain, prompts):
    engine = with_bursts(llm)
    requests = [engine.add(text, GREEDY)[0] for text in prompts]
    until_a_burst_is_under_way(engine)
    engine.cancel(requests[0])
    assert requests[0].state == "finished"
    assert requests[0].pages == []
    while engine.has_work:
        engine.step()
    assert requests[0].completion.finish_reason == "cancelled"
    for text, request in zip(prompts[1:], requests[1:], strict=True):
        assert request.completion.token_ids == plain.generate(text, GREEDY).token_ids
    assert engine.report().kv.active_bytes == 0


def test_a_pool_too_small_for_all_preempts_and_still_ends(llm, plain, prompts):
    engine = with_bursts(llm, page_tokens=4, kv_bytes=20 * with_bursts(llm, page_tokens=4).pool.page_bytes)
    params = replace(GREEDY, max_tokens=20)
    assert tokens(engine.generate(prompts, params)) == tokens(plain.generate(prompts, params))
    assert engine.report().num_preemptions > 0
    assert engine.report().kv.active_bytes == 0


def test_logits_that_are_not_finite_end_one_row(llm, prompts):
    engine = with_bursts(llm)
    requests = [engine.add(text, GREEDY)[0] for text in prompts]
    until_a_burst_is_under_way(engine)
    for request in requests[:1]:
        for pages in engine.pool.v_pages:
            pages[request.pages[0]] = torch.nan
    while engine.has_work:
        engine.step()
    reasons = [request.completion.finish_reason for request in requests]
    assert reasons == ["error"] + ["length"] * (len(prompts) - 1)
    assert "non-finite" in requests[0].completion.error


def test_a_sequence_that_cannot_take_its_token_ends_alone(llm, plain, prompts):
    engine = with_bursts(llm)
    requests = [engine.add(text, GREEDY)[0] for text in prompts]
    until_a_burst_is_under_way(engine)

    def broken(token_id, logprob=None):
        raise UnicodeError("no such text")

    requests[1].sequence.accept = broken
    while engine.has_work:
        engine.step()
    assert requests[1].completion.finish_reason == "error"
    assert "UnicodeError" in requests[1].completion.error
    for text, request in zip(prompts, requests, strict=True):
        if request is not requests[1]:
            assert request.completion.token_ids == plain.generate(text, GREEDY).token_ids


def test_weights_are_packed_in_place_and_once(llm, prompts):
    before = {name: p.clone() for name, p in llm.transformer.named_parameters()}
    with_bursts(llm)
    places = {name: p.data_ptr() for name, p in llm.transformer.named_parameters()}
    with_bursts(llm)
    for name, p in llm.transformer.named_parameters():
        assert torch.equal(p, before[name])
        assert p.data_ptr() == places[name]
    q, k = (llm.transformer.layers[0].self_attn.get_submodule(f"{x}_proj").weight for x in "qk")
    assert q.data_ptr() + q.numel() * q.itemsize == k.data_ptr()


def test_a_captured_chunk_is_a_quarter_longer_at_most():
    for n in range(1, 5000):
        assert n <= padded_width(n) <= max(n + 15, n * 5 / 4)
    assert len({padded_width(n) for n in range(1, 4097)}) <= 40


@pytest.mark.parametrize("one_tiling", [False, True])
def test_one_row_folds_its_norms_into_products_only_where_bits_may_follow_the_number_of_rows(llm, one_tiling):
    engine = with_bursts(llm)
    forward = PagedForward(llm.transformer, engine.pool, context=64, one_tiling=one_tiling)
    for num_rows in (1, 2):
        group = RowGroup(num_rows, 1, decodes=True)
        group.fill([(0, 0, [3])])
        with ops.ledger() as ran, torch.inference_mode():
            forward.hidden(group, Arena(forward, group, num_rows))
        folded = any(entry.op == "norm_linear" for entry in ran)
        assert folded == (num_rows == 1 and not one_tiling)


def test_a_step_holds_less_than_an_empty_page_a_request_bursts_under_way_or_not(llm, prompts):
    engine, in_bursts = with_bursts(llm, page_tokens=4, max_rows=4), 0
    for number, text in enumerate(prompts * 2):
        engine.add(text, replace(GREEDY, max_tokens=5 + number))
    while engine.has_work:
        engine.step()
        report = engine.report()
        in_bursts += engine._bursts.under_way
        assert report.kv.wasted_bytes < max(report.num_running, 1) * engine.pool.page_bytes
    assert in_bursts > 5


def test_memory_is_weights_pool_and_arena(llm, prompts):
    engine = with_bursts(llm)
    engine.generate(prompts, GREEDY)
    memory = engine.memory()
    assert memory.weight_bytes >= 4 * llm.config.num_parameters()
    assert memory.pool_bytes == engine.pool.num_bytes
    assert memory.accounted_bytes == memory.weight_bytes + memory.pool_bytes + memory.arena_bytes
    assert memory.arena_bytes > engine._runner.passing_bytes > 0
    assert memory.peak_bytes is None


@pytest.mark.parametrize("seed", range(8))
def test_any_coming_and_going_gives_each_request_the_tokens_it_has_alone(llm, plain, prompts, seed):
    draw = random.Random(seed)
    engine = with_bursts(llm, max_rows=draw.choice([2, 5, 8]), page_tokens=4)
    waiting, running, cancelled = [], [], set()
    for text in prompts * 2:
        params = replace(draw.choice([GREEDY, WARM]), max_tokens=draw.randint(1, 25), ignore_eos=True)
        tokens = plain.generate(text, params).token_ids
        if draw.random() < 0.5:  # a stop somewhere in the middle
            params = replace(params, stop_token_ids=(draw.choice(tokens),))
        waiting.append((text, params))
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.4:
            text, params = waiting.pop()
            running.append((text, params, engine.add(text, params)[0]))
        engine.step()
        if running and draw.random() < 0.05:
            request = draw.choice(running)[2]
            cancelled |= {request.number} if request.finish_reason is None else set()
            engine.cancel(request)
    for text, params, request in running:
        want, got = plain.generate(text, params).token_ids, request.completion.token_ids
        assert got == (want[: len(got)] if request.number in cancelled else want)
    assert engine.report().kv.active_bytes == 0
