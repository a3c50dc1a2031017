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
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from microllm.errors import EvidenceError
from microllm.evidence.tensor_statistics import Record

EntryKind = Literal["allocation", "copy", "synchronisation"]
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


class LedgerEntry(Record):
    """What one operator under one tag did of one kind: how often, how many bytes, and the largest at once.

    ``place`` is the device of an allocation ("cpu", "cuda"), the direction of a copy ("h2d", ...), and "host" for a
    call that makes the host wait; ``item()`` counts as one on the CPU too, where it would wait for a GPU.
    A fused foreach copy's bytes count its elements.
    """

    kind: EntryKind
    place: str
    operator: str
    tag: str
    calls: int
    bytes: int
    largest_bytes: int


class LedgerReport(Record):
    """What a region did. ``peak_bytes`` is the most that it allocated and had not freed yet, by device.

    An older host tensor freed inside does not lower the peak (torch's profiler does not see it go).
    """

    entries: tuple[LedgerEntry, ...]
    peak_bytes: dict[str, int]
    device_traced: bool

    def of(self, kind: EntryKind) -> tuple[LedgerEntry, ...]:
        """Return the entries of one kind."""
        return tuple(entry for entry in self.entries if entry.kind == kind)

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
            f"{e.kind}: {e.calls} ({e.bytes} bytes, {e.place}) by {e.operator or 'no operator'} in {e.tag!r}"
            for e in self.entries
            if not (e.place in ("cpu", "h2h") and e.largest_bytes <= scalar_bytes)
            and (e.kind != "allocation" or device in (None, e.place))
        ]
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
def torch_profiler(*, memory: bool = False) -> Iterator[profile]:
    """Run torch's profiler over the context, with allocations and shapes or without, for its raw results alone.

    torch 2.11 warns that a further cycle would lose events. ``acc_events=True`` would keep it quiet, but builds an
    object of every event as well, which takes longer than all else; there is one cycle here.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=activities, profile_memory=memory, record_shapes=memory) as profiler:
            yield profiler


@contextmanager
def memory_ledger() -> Iterator[MemoryLedger]:
    """Watch the region inside the context; on a CUDA machine, wait for the device before and after it.

    Raises:
        EvidenceError: another ledger is open (torch has one profiler a process).
    """
    if _open:
        raise EvidenceError("got a ledger inside another; need one at a time; use tag() for parts of a region")
    ledger, cuda = MemoryLedger(), torch.cuda.is_available()
    _open.append(ledger)
    try:
        with torch_profiler(memory=True) as profiler:
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
    on_device = [e for e in events if not _on_host(e) and e.name() != _MEMORY]
    host = _host_events(events)
    sizes: dict[tuple[EntryKind, str, str, str], list[int]] = defaultdict(list)
    grown: dict[str, int] = defaultdict(int)
    peaks: dict[str, int] = {}
    for seen in host:
        if seen.event.name() == _MEMORY:
            device, size = "cpu" if _on_host(seen.event) else "cuda", seen.event.nbytes()
            grown[device] += size
            peaks[device] = max(peaks.get(device, 0), grown[device])
            if size > 0:
                sizes["allocation", device, seen.operator, seen.tag].append(size)
        elif _SYNC.fullmatch(seen.event.name()):
            sizes["synchronisation", "host", seen.event.name(), seen.tag].append(0)
    for direction, operator, tag, size in _copies(host, on_device):
        sizes["copy", direction, operator, tag].append(size)
    entries = tuple(
        LedgerEntry(
            kind=kind, place=place, operator=operator, tag=tag,
            calls=len(found), bytes=sum(found), largest_bytes=max(found),
        )
        for (kind, place, operator, tag), found in sizes.items()
    )  # fmt: skip
    return LedgerReport(entries=entries, peak_bytes=peaks, device_traced=bool(on_device) or not cuda)


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


def _copies(host: list[_Seen], on_device: list[Event]) -> Iterator[tuple[str, str, str, int]]:
    """Yield the device's own memory copies, and each innermost copy operator that needed none of them."""
    launched: dict[int, list[Event]] = defaultdict(list)
    sources = {s.event.correlation_id(): s for s in host if s.is_operator}
    for event in on_device:
        launched[event.linked_correlation_id()].append(event)
        if found := _MEMCPY.match(event.name()):
            source, target = ("h" if end == "H" else "d" for end in found.groups())
            asker = sources.get(event.linked_correlation_id())
            size = int(json.loads("{" + event.metadata_json() + "}").get("bytes", 0))
            if not size and asker is not None and asker.event.name() in _COPY_OPS:
                size = _destination_bytes(asker.event)  # torch 2.11 gives a pinned copy no size
            name, tag = ("", "") if asker is None else (asker.event.name(), asker.tag)
            yield f"{source}2{target}", name, tag, size
    for seen in host:
        if seen.event.name() in _COPY_OPS and not seen.holds_copy:
            work = launched.get(seen.event.correlation_id(), [])
            if not any(_MEMCPY.match(event.name()) for event in work):
                yield "d2d" if work else "h2h", seen.event.name(), seen.tag, _destination_bytes(seen.event)


def _destination_bytes(copy: Event) -> int:
    shape = getattr(copy, "structured_input_shapes", copy.shapes)()[0]  # torch 2.11 has no shapes of tensor lists
    shapes = shape if shape and isinstance(shape[0], list) else [shape]
    return sum(math.prod(s) for s in shapes) * _DTYPE_BYTES.get(copy.dtypes()[0], 1)
