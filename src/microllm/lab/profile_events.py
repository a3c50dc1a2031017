"""One run under torch's profiler, read event by event: time by category, gaps by source, and a timeline.

Place: ``profile`` runs the work, marks its ranges and takes the difference of two runs. Does not run anything.
A range is a module's forward (SITE and its name) or an operator of ``ops`` (OPERATOR and its name). A kernel belongs to
the operator or range that launched it; one of a replayed graph has neither, and goes by its name alone.
Counts the thread that the work runs on, and every stream of the device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from microllm.errors import EvidenceError
from microllm.evidence.spans import TraceEvent, TraceFile

Event: TypeAlias = Any
"""An event of the profiler's C++ result; torch exports no type for it."""
PREFIX = "microllm."
REGION, SITE, OPERATOR = PREFIX + "region", PREFIX + "site:", PREFIX + "operator:"
OUTSIDE = "outside the model"
TRACED_STEPS = 4
"""The timeline holds this many calls of the model, the last ones: a file that opens at once."""

CATEGORIES = (
    "GEMM", "attention", "KV store", "norm/rope", "embedding/head", "elementwise", "cast/copy", "optimizer",
    "collective", "sampling", "other",
)  # fmt: skip
# The first rule that fits "module;operator of ops;torch's operators and kernel" decides. The module is empty for the
# root, so that a product there (a tied head's) is the head's. What is copied is a copy, wherever that happens.
_RULES = (
    ("collective", r"nccl|c10d::|all_?reduce|all_?gather|reduce_scatter"),
    ("optimizer", r"Optimizer\.|_fused_adam|multi_tensor_apply"),
    ("cast/copy", r"aten::(copy_|_to_copy|clone|_foreach_copy_)\b|Mem(cpy|set) |copy_kernel"),
    ("embedding/head", r"^(lm_head)?;linear;|;embedding;|(embed\w*|lm_head);;"),
    ("GEMM", r";linear;"),
    ("norm/rope", r";(rms_norm|rope);|(norm\d?|rotary\w*);;"),
    ("KV store", r";kv_store;"),
    ("attention", r";attention;|att(n|ention);;"),
    ("elementwise", r";swiglu;"),
    ("sampling", r";(argmax|sample);|^outside the model;"),
    ("attention", r"(?i);.*(attention|flash|fmha)"),
    ("GEMM", r";.*(aten::(matmul|linear|addmm|mm|bmm|baddbmm|addmv|mv|_scaled_mm)\b|gemm|gemv|nvjet|cutlass)"),
    ("GEMM", r";.*(aten::_weight_int\dpack_mm|mkldnn::_linear)"),
    ("norm/rope", r"(?i);.*(norm|rope|rotary)"),
    ("elementwise", r";.*aten::(add|sub|mul|div|neg|silu|gelu|addcmul|dot)_?\b"),
)


@lru_cache(maxsize=4096)
def categorise(site: str, operator: str, names: tuple[str, ...]) -> str:
    """Return what kind of work something is: module and operator around it, torch's names from the outermost in."""
    key = f"{site};{operator};{' '.join(names)}"
    return next((category for category, rule in _RULES if re.search(rule, key)), "other")


def source_of(place: str) -> str:
    """Return where a person looks for a range: an operator of ops, or a module of any layer."""
    if place.startswith(OPERATOR):
        return f"ops.{place.removeprefix(OPERATOR)}"
    return re.sub(r"\.\d+", ".*", place.removeprefix(SITE)) or "model"


@dataclass(slots=True)
class _Node:
    """An operator or range on the host, with what is around it; a range has no category."""

    event: Event
    source: str = OUTSIDE
    site: str = OUTSIDE
    operator: str = ""
    names: tuple[str, ...] = ()
    category: str = ""
    is_outermost: bool = True
    inside_ns: int = 0


Totals: TypeAlias = dict[tuple[str, str], float]
"""Sums by column and name: ``calls``, ``ms`` and ``host_ms`` of a category, ``gap_ms`` of a source."""


@dataclass(slots=True)
class ProfiledRun:
    """One run from start to end; ``ms`` is the device's time, which on a CPU is the host's.

    Units:   ``wall_ms`` is read off the host's own clock, everything else off the profiler's
    """

    wall_ms: float
    totals: Totals = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[str, Event, str]] = field(default_factory=list)

    def timeline(self) -> TraceFile:
        """Return the last calls of the model, with what came between and after them."""
        starts = [event.start_ns() for _, event, _ in self.events if event.name() == SITE]
        since = starts[-TRACED_STEPS:][0] if starts else self.events[0][1].start_ns()
        return TraceFile(traceEvents=tuple(self._trace_events(since)))

    def _trace_events(self, since: int) -> Iterator[TraceEvent]:
        rows: set[int] = set()
        for kind, event, category in self.events:
            row, start = event.device_resource_id(), (event.start_ns() - since) / 1e3
            if start < 0:
                continue
            if row not in rows:
                rows.add(row)
                yield TraceEvent(name="thread_name", ph="M", pid=0, tid=row, args={"name": f"{kind} {row}"})
            name = "model" if event.name() == SITE else event.name().removeprefix(SITE).removeprefix(PREFIX)
            yield TraceEvent(
                name=name, ph="X", ts=start, dur=event.duration_ns() / 1e3, pid=0, tid=row, cat=kind,
                args={"category": category or "range"},
            )  # fmt: skip


