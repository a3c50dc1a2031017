"""Count allocations, copies and synchronisations of a region, by source, from torch's own profiler.

Place: tests open a ledger around a step to prove "no allocation, no copy, no synchronisation"; ``profile`` prints it.
Does not time (the profiler slows what it watches) and replaces no allocator.
What it sees: every allocation that goes through torch's allocators, also inside a custom operator; every ``copy_``;
``item()`` and its kin; on a CUDA machine the runtime's own copies and synchronising calls. What it cannot see:
allocations of NumPy or of C code, and ``tolist()`` / ``numpy()`` of a host tensor, which cost no torch call.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from microllm.errors import EvidenceError
from microllm.evidence.tensor_statistics import Record

Direction = Literal["h2h", "h2d", "d2h", "d2d"]
_REGION = "microllm.ledger.region"
_TAG = "microllm.ledger.tag:"
_MEMORY = "[memory]"
_COPY_OPS = ("aten::copy_", "aten::_foreach_copy_")
_MEMCPY = re.compile(r"Memcpy ([HDP])to([HDP])")
_RUNTIME = re.compile(r"(?:cuda|hip|cu)[A-Z]\w*")
_SYNC = re.compile(r"aten::_local_scalar_dense|(?:cuda|hip|cu)[A-Z]\w*Synchronize")
_DTYPE_BYTES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short": 2,
    "short int": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip


Event: TypeAlias = Any
"""An event of the profiler's C++ result; torch exports no type for it."""


class Allocations(Record):
    """What one operator under one tag allocated on one kind of device."""

    device: Literal["cpu", "cuda"]
    tag: str
    operator: str
    calls: int
    bytes: int
    largest_bytes: int


class Copies(Record):
    """Copies in one direction under one tag; a fused foreach copy's ``bytes`` count its elements."""

    direction: Direction
    tag: str
    calls: int
    bytes: int
    largest_bytes: int


class Synchronisations(Record):
    """Calls that make the host wait for the device; ``item()`` counts on the CPU too, where it would on a GPU."""

    call: str
    tag: str
    calls: int


class LedgerReport(Record):
    """What a region did. ``peak_bytes`` is the most that it allocated and had not freed yet, by device.

    An older host tensor freed inside does not lower the peak (torch's profiler does not see it go).
    """

    allocations: tuple[Allocations, ...]
    peak_bytes: dict[str, int]
    copies: tuple[Copies, ...]
    synchronisations: tuple[Synchronisations, ...]
    device_traced: bool

    def require_clean(self, *, device: str | None = None, scalar_bytes: int = 8) -> None:
        """Refuse any allocation, copy or synchronisation in the region.

        ``device`` limits the allocations looked at ("cuda" where host-side bookkeeping is allowed).
        ``scalar_bytes``: a Python number given to an operator becomes a host tensor of that size; such are let pass.

        Raises:
            EvidenceError: names all offenders, or says that the device was not traced.
        """
        if not self.device_traced:
            raise EvidenceError(
                "got no trace of the CUDA device (the profiler's device tracing does not work here); "
                "need one to prove anything; compare torch.cuda.memory_stats() instead"
            )
        found = [
            f"{a.calls} allocations of {a.bytes} bytes on {a.device} by {a.operator or 'no operator'} in {a.tag!r}"
            for a in self.allocations
            if device in (None, a.device) and (a.device != "cpu" or a.largest_bytes > scalar_bytes)
        ]
        found += [
            f"{c.calls} {c.direction} copies of {c.bytes} bytes in {c.tag!r}"
            for c in self.copies
            if c.direction != "h2h" or c.largest_bytes > scalar_bytes
        ]
        found += [f"{s.calls} synchronisations by {s.call} in {s.tag!r}" for s in self.synchronisations]
        if found:
            raise EvidenceError("got " + "; ".join(found) + "; need a region with none")


class MemoryLedger:
    """What ``memory_ledger`` yields; ``report`` is there once the region is closed."""

    def __init__(self) -> None:
        self._report: LedgerReport | None = None

    @property
    def report(self) -> LedgerReport:
        """Return what the region did.

        Raises:
            EvidenceError: the region is still open.
        """
        if self._report is None:
            raise EvidenceError("got a ledger whose region is open; need it closed; read report after the with")
        return self._report


_open: list[MemoryLedger] = []


@contextmanager
def memory_ledger() -> Iterator[MemoryLedger]:
    """Watch the region inside the context; on a CUDA machine, wait for the device before and after it.

    Raises:
        EvidenceError: another ledger is open (torch has one profiler a process).
    """
    if _open:
        raise EvidenceError("got a ledger inside another; need one at a time; use tag() for parts of a region")
    ledger, cuda = MemoryLedger(), torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    _open.append(ledger)
    try:
        with profile(activities=activities, profile_memory=True, record_shapes=True, acc_events=True) as profiler:
            if cuda:
                torch.zeros(1, device="cuda")  # a sign of life: no device event at all means no device tracing
                torch.cuda.synchronize()
            with record_function(_REGION):
                yield ledger
            if cuda:
                torch.cuda.synchronize()
    finally:
        _open.remove(ledger)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    ledger._report = _report(profiler.profiler.kineto_results.events(), cuda=cuda)


