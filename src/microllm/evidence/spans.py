"""Scoped timers that end up in a Perfetto file: host clock, CUDA events and NVTX ranges of the same scopes.

Place: any room may open ``span("decode")``; without a recorder around it, it does nothing.
Does not decide what is faster (``timing`` does), and does not record values (``trace`` does).
Source: the Trace Event Format ("X" complete events, "M" metadata), read by ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from microllm.evidence.tensor_statistics import Record

Label = str | int | float | bool
_GPU_ROW = 0
"""Thread id of the device row in the file; host threads have their own."""


class TraceEvent(Record):
    """One event of the file.

    Units:   ``ts`` and ``dur`` in microseconds since the recorder was opened
    """

    name: str
    ph: Literal["X", "M"]
    ts: float = 0.0
    dur: float = 0.0
    pid: int
    tid: int
    cat: str = "host"
    args: dict[str, Label] = Field(default_factory=dict)


class TraceFile(Record):
    """The whole file; reading one back through this model is its schema check."""

    traceEvents: tuple[TraceEvent, ...]
    displayTimeUnit: Literal["ms", "ns"] = "ms"


class SpanRecorder:
    """Collects spans of all threads that inherit its context; on a CUDA machine, device times as well."""

    def __init__(self) -> None:
        self._host: list[tuple[str, int, int, int, dict[str, Label]]] = []
        self._device: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            self._anchor = _event()
            torch.cuda.synchronize()
        self._start_ns = time.perf_counter_ns()

    @contextmanager
    def span(self, name: str, labels: Mapping[str, Label] | None = None) -> Iterator[None]:
        """Time a scope, also if it raises; inside a graph capture only the host's side is timed."""
        begin = None
        if self._cuda:
            torch.cuda.nvtx.range_push(name)
            begin = None if torch.cuda.is_current_stream_capturing() else _event()
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            self._host.append((name, start, end, threading.get_native_id(), dict(labels or {})))
            if begin is not None:
                self._device.append((name, begin, _event()))
            if self._cuda:
                torch.cuda.nvtx.range_pop()

    def events(self) -> tuple[TraceEvent, ...]:
        """Return all events in order of their start; waits for the device."""
        pid = os.getpid()
        events = [
            TraceEvent(
                name=name, ph="X", ts=(start - self._start_ns) / 1e3, dur=(end - start) / 1e3,
                pid=pid, tid=thread, args=labels,
            )
            for name, start, end, thread, labels in self._host
        ]  # fmt: skip
        if self._device:
            torch.cuda.synchronize()
        for name, begin, end in self._device:
            ts, dur = self._anchor.elapsed_time(begin) * 1e3, begin.elapsed_time(end) * 1e3
            events.append(TraceEvent(name=name, ph="X", ts=ts, dur=dur, pid=pid, tid=_GPU_ROW, cat="device"))
        rows = {event.tid: "CUDA" if event.tid == _GPU_ROW else f"host thread {event.tid}" for event in events}
        names = [
            TraceEvent(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": row}) for tid, row in rows.items()
        ]
        return (*names, *sorted(events, key=lambda event: (event.tid, event.ts, -event.dur)))

    def export(self, path: Path) -> None:
        """Write the file that ui.perfetto.dev opens."""
        body = TraceFile(traceEvents=self.events())
        path.write_text(body.model_dump_json() + "\n", encoding="utf-8")


_ACTIVE: ContextVar[SpanRecorder | None] = ContextVar("active_span_recorder", default=None)


@contextmanager
def record_spans() -> Iterator[SpanRecorder]:
    """Collect every ``span`` opened inside; recorders nest, the inner one gets the spans."""
    recorder = SpanRecorder()
    token = _ACTIVE.set(recorder)
    try:
        yield recorder
    finally:
        _ACTIVE.reset(token)


def span(name: str, labels: Mapping[str, Label] | None = None) -> AbstractContextManager[None]:
    """Time a scope for the recorder around it; with none, do nothing."""
    recorder = _ACTIVE.get()
    return nullcontext() if recorder is None else recorder.span(name, labels)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