def read_run(events: list[Event], wall_ms: float, *, cuda: bool) -> ProfiledRun:
    """Return the time of one profiled run, category by category.

    Raises:
        EvidenceError: the work ran on a CUDA device that the profiler saw nothing of.
    """
    region = next(e for e in events if e.name() == REGION)
    nodes, launches = _walk(events, region)
    run = ProfiledRun(wall_ms, events=[("host", node.event, node.category) for node in nodes])
    for node in nodes:
        own_ms = (node.event.duration_ns() - node.inside_ns) / 1e6
        if node.category:
            run.totals["host_ms", node.category] += own_ms
        if node.category and not cuda:
            run.totals["ms", node.category] += own_ms
            run.totals["calls", node.category] += node.is_outermost
        elif not cuda:
            run.totals["gap_ms", node.source] += own_ms
    if cuda:
        launches |= {-node.event.correlation_id(): node for node in nodes}
        launches.pop(0, None)
        _add_kernels(run, events, region, launches)
    return run


def _walk(events: list[Event], region: Event) -> tuple[list[_Node], dict[int, _Node]]:
    """Return the host's operators and ranges in order, and what made each call that launches work on the device."""
    thread, start, end = region.start_thread_id(), region.start_ns(), region.end_ns()
    stack, launches = [_Node(region)], {}
    nodes = stack.copy()
    inside = [e for e in events if e.device_type().name == "CPU" and start <= e.start_ns() <= end and e is not region]
    for event in sorted(inside, key=lambda e: (e.start_ns(), -e.duration_ns())):
        name = event.name()
        while len(stack) > 1 and stack[-1].event.end_ns() <= event.start_ns():
            stack.pop()
        above = stack[-1]
        if re.fullmatch(r"(cuda|hip|cu)[A-Z]\w*", name):
            launches[event.correlation_id()] = _Node(event, "a replayed graph", "?") if "Graph" in name else above
        elif event.start_thread_id() == thread:
            above.inside_ns += event.duration_ns()
            stack.append(_node(event, name, above))
            nodes.append(stack[-1])
    return nodes, launches


def _node(event: Event, name: str, above: _Node) -> _Node:
    if name.startswith(SITE):
        return _Node(event, source_of(name), source_of(name) if name != SITE else "")
    if name.startswith(OPERATOR):
        return _Node(event, source_of(name), above.site, name.removeprefix(OPERATOR))
    names = (*above.names, name)
    category = categorise(above.site, above.operator, names)
    return _Node(event, above.source, above.site, above.operator, names, category, category != above.category)


def _add_kernels(run: ProfiledRun, events: list[Event], region: Event, launches: dict[int, _Node]) -> None:
    """Add the device's work, and the time in which it had none: that is laid to whoever launched what came next.

    A kernel is found by the call that launched it, or by the operator that torch links it to (its id negative here).
    """
    kernels = [
        e for e in events
        if e.device_type().name != "CPU" and e.start_ns() >= region.start_ns()
        and not (e.name().startswith((PREFIX, "[")) or e.is_user_annotation())
    ]  # fmt: skip
    if not kernels:
        raise EvidenceError(
            "got no trace of the CUDA device (the profiler's device tracing does not work here); "
            "need one to tell device time; profile with --device cpu, or allow the driver's performance counters"
        )
    unknown, busy_until = _Node(region, "an unknown launch", "?"), region.start_ns()
    for kernel in sorted(kernels, key=lambda e: e.start_ns()):
        node = launches.get(kernel.correlation_id()) or launches.get(-kernel.linked_correlation_id(), unknown)
        category = categorise(node.site, node.operator, (*node.names, kernel.name()))
        run.totals["calls", category] += 1
        run.totals["ms", category] += kernel.duration_ns() / 1e6
        run.totals["gap_ms", node.source] += max(0, kernel.start_ns() - busy_until) / 1e6
        busy_until = max(busy_until, kernel.end_ns())
        run.events.append(("stream", kernel, category))
    run.totals["gap_ms", OUTSIDE] += max(0, region.end_ns() - busy_until) / 1e6
