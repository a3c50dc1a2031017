"""Random workloads: whatever arrives, is cancelled, shares pages or is preempted, each request gets serial's tokens."""

import zlib
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from microllm import SamplingParams
from microllm.inference.engine import Engine
from microllm.inference.engine_config import EngineConfig
from microllm.inference.scheduler import Scheduler
from microllm.step import PageAllocator

EOS = 1
BASE = [4 + (7 * i) % 11 for i in range(40)]


@pytest.fixture(scope="module", autouse=True)
def _tiny(llm):
    global TINY, BYTES_PER_TOKEN
    TINY, BYTES_PER_TOKEN = llm, llm.config.kv_bytes_per_token("float32")
    assert llm.eos_ids == {EOS}


def next_token(history):
    """A token that depends on every token before it and on who wrote it, yet is often foretold by the last two."""
    whole = zlib.crc32(repr(history).encode())
    local = zlib.crc32(repr([token for token, _ in history[-2:]]).encode())
    if whole % 29 == 0:
        return EOS
    return 4 + (whole // 7 % 6 if whole % 3 == 0 else local % 6)


def alone(prompt, max_tokens, same_bits):
    """What the tokens must be: the prompt written by prefill, the rest by decoding, one after the other."""
    history = tuple((token, "" if same_bits else "prefill") for token in prompt)
    tokens = []
    while len(tokens) < min(max_tokens, TINY.config.max_position_embeddings - len(prompt)):
        tokens.append(next_token(history))
        if tokens[-1] == EOS:
            break
        history += ((tokens[-1], "" if same_bits else "decode"),)
    return tuple(tokens)


class HashRunner:
    """Stands in for the model: what it reads through a request's pages is all that it knows."""

    num_cold = 0

    def __init__(self, engine, same_bits):
        self.engine, self.same_bits = engine, same_bits
        self.memory, self.num_runs = {}, 0

    def run(self, chunks):
        assert chunks
        self.num_runs += 1
        size, holders = self.engine.config.page_tokens, self.engine.scheduler.allocator._holders
        tokens, firsts = [], []
        for chunk in chunks:
            pages = chunk.request.pages
            assert chunk.start == chunk.request.num_computed
            for position, token in enumerate(chunk.token_ids, start=chunk.start):
                page = pages[position // size]
                assert holders[page] == 1, "a shared page is written"
                self.memory[page, position % size] = token, "" if self.same_bits else chunk.kind
            firsts.append(len(tokens))
            end = chunk.start + len(chunk.token_ids)
            for last in range(end - chunk.num_logits, end):
                tokens.append(next_token(tuple(self.memory[pages[p // size], p % size] for p in range(last + 1))))
        return 5 * torch.nn.functional.one_hot(
            torch.tensor(tokens, dtype=torch.int64), TINY.config.vocab_size
        ).float(), firsts


class Workload(RuleBasedStateMachine):
    @initialize(
        page_tokens=st.sampled_from([1, 2, 4, 4, 16]), num_pages=st.integers(2, 14), rows=st.integers(1, 4),
        min_chunk=st.integers(1, 9), speculate=st.sampled_from([0, 0, 2, 7]), same_bits=st.booleans(),
        prefix_cache=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def start(self, page_tokens, num_pages, rows, min_chunk, speculate, same_bits, prefix_cache):
        config = EngineConfig(
            page_tokens=page_tokens, max_rows=rows, max_step_tokens=rows * (1 + speculate) + min_chunk,
            kv_bytes=num_pages * page_tokens * BYTES_PER_TOKEN, speculate=speculate, prefix_cache=prefix_cache,
        )  # fmt: skip
        self.engine, self.same_bits = Engine(TINY, config), same_bits
        self.engine.scheduler = Scheduler(PageAllocator(self.engine.pool.num_pages), config, same_bits=same_bits)
        self.engine._runner = HashRunner(self.engine, same_bits)
        self.capacity = self.engine.pool.num_pages * page_tokens
        self.requests = []

    @rule(
        shared=st.integers(0, 40), tail=st.lists(st.sampled_from([4, 5, 6]), max_size=3),
        max_tokens=st.integers(1, 25), salt=st.sampled_from([b"", b"", b"", b"x"]), n=st.sampled_from([1, 1, 2]),
    )  # fmt: skip
    def add(self, shared, tail, max_tokens, salt, n):
        prompt = [*BASE[:shared], *tail][: self.capacity] or [9]
        self.queue(prompt, min(max_tokens, self.capacity - len(prompt) + 1), n, salt)

    def queue(self, prompt, max_tokens, n, salt):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n, ignore_eos=False)
        requests = self.engine.add(prompt, params, salt=salt)
        want = alone(prompt, max_tokens, self.same_bits)
        self.requests += [(request, want) for request in requests]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), max_tokens=st.integers(1, 9))
    def go_on(self, data, max_tokens):
        """Ask for what follows an earlier request's prompt and answer so far."""
        earlier = data.draw(st.sampled_from(self.requests))[0].sequence
        prompt = [*earlier.prompt_ids, *earlier.token_ids][: min(self.capacity, 90)]
        self.queue(prompt, min(max_tokens, self.capacity - len(prompt) + 1), 1, b"")

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.live_step()

    def live_step(self):
        """Where there is work, a step does some."""
        before, has_work = self.engine._runner.num_runs, self.engine.has_work
        self.engine.step()
        assert self.engine._runner.num_runs == before + has_work
        self.pages_add_up()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request, _ = data.draw(st.sampled_from(self.requests))
        self.engine.cancel(request)
        assert request.pages == []
        self.engine.cancel(request)

    @invariant()
    def pages_add_up(self):
        if not self.__dict__.get("requests"):
            return
        scheduler, config = self.engine.scheduler, self.engine.config
        running, report = scheduler.running, self.engine.report()
        held = {page for request in running for page in request.pages}
        assert scheduler.allocator.num_held == len(held)
        assert report.kv.active_bytes == len(held) * self.engine.pool.page_bytes
        assert report.kv.wasted_bytes < (len(running) or 1) * self.engine.pool.page_bytes
        promised = sum(
            -(-min(r.num_tokens + 1, r.max_stored_tokens) // config.page_tokens) - len(r.pages)
            for r in running if r.state == "prefilling"
        )  # fmt: skip
        assert promised <= scheduler.allocator.num_free, "a prompt on its way may find no page"
        order = [request.number for request in (*running, *scheduler.waiting)]
        assert order == sorted(order)
        assert len({request.slot for request in running}) == len(running) <= config.num_rows
        for request, want in self.requests:
            assert tuple(request.sequence.token_ids) == want[: len(request.sequence.token_ids)]

    def teardown(self):
        if "requests" not in self.__dict__:
            return
        while self.engine.has_work:
            self.live_step()
        assert self.engine.scheduler.allocator.num_held == 0
        for request, want in self.requests:
            if request.finish_reason != "cancelled":
                assert tuple(request.sequence.token_ids) == want
                assert request.finish_reason == ("stop" if want[-1] == EOS else "length")
            assert request.finished_step - request.submitted_step <= request.max_steps


Workload.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestWorkload = Workload.TestCase

PROMPTS = [BASE[:n] for n in (1, 3, 4, 5, 8, 9, 16, 17, 33)] + [[*BASE[:8], 50], [*BASE[:16], 60, 61]]
KINDS = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=1, max_tokens=12, seed=3, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5, seed=-4, frequency_penalty=0.5, logprobs=1),
    SamplingParams(temperature=0, max_tokens=7, repetition_penalty=1.3, prompt_logprobs=1, min_tokens=3),
]


@cache
def serial(prompt, kind):
    engine = Engine(TINY, EngineConfig(scheduler="serial", max_step_tokens=64, page_tokens=16))
    return bits_of(engine.generate(list(PROMPTS[prompt]), KINDS[kind]))


def bits_of(completion):
    return completion.token_ids, completion.logprobs, completion.prompt_logprobs, completion.text


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, len(PROMPTS) - 1), st.integers(0, len(KINDS) - 1), st.integers(0, 6),
            st.sampled_from([None, None, None, 1, 4]),
        ), min_size=1, max_size=7,
    ),
    page_tokens=st.sampled_from([1, 4, 16]), tokens=st.integers(48, 150), rows=st.integers(2, 5),
    min_chunk=st.integers(1, 30), speculate=st.sampled_from([0, 3]),
)  # fmt: skip
def test_the_models_own_bits_are_those_of_serial(arrivals, page_tokens, tokens, rows, min_chunk, speculate):
    engine = Engine(
        TINY,
        EngineConfig(
            page_tokens=page_tokens, kv_bytes=tokens * BYTES_PER_TOKEN, max_rows=rows, speculate=speculate,
            max_step_tokens=rows * (1 + speculate) + min_chunk,
        ),
    )  # fmt: skip
    requests = []
    for prompt, kind, gap, cancelled in arrivals:
        (request,) = engine.add(PROMPTS[prompt], KINDS[kind])
        requests.append((request, prompt, kind))
        for step in range(gap):
            if step == cancelled:
                engine.cancel(request)
            engine.step()
    while engine.has_work:
        engine.step()
    for request, prompt, kind in requests:
        if request.finish_reason != "cancelled":
            assert bits_of(request.completion) == serial(prompt, kind)
        else:
            assert request.completion.token_ids == serial(prompt, kind)[0][: len(request.completion.token_ids)]
        assert request.finished_step - request.submitted_step <= request.max_steps
    assert engine.scheduler.allocator.num_held == 0
