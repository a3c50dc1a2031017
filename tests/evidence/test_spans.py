"""Spans: nesting, threads, the off state, and the file against the Trace Event Format's rules."""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
import time

import pytest
from pydantic import ValidationError

from microllm.evidence.spans import TraceFile, record_spans, span


def test_off_is_nothing():
    assert span("a") is not span
    with span("a"):
        pass
    with record_spans() as recorder:
        pass
    assert recorder.events() == ()


def test_nesting_labels_and_exceptions(tmp_path):
    with record_spans() as recorder:
        with contextlib.suppress(RuntimeError), span("step", {"tokens": 3}):
            with span("attention"):
                time.sleep(0.003)
            raise RuntimeError
    recorder.export(tmp_path / "trace.json")
    body = json.loads((tmp_path / "trace.json").read_text())
    # what the format demands: an object with traceEvents; X has name, ts, dur, pid, tid; M names a thread
    spans = [e for e in body["traceEvents"] if e["ph"] == "X"]
    for event in spans:
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int | float) for key in ("ts", "dur"))
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert event["ts"] >= 0
    threads = {e["tid"] for e in body["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {e["tid"] for e in spans} <= threads
    outer, inner = (next(e for e in spans if e["name"] == name) for name in ("step", "attention"))
    assert outer["args"] == {"tokens": 3}
    assert inner["dur"] >= 3000
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert spans.index(outer) < spans.index(inner)


def test_the_file_model_refuses_what_the_format_does_not_know(tmp_path):
    with record_spans() as recorder, span("a"):
        pass
    recorder.export(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    assert TraceFile.model_validate_json(text).traceEvents == recorder.events()
    for old, new in (('"ph":"X"', '"ph":"?"'), ('"dur"', '"duration"'), ('"name":"a"', '"name":1')):
        assert old in text
        with pytest.raises(ValidationError):
            TraceFile.model_validate_json(text.replace(old, new))


def test_inner_recorder_and_threads():
    with record_spans() as outer:
        with span("one"), record_spans() as inner, span("two"):
            pass

        def work():
            with span("three"):
                pass

        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        thread.join()
    assert [e.name for e in inner.events() if e.ph == "X"] == ["two"]
    found = {e.name: e.tid for e in outer.events() if e.ph == "X"}
    assert set(found) == {"one", "three"}
    assert found["one"] != found["three"]


@pytest.mark.gpu
def test_device_spans():
    import torch

    x = torch.randn(2048, 2048, device="cuda")
    with record_spans() as recorder:
        with span("outer"):
            for _ in range(3):
                with span("matmul"):
                    x @ x
    device = [e for e in recorder.events() if e.cat == "device"]
    assert [e.name for e in device].count("matmul") == 3
    assert all(e.dur > 0 for e in device)
    outer = next(e for e in device if e.name == "outer")
    assert outer.dur >= 0.99 * sum(e.dur for e in device if e.name == "matmul")
