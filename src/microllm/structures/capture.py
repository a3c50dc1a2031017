"""The capture door: a fixed computation as one CUDA graph, its inputs declared windows, judged before it is handed out.

Place: for what is no decode loop (that captures by itself). A stage replays what ``fn`` launched; what changes between
calls must be written into a window. Parity is judged on a second, different sample, so that a window that was not
declared is found. Refuses what cannot be captured as it is, and leaves the next eager call and capture working.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from microllm.errors import CaptureRefused
from microllm.evidence.tensor_statistics import same_bits
from microllm.evidence.timing import QUICK, time_pairs
from microllm.structures.impls import cosine

FLOOR = 0.999
MIN_SPEEDUP = 1.02


class CapturedStage:
    """A captured computation: ``write`` its windows, ``replay`` it, read its output, which the next replay overwrites.

    ``certification``: windows, cosine of a second sample, speed against the eager call.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, windows: Mapping[str, Tensor], output: Any, certification: dict[str, Any]
    ) -> None:  # fmt: skip
        self._graph, self._windows, self.output = graph, dict(windows), output
        self.certification = certification
        self.num_replays = 0

    def write(self, name: str, value: Tensor) -> None:
        """Write a window.

        Raises:
            CaptureRefused: it is none, or the value has another shape, dtype or device.
        """
        window = self._windows.get(name)
        if window is None:
            raise CaptureRefused(f"got window {name!r}; need one of {', '.join(self._windows)}")
        if (value.shape, value.dtype, value.device) != (window.shape, window.dtype, window.device):
            raise CaptureRefused(
                f"got {name} {tuple(value.shape)} {value.dtype} {value.device}; need {tuple(window.shape)} "
                f"{window.dtype} {window.device}: a graph reads what it was captured with"
            )
        window.copy_(value)

    def replay(self) -> Any:
        """Run the computation on what the windows hold; return its output."""
        self._graph.replay()
        self.num_replays += 1
        return self.output


def capture(
    fn: Callable[[], Any], *, windows: Mapping[str, Tensor], second: Callable[[], None] | None = None,
    floor: float = FLOOR, min_speedup: float = MIN_SPEEDUP, warm_ups: int = 3,
) -> CapturedStage:  # fmt: skip
    """Return ``fn`` captured, judged on a second sample and against its eager speed.

    ``windows``: tensors that ``fn`` reads and that change between calls. ``second``: makes the second sample, where a
    window's values in another order are none; it writes windows, or whatever else a caller changes. ``floor`` and
    ``min_speedup``: 0 skips a gate, which is recorded.

    Raises:
        CaptureRefused: no GPU, several devices, nothing launched, an output that varies by what no window holds, or a
            gate that is not passed.
    """
    first = fn()
    outputs = _tensors(first)
    devices = {t.device for t in (*windows.values(), *outputs)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda" or not outputs:
        named = sorted(map(str, devices)) or "no tensor"
        raise CaptureRefused(f"got a computation on {named}; need tensors of one GPU; run it as it is")
    if not all(same_bits(a, b) for a, b in zip(outputs, [t.clone() for t in _tensors(fn())], strict=True)):
        raise CaptureRefused(
            "got other outputs from a second call; need one that its windows decide; declare what varies"
        )
    graph, output = _captured(fn, warm_ups)
    noted = {"windows": sorted(windows), "floor": floor, "min_speedup": min_speedup}
    stage = CapturedStage(graph, windows, output, noted)
    saved = {name: t.clone() for name, t in windows.items()}
    try:
        _judge(stage, fn, windows, second, floor)
    finally:
        for name, values in saved.items():
            windows[name].copy_(values)
    if min_speedup:
        timing = time_pairs(fn, graph.replay, device=str(next(iter(devices))), config=QUICK)
        stage.certification |= {"speedup": timing.ratio, "lower": timing.lower_ratio}
        if not (timing.ratio >= min_speedup and timing.lower_ratio > 1):
            raise CaptureRefused(f"got {timing.ratio:.3f} times the eager speed; need {min_speedup}; run it as it is")
    return stage


def _judge(
    stage: CapturedStage, fn: Callable[[], Any], windows: Mapping[str, Tensor], second: Callable[[], None] | None,
    floor: float,
) -> None:  # fmt: skip
    if second is not None:
        second()
    else:
        for window in windows.values():
            window.copy_(window.roll(1, dims=-1) if window.shape[-1:].numel() > 1 else window.roll(1, dims=0))
    wanted = [t.clone() for t in _tensors(fn())]
    got = _tensors(stage.replay())
    pairs = list(zip(got, wanted, strict=True))
    worst, error = min(cosine(a, b) for a, b in pairs), max(_error(a, b) for a, b in pairs)
    stage.certification |= {"cosine": worst, "error": error}
    if floor and not (worst >= floor and error <= (2 * (1 - floor)) ** 0.5):  # a cosine does not see a scale
        raise CaptureRefused(
            f"got cosine {worst:.5f} and error {error:.2e} on a second sample; need {floor} and what follows from it; "
            "declare every input that varies"
        )


def _error(got: Tensor, wanted: Tensor) -> float:
    """Return the relative L2 error; of nothing to be near, the error itself."""
    size = wanted.double().norm()
    return float((got.double() - wanted.double()).norm() / (size if size > 0 else 1))


def _captured(fn: Callable[[], Any], warm_ups: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            fn()
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()  # a graph that is freed during a capture ends it
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.cuda.graph(graph):
                output = fn()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that failed leaves its own behind
            torch.cuda.synchronize()
            raise CaptureRefused(f"got a computation that a graph does not take: {error}; run it as it is") from error
    if any("empty" in str(each.message) for each in told):
        raise CaptureRefused("got a computation that launches nothing; need one that does")
    return graph, output


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [t for each in output for t in _tensors(each)]
    logits = getattr(output, "logits", None)
    return [logits] if isinstance(logits, Tensor) else []