def tag(name: str) -> AbstractContextManager[object]:
    """Name the source of what happens inside; nothing, unless a ledger is open."""
    return record_function(_TAG + name) if _open else nullcontext()


@dataclass(slots=True)
class _Seen:
    """An event on the host inside the region, with the operator and the tag around it."""

    event: Event
    operator: str
    tag: str
    holds_copy: bool = False  # a copy made of other copies: those are counted

    @property
    def is_operator(self) -> bool:
        return self.event.name() != _MEMORY and not _RUNTIME.fullmatch(self.event.name())


def _on_host(event: Event) -> bool:
    return event.device_type().name == "CPU"


def _report(events: Iterable[Event], *, cuda: bool) -> LedgerReport:
    events = list(events)
    device_events = [e for e in events if not _on_host(e) and e.name() != _MEMORY]
    host = _host_events(events)
    allocations, peaks = _allocations(host)
    synchronisations: dict[tuple[str, str], int] = defaultdict(int)
    for seen in host:
        if _SYNC.fullmatch(seen.event.name()):
            synchronisations[seen.event.name(), seen.tag] += 1
    return LedgerReport(
        allocations=allocations,
        peak_bytes=peaks,
        copies=_copies(host, device_events),
        synchronisations=tuple(
            Synchronisations(call=call, tag=tag, calls=calls) for (call, tag), calls in synchronisations.items()
        ),
        device_traced=bool(device_events) or not cuda,
    )


def _host_events(events: list[Event]) -> list[_Seen]:
    """Walk the host's events of the region in time, keeping what encloses each: operators by thread, tags by time."""
    region = next(e for e in events if e.name() == _REGION and _on_host(e))
    inside = [
        e
        for e in events
        if (_on_host(e) or e.name() == _MEMORY) and region.start_ns() < e.start_ns() <= region.end_ns()
    ]
    stacks: dict[int, list[_Seen]] = defaultdict(list)
    tags: list[Event] = []
    walked: list[_Seen] = []
    for event in sorted(inside, key=lambda e: (e.start_ns(), -e.duration_ns())):
        stack, name = stacks[event.start_thread_id()], event.name()
        while stack and stack[-1].event.end_ns() < event.start_ns():
            stack.pop()
        tags = [t for t in tags if t.end_ns() >= event.start_ns()]
        if name.startswith(_TAG):
            tags.append(event)
            continue
        seen = _Seen(
            event,
            operator=stack[-1].event.name() if stack else "",
            tag=tags[-1].name().removeprefix(_TAG) if tags else "",
        )
        walked.append(seen)
        if name in _COPY_OPS:
            for outer in stack:
                outer.holds_copy = True
        if seen.is_operator:
            stack.append(seen)
    return walked


def _allocations(host: list[_Seen]) -> tuple[tuple[Allocations, ...], dict[str, int]]:
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    grown: dict[str, int] = defaultdict(int)
    peaks: dict[str, int] = {}
    for seen in (s for s in host if s.event.name() == _MEMORY):
        device = "cpu" if _on_host(seen.event) else "cuda"
        size = seen.event.nbytes()
        grown[device] += size
        peaks[device] = max(peaks.get(device, 0), grown[device])
        if size > 0:
            sizes[device, seen.tag, seen.operator].append(size)
    rows = tuple(
        Allocations(
            device=cast(Literal["cpu", "cuda"], device), tag=tag, operator=operator,
            calls=len(found), bytes=sum(found), largest_bytes=max(found),
        )
        for (device, tag, operator), found in sizes.items()
    )  # fmt: skip
    return rows, peaks


def _copies(host: list[_Seen], device_events: list[Event]) -> tuple[Copies, ...]:
    """Count the device's own memory copies, and each innermost copy operator that needed none of them."""
    launched: dict[int, list[Event]] = defaultdict(list)
    for event in device_events:
        launched[event.linked_correlation_id()].append(event)
    tags = {s.event.correlation_id(): s.tag for s in host if s.is_operator}
    sizes: dict[tuple[Direction, str], list[int]] = defaultdict(list)
    for event in device_events:
        if found := _MEMCPY.match(event.name()):
            ends = "".join("h" if end == "H" else "d" for end in found.groups())
            size = int(json.loads("{" + event.metadata_json() + "}").get("bytes", 0))
            sizes[cast(Direction, f"{ends[0]}2{ends[1]}"), tags.get(event.linked_correlation_id(), "")].append(size)
    for seen in host:
        if seen.event.name() not in _COPY_OPS or seen.holds_copy:
            continue
        work = launched.get(seen.event.correlation_id(), [])
        if not any(_MEMCPY.match(event.name()) for event in work):
            sizes["d2d" if work else "h2h", seen.tag].append(_destination_bytes(seen.event))
    return tuple(
        Copies(direction=direction, tag=tag, calls=len(found), bytes=sum(found), largest_bytes=max(found))
        for (direction, tag), found in sizes.items()
    )


def _destination_bytes(copy: Event) -> int:
    shape = copy.structured_input_shapes()[0]
    shapes = shape if shape and isinstance(shape[0], list) else [shape]
    return sum(math.prod(s) for s in shapes) * _DTYPE_BYTES.get(copy.dtypes()[0], 1)
