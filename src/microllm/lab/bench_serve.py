"""A server under load beside its engine alone: the same requests over HTTP and straight into ``Engine.step``.

Place: ``microllm bench serve``. The server is two processes (HTTP, engine), the load comes from this one; then the
server ends and the engine runs here. What HTTP adds shows in the ratio of tokens a second. Parity: no error, every
answer as long as asked, and where the engine promises the same bits in every batch, the same text.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from microllm.errors import ConfigError, UnavailableError
from microllm.evidence.environment import Environment, capture_environment
from microllm.evidence.rows import Row, environment_fields, markdown_table, write_row
from microllm.inference import Engine, EngineConfig, load
from microllm.inference.placement import choose_device, engine_precision
from microllm.io.resolve import resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.lab.load import Answer, Call, LoadShape, Suite, make_load, run_in_engine, run_over_http

SUITES: tuple[Suite, ...] = ("uniform", "short-heavy", "long-heavy", "one-long")
MAX_UNEVEN = 3.0
"""S2: the 99th percentile of the time between pieces, over its median."""
_NAME = "bench"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig:
    """What is served, and which loads it gets."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "auto"
    """auto (the checkpoint's own on a GPU, fp32 on a CPU), fp32, bf16 or fp16."""
    suite: tuple[Suite, ...] = SUITES
    """Which mixtures of lengths."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Requests in flight; the first is what the others' efficiency is against."""
    rate: float | None = None
    """Requests a second as a Poisson process, in place of a concurrency."""
    num_requests: int = 32
    """Requests a run, and at least four for each in flight."""
    scale: float = 1.0
    """Multiplies all lengths: prompts of 16 to 64 or 256 to 512 tokens, answers of 16 to 32 or 64 to 96."""
    shared_share: float = 0.25
    """Share of the prompts that begin alike."""
    ttft_bar_ms: float = 1000.0
    """A request counts for goodput when its first token came within this time ..."""
    gap_bar_ms: float = 100.0
    """... and its tokens within this time of each other, on average."""
    seed: int = 0
    """Of the loads."""
    out: Path | None = None
    """Append the rows to this JSONL file."""
    raw: Path | None = None
    """Write every request's times to this JSON file."""

    def __post_init__(self) -> None:
        if not self.suite or not self.concurrency or min(*self.concurrency, self.num_requests) < 1 or self.scale <= 0:
            raise ConfigError(
                f"got suite={self.suite}, concurrency={self.concurrency}, num_requests={self.num_requests}, "
                f"scale={self.scale}; need at least one of each, and a scale above 0"
            )
        if self.rate is not None and self.rate <= 0:
            raise ConfigError(f"got rate={self.rate}; need more than 0 requests a second, or none")


@dataclass(frozen=True, slots=True)
class Summary:
    """One run's figures. Units: milliseconds; tokens and requests a second of the whole run."""

    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ttft_ms: tuple[float, float, float]
    gap_ms: tuple[float, float, float]
    total_ms: tuple[float, float, float]
    focus_gap_ms: tuple[float, float, float]
    num_errors: int


@dataclass(frozen=True, slots=True)
class Run:
    """One load through the server and through the engine alone."""

    suite: Suite
    concurrency: int | None
    served: Summary
    direct: Summary
    parity: str
    precision: str


