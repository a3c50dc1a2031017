"""What a steady step spends its time on: category by category, with gaps, allocations, copies and a timeline.

Place: ``microllm profile``. The same work runs short and long; the difference, divided by the steps between them, is
the steady step: loading, warm-up and the prompt drop out. Clock, profiler and memory ledger watch runs of their own,
so that none disturbs another. Does not judge, and its times are no benchmark: the profiler slows small operators
most, so shares are of the profiled step, and the step without it stands beside.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Inductor's own range: public record_function costs 20 µs under the profiler, more than most operators; this one 1 µs.
from torch._C._profiler import _RecordFunctionFast

from microllm import ops
from microllm.errors import ConfigError, EvidenceError, RequestError
from microllm.evidence.environment import Environment, capture_environment
from microllm.evidence.memory_ledger import EntryKind, LedgerReport, memory_ledger, tag, torch_profiler
from microllm.evidence.preflight import CpuMeter, cpu_problems
from microllm.evidence.spans import TraceFile
from microllm.evidence.tensor_statistics import Record
from microllm.inference import LLM
from microllm.lab.profile_events import CATEGORIES, OPERATOR, REGION, SITE, ProfiledRun, Totals, read_run, source_of
from microllm.sampling import SamplingParams

SUM_TOLERANCE = 0.02
Work = Callable[[int], None]
"""Does the same work from start to end, with that many steps."""
_Enter = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """How long the two runs are, and how often each is made."""

    short_steps: int = 8
    """Steps of the short run."""
    long_steps: int = 24
    """Steps of the long run."""
    repeats: int = 3
    """How often each run is made; the fastest counts, for what disturbs a run only makes it longer."""

    def __post_init__(self) -> None:
        if not 1 <= self.short_steps < self.long_steps or self.repeats < 1:
            raise ConfigError(
                f"got {self.short_steps} and {self.long_steps} steps, {self.repeats} repeats; need at least one step "
                "in the short run, more in the long one, and at least one repeat"
            )


class ProfileRow(Record):
    """One category, or one source of gaps, in one step.

    Units:   ``calls`` are outermost operators on a CPU, kernels and copies on a GPU; ``ms`` is time on the device,
             which on a CPU is the host; ``share`` is of the profiled step
    """

    name: str
    calls: float = 0
    ms: float
    share: float
    host_ms: float = 0


class MemoryRow(Record):
    """What one operator in one place allocated, copied or waited for in one step; no source is outside the model."""

    kind: EntryKind
    place: str
    operator: str
    source: str
    calls: float
    bytes: float


class StepProfile(Record):
    """A steady step.

    Units:   milliseconds; ``step_ms`` without the profiler, ``profiled_step_ms`` with it, both by the host's clock;
             ``peak_bytes`` by device, of the whole long run beyond what was there before; ``problems`` says why the
             times are not those of a quiet machine
    """

    work: str
    device: str
    dtype: str
    environment: Environment
    short_steps: int
    long_steps: int
    step_ms: float
    profiled_step_ms: float
    categories: tuple[ProfileRow, ...]
    gaps: tuple[ProfileRow, ...]
    memory: tuple[MemoryRow, ...]
    peak_bytes: dict[str, int]
    problems: tuple[str, ...]

    @property
    def share_sum(self) -> float:
        """Return what all shares and gaps add up to; 1 but for what the two clocks differ by."""
        return sum(row.share for row in (*self.categories, *self.gaps))


def profile_generation(
    llm: LLM, prompt: str | list[int], params: SamplingParams, config: ProfileConfig
) -> tuple[StepProfile, TraceFile]:
    """Profile one row's decoding: every step is a forward pass, a choice and its bookkeeping.

    The lengths are the config's, so no stop ends a run early; without a seed it is 0, so that all runs are one.

    Raises:
        RequestError: several choices are asked for, or the prompt does not fit.
        EvidenceError: the runs do not come out as the config says, or their times do not add up.
    """
    if params.n > 1:
        raise RequestError(f"got n={params.n}; need n=1: a profile is of one row")
    params = replace(params, seed=params.seed or 0, ignore_eos=True, stop=(), stop_token_ids=(), min_tokens=0)

    llm = llm.uncaptured()

    def work(steps: int) -> None:
        done = llm.generate(prompt, replace(params, max_tokens=steps))
        if len(done.token_ids) != steps:
            raise EvidenceError(
                f"got {len(done.token_ids)} tokens ({done.error or done.finish_reason}); need {steps}; "
                "shorten the prompt or the long run"
            )

    return profile_steps(work, llm.model, config, name=f"generate with {llm.name or 'a model'}")


def profile_steps(work: Work, model: nn.Module, config: ProfileConfig, *, name: str) -> tuple[StepProfile, TraceFile]:
    """Return where a steady step of ``work`` spends its time, and the timeline of the last few.

    Raises:
        EvidenceError: the long run was not the longer one, or categories and gaps miss the host's clock by over 2 %.
    """
    weight = next(model.parameters(), torch.empty(0))  # a plan has none: on a CPU, packed, its stream in fp32
    lengths, steps = (config.short_steps, config.long_steps), config.long_steps - config.short_steps
    meter = CpuMeter()
    walls, (short, long) = _run(work, model, config, cuda=weight.device.type == "cuda")
    with _ranges(model, lambda place: tag(source_of(place))):
        small, large = (_watch(work, length) for length in lengths)
    step: Totals = {key: (total - short.totals.get(key, 0)) / steps for key, total in long.totals.items()}
    wall_ms = (long.wall_ms - short.wall_ms) / steps
    gaps = sorted(_rows(step, "gap_ms", {name for _, name in step}, wall_ms), key=lambda row: -row.ms)
    found = StepProfile(
        work=name, device=str(weight.device), dtype=str(weight.dtype).removeprefix("torch."),
        environment=capture_environment(str(weight.device)), short_steps=lengths[0], long_steps=lengths[1],
        step_ms=(walls[1] - walls[0]) / steps, profiled_step_ms=wall_ms,
        categories=tuple(_rows(step, "ms", CATEGORIES, wall_ms)), gaps=tuple(row for row in gaps if row.ms),
        memory=_memory_per_step(small, large, steps), peak_bytes=large.peak_bytes,
        problems=cpu_problems(meter.foreign_cpus()),
    )  # fmt: skip
    _check(found)
    return found, long.timeline()


def _check(found: StepProfile) -> None:
    if min(found.step_ms, found.profiled_step_ms) <= 0:
        raise EvidenceError(
            f"got steps of {found.step_ms:.3f} ms, {found.profiled_step_ms:.3f} ms under the profiler; need both "
            "above 0; take a longer long run, or a machine with less else to do"
        )
    if abs(found.share_sum - 1) > SUM_TOLERANCE:
        raise EvidenceError(
            f"got categories and gaps that add up to {found.share_sum:.1%} of the step; need 100 % within "
            f"{SUM_TOLERANCE:.0%}; work on several streams or threads at once cannot be told apart this way"
        )


def _run(work: Work, model: nn.Module, config: ProfileConfig, *, cuda: bool) -> tuple[list[float], list[ProfiledRun]]:
    """Return the short and the long run, by the clock alone and under the profiler: of each, the least disturbed."""
    lengths = config.short_steps, config.long_steps
    work(config.short_steps)  # warms caches and allocators
    with _ranges(model, _RecordFunctionFast):
        _record(work, config.short_steps, cuda=cuda)  # warms the profiler
    walls: list[float] = [math.inf, math.inf]
    recorded: list[tuple[float, Any]] = [(math.inf, None), (math.inf, None)]
    for _ in range(config.repeats):
        walls = [min(wall, _time(work, steps, cuda=cuda)) for wall, steps in zip(walls, lengths, strict=True)]
        with _ranges(model, _RecordFunctionFast):
            again = [_record(work, steps, cuda=cuda) for steps in lengths]
        recorded = [min(pair, key=lambda run: run[0]) for pair in zip(recorded, again, strict=True)]
    return walls, [read_run(results.events(), wall_ms, cuda=cuda) for wall_ms, results in recorded]


def _time(work: Work, steps: int, *, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    work(steps)
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e6


def _record(work: Work, steps: int, *, cuda: bool) -> tuple[float, Any]:
    with torch_profiler() as profiler, _RecordFunctionFast(REGION):
        wall_ms = _time(work, steps, cuda=cuda)
    assert profiler.profiler is not None
    return wall_ms, profiler.profiler.kineto_results


def _watch(work: Work, steps: int) -> LedgerReport:
    with memory_ledger() as ledger:
        work(steps)
    return ledger.report


@contextmanager
def _ranges(model: nn.Module, enter: _Enter) -> Iterator[None]:
    """Open a range around every module's forward and every operator of ``ops`` while the context is open."""
    opened: list[AbstractContextManager[object]] = []

    def before(place: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            opened.append(enter(place))
            opened[-1].__enter__()

        return hook

    def after(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    @contextmanager
    def around(place: str) -> Iterator[None]:
        with enter(place):
            yield

    operators = {name: getattr(ops, name) for name in ops.CONTRACTS if name in ops.__all__}  # not the backward ones
    hooks = []
    try:
        for site, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(before(SITE + site), prepend=True))
            hooks.append(module.register_forward_hook(after, always_call=True))
        for name, operator in operators.items():
            setattr(ops, name, around(OPERATOR + name)(operator))
        yield
    finally:
        for name, operator in operators.items():
            setattr(ops, name, operator)
        for hook in hooks:
            hook.remove()


def _rows(step: Totals, column: str, names: Iterable[str], wall_ms: float) -> Iterator[ProfileRow]:
    for name in names:
        ms, calls, host_ms = (step.get((c, name), 0) for c in (column, "calls", "host_ms"))
        yield ProfileRow(name=name, calls=calls, ms=ms, share=ms / wall_ms, host_ms=host_ms)


def _memory_per_step(short: LedgerReport, long: LedgerReport, steps: int) -> tuple[MemoryRow, ...]:
    """Return what recurs in every step, the most bytes first."""
    before = {(e.kind, e.place, e.operator, e.tag): (e.calls, e.bytes) for e in short.entries}
    rows = []
    for e in long.entries:
        calls, size = before.get((e.kind, e.place, e.operator, e.tag), (0, 0))
        if e.calls > calls:
            row = MemoryRow(
                kind=e.kind, place=e.place, operator=e.operator, source=e.tag,
                calls=(e.calls - calls) / steps, bytes=(e.bytes - size) / steps,
            )  # fmt: skip
            rows.append(row)
    return tuple(sorted(rows, key=lambda row: (row.kind, -row.bytes, -row.calls)))


def describe_profile(found: StepProfile, most: int = 8) -> str:
    """Return the profile as a table for a terminal, with the ``most`` largest gaps, allocations and copies."""
    cuda = found.device.startswith("cuda")
    gap_ms, gap_share = sum(row.ms for row in found.gaps), sum(row.share for row in found.gaps)
    lines = [
        f"{found.work}, {found.device} {found.dtype}: a steady step, out of {found.long_steps - found.short_steps} "
        f"({found.long_steps} less {found.short_steps})",
        f"{found.step_ms:.3f} ms a step; {found.profiled_step_ms:.3f} ms under the profiler "
        f"({found.profiled_step_ms / found.step_ms - 1:+.0%}): the shares are of that",
        *(f"caution: {problem}" for problem in found.problems),
        "",
        f"{'':<24}{'kernels' if cuda else 'calls':>9}{'device ms':>12}{'share':>9}{'host ms' if cuda else '':>10}",
    ]
    for row in found.categories:
        if row.calls or row.ms:
            host = f"{row.host_ms:>10.3f}" if cuda else ""
            lines.append(f"{row.name:<24}{row.calls:>9.1f}{row.ms:>12.3f}{row.share:>9.1%}{host}")
    lines.append(f"{'host gaps':<33}{gap_ms:>12.3f}{gap_share:>9.1%}")
    lines += [f"  {row.name:<31}{row.ms:>12.3f}{row.share:>9.1%}" for row in found.gaps[:most]]
    lines.append(f"{'sum':<33}{found.share_sum * found.profiled_step_ms:>12.3f}{found.share_sum:>9.1%}")
    for kind, title in (("allocation", "allocations"), ("copy", "copies"), ("synchronisation", "synchronisations")):
        rows = [row for row in found.memory if row.kind == kind]
        size = sum(row.bytes for row in rows)
        lines += ["", f"{title}: {sum(row.calls for row in rows):.1f} calls, {size:,.0f} bytes a step"]
        for row in rows[:most]:
            where = f"{row.operator or '-'} in {row.source or 'the loop around the model'}"
            lines.append(f"{row.calls:>9.1f} {row.bytes:>14,.0f}  {row.place:<5} {where}")
    lines += ["", *(f"peak on {place}: {size:,} bytes beyond the model" for place, size in found.peak_bytes.items())]
    return "\n".join(lines)


def write_profile(directory: Path, found: StepProfile, timeline: TraceFile) -> None:
    """Write profile.json, profile.txt, and timeline.json for ui.perfetto.dev."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "profile.json").write_text(found.model_dump_json() + "\n", encoding="utf-8")
    (directory / "profile.txt").write_text(describe_profile(found, most=1000) + "\n", encoding="utf-8")
    (directory / "timeline.json").write_text(timeline.model_dump_json() + "\n", encoding="utf-8")
