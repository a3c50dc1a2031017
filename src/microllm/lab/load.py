"""A load of requests, seeded: who comes when with which prompt; sent to a server over HTTP, or straight into an engine.

Place: under ``bench_serve``. The client speaks HTTP/1.1 over asyncio's streams and parses nothing while the clock runs,
so that one core keeps up with a GPU's streams; a general client takes longer for an event than the engine for a token.

Arrivals are a Poisson process of ``rate`` requests a second, whatever the server does (open loop); without a rate, as
many requests as ``concurrency`` are kept in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from microllm.inference import Engine, Request
from microllm.sampling import SamplingParams

Suite = Literal["uniform", "short-heavy", "long-heavy", "one-long"]
SHORT, LONG = ((16, 64), (16, 32)), ((256, 512), (64, 96))
"""Tokens of a prompt and of its answer, each from least to most."""
LONG_SHARE: dict[Suite, float] = {"uniform": 0.5, "short-heavy": 0.2, "long-heavy": 0.8, "one-long": 0.0}
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a load: when it comes, what it asks."""

    arrival_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Answer:
    """What became of a call. Times are seconds from the load's start; one a piece of the answer as it arrived."""

    sent_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Return the time from its call to its first piece."""
        return self.piece_s[0] - self.sent_s if self.piece_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between its pieces."""
        return [after - before for before, after in itertools.pairwise(self.piece_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """What a load is made from.

    Args:
        suite: uniform: half long; short-heavy: a fifth; long-heavy: four fifths; one-long: the first alone.
        num_requests: How many.
        rate: Requests a second, as a Poisson process; None keeps ``concurrency`` in flight.
        concurrency: Most in flight where there is no rate.
        scale: Multiplies all lengths.
        shared_share: Share of the prompts that begin alike.
        seed: Of lengths, tokens and arrivals.
    """

    suite: Suite = "uniform"
    num_requests: int = 32
    rate: float | None = None
    concurrency: int = 1
    scale: float = 1.0
    shared_share: float = 0.25
    seed: int = 0


def make_load(shape: LoadShape, token_ids: Sequence[int], longest: int) -> list[Call]:
    """Return the calls, in order of arrival; each fits into ``longest`` tokens."""
    draw = random.Random(f"{shape.suite} {shape.seed}")
    shared = draw.choices(token_ids, k=max(1, round(LONG[0][0] * shape.scale / 2)))
    calls, now = [], 0.0
    for number in range(shape.num_requests):
        is_long = draw.random() < LONG_SHARE[shape.suite] or (shape.suite == "one-long" and number == 0)
        lengths = [max(1, round(draw.randint(*bounds) * shape.scale)) for bounds in (LONG if is_long else SHORT)]
        num_prompt = min(lengths[0], longest // 2)
        prompt = draw.choices(token_ids, k=num_prompt)
        if draw.random() < shape.shared_share:
            prompt = (
                [*shared, *prompt][:num_prompt] if num_prompt > len(shared) else shared[: num_prompt - 1] + prompt[:1]
            )
        calls.append(Call(now, prompt, min(lengths[1], longest - num_prompt)))
        now += draw.expovariate(shape.rate) if shape.rate else 0.0
    return calls


def run_over_http(host: str, port: int, model: str, calls: Sequence[Call], concurrency: int | None) -> list[Answer]:
    """Return what a server answers; without a ``concurrency`` each call goes when it is due, whatever is in flight."""
    return asyncio.run(_run_over_http((host, port), model, calls, concurrency))


async def _run_over_http(
    place: tuple[str, int], model: str, calls: Sequence[Call], concurrency: int | None
) -> list[Answer]:  # fmt: skip
    gate = asyncio.Semaphore(concurrency or len(calls))
    start = time.perf_counter()

    async def one(call: Call) -> tuple[Answer, list[tuple[float, bytes]]]:
        await asyncio.sleep(max(0.0, call.arrival_s - (time.perf_counter() - start)))
        async with gate:
            answer, reads = Answer(sent_s=time.perf_counter() - start), list[tuple[float, bytes]]()
            try:
                reader, writer = await asyncio.open_connection(*place)
                writer.write(_request(model, call))
                while data := await reader.read(READ_BYTES):
                    reads.append((time.perf_counter() - start, data))
                writer.close()
            except OSError as error:
                answer.error = f"{type(error).__name__}: {error}"
            answer.end_s = time.perf_counter() - start
            return answer, reads

    found = await asyncio.gather(*map(one, calls))
    for answer, reads in found:
        _parse(answer, reads)
    return [answer for answer, _ in found]


def _request(model: str, call: Call) -> bytes:
    body = json.dumps({
        "model": model, "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _parse(answer: Answer, reads: Sequence[tuple[float, bytes]]) -> None:
    """Read what came: an event begins with "data: " on a line of its own, and arrived with its last byte."""
    rest, texts = b"", []
    if reads and not reads[0][1].startswith(b"HTTP/1.1 200"):
        answer.error = answer.error or b"".join(data for _, data in reads).decode(errors="replace")[:200]
        return
    for when, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["message"]
            elif event["choices"]:
                texts.append(event["choices"][0]["text"])
                if not answer.piece_s or answer.piece_s[-1] < when:  # what one read brought is one piece
                    answer.piece_s.append(when)
            else:
                answer.num_tokens = event["usage"]["completion_tokens"]
    answer.text = "".join(texts)
    if not answer.num_tokens and not answer.error:
        answer.error = "got an answer that broke off"


def run_in_engine(engine: Engine, calls: Sequence[Call], concurrency: int | None) -> list[Answer]:
    """Return what an engine in this process answers to the same calls, with nothing between."""
    answers = [Answer() for _ in calls]
    waiting, running = list(enumerate(calls))[::-1], dict[Request, int]()
    start = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - start
        while waiting and waiting[-1][1].arrival_s <= now and len(running) < (concurrency or len(calls)):
            number, call = waiting.pop()
            params = SamplingParams(max_tokens=call.max_tokens, temperature=0, ignore_eos=True)
            running[engine.add(call.prompt, params)[0]] = number
            answers[number].sent_s = now
        touched, now = engine.step(), time.perf_counter() - start
        for request in touched:
            answer = answers[running[request]]
            answer.piece_s.append(now)
            if request.finish_reason is not None:
                done = request.completion
                answer.end_s, answer.num_tokens, answer.text = now, len(done.token_ids), done.text
                answer.error = done.error or ""
                del running[request]
    return answers