def measure_serving(config: ServeBenchConfig, progress: Progress) -> list[Run]:
    """Return every suite at every concurrency, each over HTTP and straight into the engine.

    Raises:
        MicroLLMError: the model cannot be loaded, or the server does not start.
    """
    levels: tuple[int | None, ...] = config.concurrency if config.rate is None else (None,)
    num_rows = max(level or 64 for level in levels)
    keys: list[tuple[Suite, int | None]] = [(suite, level) for suite in config.suite for level in levels]
    tokenizer = load_tokenizer(resolve_model(config.model))
    plain = [token for token in range(tokenizer.num_tokens) if token not in tokenizer.special_ids]
    with _server(config, num_rows) as (host, port, longest):  # before the engine here: both want the GPU's memory
        loads = {key: make_load(_shape(config, *key), plain, longest) for key in keys}
        first = make_load(LoadShape(scale=config.scale, num_requests=4, seed=config.seed + 1), plain, longest)
        warm = (
            {None: first}
            if choose_device(config.device).type == "cpu"
            else {key: _like(calls, plain) for key, calls in loads.items()}
        )
        for key, calls in warm.items():
            run_over_http(host, port, _NAME, calls, key and key[1])
        served = {}
        for key, calls in loads.items():
            progress(f"{key[0]} at {key[1] or config.rate}: over HTTP")
            served[key] = run_over_http(host, port, _NAME, calls, key[1])
    llm = load(config.model, device=config.device, precision=engine_precision(config.precision, config.device))
    engine = Engine(llm, EngineConfig(max_rows=num_rows))
    environment = capture_environment(str(llm.device))
    engine.prewarm()
    for key, calls in warm.items():
        run_in_engine(engine, calls, key and key[1])
    runs, raw = [], list[dict[str, Any]]()
    for key, calls in loads.items():
        progress(f"{key[0]} at {key[1] or config.rate}: straight into the engine")
        direct = run_in_engine(engine, calls, key[1])
        parity = _parity(calls, served[key], direct, same_bits=llm.device.type == "cpu")
        runs.append(Run(*key, _summary(served[key], config), _summary(direct, config), parity, llm.precision))
        raw.append({"key": key, "served": [*map(asdict, served[key])], "direct": [*map(asdict, direct)]})
    if config.out is not None:
        for run in runs:
            for row in rows_of(run, environment):
                write_row(config.out, row)
    if config.raw is not None:
        config.raw.write_text(json.dumps({"config": asdict(config), "runs": raw}, default=str) + "\n", encoding="utf-8")
    return runs


def _like(calls: Sequence[Call], plain: Sequence[int]) -> list[Call]:
    """Return calls of the same lengths with other prompts: what makes every shape ready that a run meets."""
    turned = dict(zip(plain, [*plain[1:], plain[0]], strict=True))
    return [replace(call, prompt=[turned[token] for token in call.prompt]) for call in calls]


def rows_of(run: Run, environment: Environment) -> list[Row]:
    """Return a run's rows: tokens a second beside the engine alone, and how even the stream is."""
    level = f"{run.concurrency} streams" if run.concurrency else "open loop"
    target = "S2" if run.concurrency == 64 and environment.device.startswith("cuda") else "serve"
    fields: dict[str, Any] = {
        "target": target, "dtype": run.precision, "parity": run.parity, **environment_fields(environment)
    }  # fmt: skip
    passes = run.parity == "pass"
    return [
        Row(
            workload=f"{run.suite}, {level}", unit="tok/s", ours=run.served.tokens_per_s if passes else None,
            peer_name="the engine alone", peer=run.direct.tokens_per_s, **fields,
        ),
        Row(
            workload=f"{run.suite}, {level}: p99 between pieces", unit="ms",
            ours=(run.served.gap_ms[2] or None) if passes else None, peer_name=f"{MAX_UNEVEN:g} x the median",
            peer=MAX_UNEVEN * run.served.gap_ms[0] or None, **fields,
        ),
    ]  # fmt: skip


def serving_table(runs: Sequence[Run]) -> str:
    """Return the runs as a Markdown table; efficiency is against the suite's first concurrency."""
    columns = (
        "suite", "in flight", "tok/s", "engine alone", "share", "efficiency", "TTFT p50 / p95 / p99 ms",
        "between pieces p50 / p95 / p99 ms", "whole p50 / p95 / p99 ms", "first request's p50 / p95", "goodput req/s",
        "errors", "parity",
    )  # fmt: skip
    cells, first = [], dict[str, Run]()
    for run in runs:
        served, base = run.served, first.setdefault(run.suite, run)
        ideal = base.served.tokens_per_s * (run.concurrency or 1) / (base.concurrency or 1)
        cells.append((
            run.suite, str(run.concurrency or "open"), f"{served.tokens_per_s:.1f}", f"{run.direct.tokens_per_s:.1f}",
            f"{served.tokens_per_s / run.direct.tokens_per_s:.2f}", f"{served.tokens_per_s / ideal:.2f}",
            *(" / ".join(f"{x:.1f}" for x in each) for each in (served.ttft_ms, served.gap_ms, served.total_ms)),
            f"{served.focus_gap_ms[0]:.1f} / {served.focus_gap_ms[1]:.1f}",
            f"{served.goodput_per_s:.2f} of {served.requests_per_s:.2f}", str(served.num_errors), run.parity,
        ))  # fmt: skip
    return markdown_table(columns, cells)


