"""What the server counts: Prometheus metrics, and the numbers that the page shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from microllm.serving.engine_client import EngineClient, Piece, Ticket

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_TOKENS = tuple(2**i for i in range(16))
WINDOW_S = 5.0
"""The page's rates are of this time."""
_GAUGES = {
    "num_waiting": ("requests_waiting", "Choices that wait in an engine."),
    "num_running": ("requests_running", "Choices that run in an engine."),
    "num_steps": ("engine_steps", "Steps since the engine's process started."),
    "num_preemptions": ("preemptions", "Preemptions since the engine's process started."),
    "num_prefix_tokens": ("prefix_hit_tokens", "Prompt tokens found in the cache since the process started."),
    "num_drafts_proposed": ("draft_tokens_proposed", "Guessed tokens since the process started."),
    "num_drafts_accepted": ("draft_tokens_accepted", "Guessed tokens that were right."),
    "num_cached_pages": ("kv_cached_pages", "Pages that nobody holds and a prompt may still find."),
}


class Metrics:
    """One server's metrics, in a registry of its own.

    Units:   seconds and tokens, as the names say; times are the HTTP process's: from a request's arrival
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http = Counter("microllm_http_requests", "HTTP requests.", ["path", "status"], registry=self.registry)
        self.rejected = self._counter("requests_rejected", "Requests refused because the queue was full.")
        self.finished = Counter(
            "microllm_choices_finished", "Choices by how they ended.", ["reason"], registry=self.registry
        )
        for reason in ("stop", "length", "error", "cancelled"):
            self.finished.labels(reason)
        self.cold = self._counter("choices_cold", "Choices in whose steps something had to be captured first.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts let in.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to a choice's first token.", _SECONDS)
        self.inter_token = self._histogram(
            "inter_token_seconds", "Between two pieces of one choice, over the tokens of the later.", _TOKEN_SECONDS
        )
        self.duration = self._histogram("request_seconds", "From arrival to a choice's end.", _SECONDS)
        self.prompt_lengths = self._histogram("prompt_length_tokens", "Length of prompts.", _TOKENS)
        labels = ["replica"]
        self._gauges = {
            field: Gauge(f"microllm_{name}", text, labels, registry=self.registry)
            for field, (name, text) in _GAUGES.items()
        }
        self._kv = Gauge("microllm_kv_bytes", "Bytes of the KV cache.", ["replica", "kind"], registry=self.registry)
        self._up = Gauge("microllm_engine_up", "Whether the engine is ready.", labels, registry=self.registry)
        self._starts = Gauge("microllm_engine_starts", "Processes started.", labels, registry=self.registry)
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_ttft: deque[float] = deque(maxlen=64)

    def note(self, ticket: Ticket, piece: Piece) -> None:
        """Count a piece on its arrival from the engine."""
        now, count = time.perf_counter(), len(piece.token_ids)
        if count:
            self.generated_tokens.inc(count)
            self._recent.append((now, count))
            last = ticket.last_token_s.get(piece.choice)
            if last is None:
                self.ttft.observe(now - ticket.submitted_s)
                self._recent_ttft.append(now - ticket.submitted_s)
                ticket.first_token_s = ticket.first_token_s or now
            else:
                self.inter_token.observe((now - last) / count)
            ticket.last_token_s[piece.choice] = now
        if piece.finish_reason is not None:
            self.finished.labels(piece.finish_reason).inc()
            self.duration.observe(now - ticket.submitted_s)

    def note_prompts(self, lengths: Iterable[int]) -> None:
        """Count prompts that were let in."""
        for length in lengths:
            self.prompt_tokens.inc(length)
            self.prompt_lengths.observe(length)

    def exposition(self, engines: Sequence[EngineClient]) -> bytes:
        """Return all metrics as Prometheus reads them."""
        for engine in engines:
            replica, report = str(engine.index), engine.report
            self._up.labels(replica).set(engine.is_ready)
            self._starts.labels(replica).set(engine.num_starts)
            for field, gauge in self._gauges.items():
                gauge.labels(replica).set(report.get(field, 0))
            for kind, value in report.get("kv", {}).items():
                self._kv.labels(replica, kind.removesuffix("_bytes")).set(value)
        return generate_latest(self.registry)

    def live(self, engines: Sequence[EngineClient]) -> dict[str, Any]:
        """Return what the page shows: the queue, rates of the last seconds, and where the cache's bytes are."""
        now = time.perf_counter()
        while self._recent and now - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        reports = [engine.report for engine in engines if engine.report]
        kv = [report["kv"] for report in reports]
        return {
            "waiting": sum(report["num_waiting"] for report in reports),
            "running": sum(report["num_running"] for report in reports),
            "tokens_per_s": sum(count for _, count in self._recent) / WINDOW_S,
            "ttft_ms": 1e3 * median(self._recent_ttft) if self._recent_ttft else None,
            "kv_used": sum(each["active_bytes"] for each in kv) / max(1, sum(each["allocated_bytes"] for each in kv)),
            "prefix_hit_tokens": sum(report["num_prefix_tokens"] for report in reports),
            "preemptions": sum(report["num_preemptions"] for report in reports),
            "engines_ready": sum(engine.is_ready for engine in engines),
            "engines": len(engines),
        }

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"microllm_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"microllm_{name}", text, buckets=buckets, registry=self.registry)
