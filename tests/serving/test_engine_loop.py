"""The engine's process from the inside: requests that fail alone, steps that fail for all, and the frames between."""

import json
import socket
import threading

import pytest

from microllm.inference import Engine, EngineConfig, load
from microllm.sampling import Sampler, SamplingParams
from microllm.serving.engine_client import add_command
from microllm.serving.engine_process import MAX_FAILED_STEPS, EngineLoop
from microllm.serving.wire import FrameReader, encode_frame


class Bench:
    """A loop in a thread, and the other end of its socket."""

    def __init__(self, model):
        self.engine = Engine(load(model, device="cpu", precision="fp32"), EngineConfig(max_rows=4))
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(30)
        self.frames, self.loop = FrameReader(), EngineLoop(self.engine, theirs, FrameReader())
        self.error = None
        self.thread = threading.Thread(target=self._run, args=(theirs,))
        self.thread.start()

    def _run(self, theirs):
        try:
            self.loop.run([])
        except RuntimeError as error:
            self.error = error
        finally:
            theirs.close()

    def add(self, number, text="the", **more):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **more})
        prompt = self.engine.llm.tokenizer.encode(text)
        self.ours.sendall(encode_frame(add_command(number, [prompt], params, b"")))

    def endings(self, count):
        """Return how each of the next ``count`` requests to end did, by number."""
        found = {}
        while len(found) < count:
            data = self.ours.recv(1 << 16)
            assert data, "the loop has ended"
            for message in self.frames.feed(data):
                found |= {number: text for number, _, text in message.get("refused", ())}
                for number, _, _, _, _, reason, facts in message.get("pieces", ()):
                    if reason:
                        found[number] = facts["error"] or reason
        return found

    def close(self):
        self.ours.close()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def bench(tiny):
    bench = Bench(tiny)
    yield bench
    bench.close()


def test_an_exception_in_one_request_leaves_the_others_alone(bench, monkeypatch):
    edit = Sampler.edit

    def failing(self, logits):
        if self.params.min_tokens == 3:
            raise RuntimeError("planted")
        edit(self, logits)

    monkeypatch.setattr(Sampler, "edit", failing)
    bench.add(1)
    bench.add(2, min_tokens=3, stop_token_ids=[5])
    bench.add(3)
    found = bench.endings(3)
    assert "planted" in found.pop(2)
    assert found == {1: "length", 3: "length"}
    assert bench.engine.scheduler.allocator.num_held == 0


def test_a_step_that_fails_costs_those_that_ran(bench, monkeypatch):
    run, calls = bench.engine._runner.run, []

    def failing(chunks):
        calls.append(len(chunks))
        if len(calls) == 3:
            raise RuntimeError("planted")
        return run(chunks)

    monkeypatch.setattr(bench.engine._runner, "run", failing)
    bench.add(1, max_tokens=50)
    assert "planted" in bench.endings(1)[1]
    bench.add(2)
    assert bench.endings(1) == {2: "length"}
    assert bench.engine.scheduler.allocator.num_held == 0


def test_steps_that_fail_again_and_again_end_the_process(bench, monkeypatch):
    def failing(chunks):
        raise RuntimeError("planted")

    monkeypatch.setattr(bench.engine._runner, "run", failing)
    for number in range(MAX_FAILED_STEPS - 1):
        bench.add(number)
        assert "planted" in bench.endings(1)[number]
    bench.add(99)
    bench.thread.join(30)
    assert "planted" in str(bench.error)


def test_what_the_engine_cannot_hold_is_refused_with_its_reason(bench):
    bench.ours.sendall(encode_frame({"add": 7, "prompts": [[70], []], "params": {"max_tokens": 4}, "salt": ""}))
    assert "empty prompt" in bench.endings(1)[7]
    bench.ours.sendall(encode_frame({"add": 8, "prompts": [[70]], "params": {"temprature": 1}, "salt": ""}))
    assert "temperature" in bench.endings(1)[8]
    assert not bench.engine.has_work


def test_frames_arrive_whole_however_they_are_cut():
    messages = [{"add": i, "text": "Grüße\n" * i, "x": [float("-inf"), None]} for i in range(5)]
    stream = b"".join(map(encode_frame, messages))
    for size in (1, 3, 7, len(stream)):
        reader, found = FrameReader(), []
        for start in range(0, len(stream), size):
            found += reader.feed(stream[start : start + size])
        assert json.dumps(found) == json.dumps(messages)