def _shape(config: ServeBenchConfig, suite: Suite, level: int | None) -> LoadShape:
    return LoadShape(
        suite=suite, num_requests=max(config.num_requests, 4 * (level or 1)), rate=config.rate, concurrency=level or 1,
        scale=config.scale, shared_share=config.shared_share, seed=config.seed,
    )  # fmt: skip


def _parity(calls: Sequence[Call], served: Sequence[Answer], direct: Sequence[Answer], *, same_bits: bool) -> str:
    errors = [answer.error for answer in (*served, *direct) if answer.error]
    if errors:
        return f"{len(errors)} errors, such as {errors[0]}"
    short = sum(
        a.num_tokens != c.max_tokens or b.num_tokens != c.max_tokens
        for c, a, b in zip(calls, served, direct, strict=True)
    )
    unlike = sum(a.text != b.text for a, b in zip(served, direct, strict=True)) if same_bits else 0
    return f"{short} answers of another length, {unlike} of another text" if short or unlike else "pass"


def _summary(answers: Sequence[Answer], config: ServeBenchConfig) -> Summary:
    good = [answer for answer in answers if not answer.error and answer.piece_s]
    seconds = max((answer.end_s for answer in answers), default=0.0) - min(answer.sent_s for answer in answers)
    within = [
        answer for answer in good
        if 1e3 * (answer.ttft_s or 0) <= config.ttft_bar_ms
        and 1e3 * (answer.piece_s[-1] - answer.piece_s[0]) <= config.gap_bar_ms * max(1, answer.num_tokens - 1)
    ]  # fmt: skip
    return Summary(
        tokens_per_s=sum(answer.num_tokens for answer in good) / seconds,
        requests_per_s=len(good) / seconds, goodput_per_s=len(within) / seconds,
        ttft_ms=_percentiles([answer.ttft_s or 0.0 for answer in good]),
        gap_ms=_percentiles([gap for answer in good for gap in answer.gaps_s]),
        total_ms=_percentiles([answer.end_s - answer.sent_s for answer in good]),
        focus_gap_ms=_percentiles(answers[0].gaps_s), num_errors=len(answers) - len(good),
    )  # fmt: skip


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 95th and the 99th percentile, in milliseconds."""
    if not seconds:
        return 0.0, 0.0, 0.0
    return tuple(float(x) for x in 1e3 * np.percentile(seconds, (50, 95, 99)))  # pyright: ignore[reportReturnType]


@contextmanager
def _server(config: ServeBenchConfig, num_rows: int) -> Iterator[tuple[str, int, int]]:
    """Run a server on a free port; give its place and the longest prompt and answer that it takes."""
    command = [
        sys.executable, "-P", "-m", "microllm", "serve", "--model", config.model, "--served-name", _NAME, "--port", "0",
        "--device", config.device, "--precision", config.precision, "--max-rows", str(num_rows),
        "--max-queue", str(64 * num_rows), "--request-timeout-s", "3600",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None, "it was asked for"
        try:
            url, said = "", ""
            while not url:
                line = process.stderr.readline()
                said += line
                if not line:
                    raise UnavailableError(f"got a server that ended: {said.strip()[-500:]}; need one that starts")
                url = json.loads(line).get("url", "") if line.startswith("{") else ""
            Thread(target=process.stderr.read, daemon=True).start()  # what it logs may not fill the pipe
            yield *_place(url), _longest_tokens(url, process)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def _place(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def _longest_tokens(url: str, process: subprocess.Popen[str]) -> int:
    while process.poll() is None:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            longest = json.load(answer)["data"][0]["max_model_len"]
        if longest is not None:
            return longest
        time.sleep(0.1)
    raise UnavailableError(f"got a server that ended with status {process.returncode}; need one that loads")
