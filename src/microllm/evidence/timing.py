"""Two callables timed in pairs, in one process: who is faster, by how much, and may it be believed.

Place: one process's part of every comparison (benchmarks, tuner, structures' gate, lab); ``replicates`` starts the
processes, ``verdict`` decides over them. Raw rounds are kept and every statistic is computed from them.
Rounds come in ABBA or BAAB order, drawn from a recorded seed, after an A/A control in the same form; each round is
read on two clocks, and a pair is dropped whole when they disagree or the GPU was throttled.

Sources: Bulej et al., ICPE 2020 (paired measurement on shared machines).
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

from microllm.errors import EvidenceError
from microllm.evidence.preflight import SPOILING, CpuMeter, GpuMeter, cpu_problems
from microllm.evidence.statistics import summarise

FULL_ROUND_S = 0.5
QUICK_ROUND_S = 0.02
MAX_DROPPED = 0.2  # share of pairs
Arm = Literal["A", "B"]
Action = Callable[[], object]

_host_ns = time.perf_counter_ns  # bound here: a timed callable that patches time changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig:
    """How a comparison is timed; ``quick`` screens in one process and never decides a keep.

    Units:   ``pairs`` counts pairs of rounds; two pairs make one ABBA block
    """

    pairs: int = 8
    control_pairs: int = 4
    round_s: float = FULL_ROUND_S
    warmup_s: float = 1.0
    seed: int = 0
    clock_tolerance: float = 0.005
    quick: bool = False

    def __post_init__(self) -> None:
        if self.pairs < 2 or self.pairs % 2 or self.control_pairs < 0 or self.control_pairs % 2:
            raise EvidenceError(
                f"got {self.pairs} pairs, {self.control_pairs} control pairs; need even numbers, at least 2 pairs"
            )
        shortest = QUICK_ROUND_S if self.quick else FULL_ROUND_S
        if not self.round_s >= shortest:
            raise EvidenceError(
                f"got rounds of {self.round_s} s; need at least {shortest} s{'' if self.quick else ' (or quick=True)'}"
            )


QUICK = TimingConfig(control_pairs=2, round_s=QUICK_ROUND_S, warmup_s=0.1, quick=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Back-to-back calls of one arm, read on two clocks.

    Units:   seconds for all repetitions; ``second_s`` is CUDA events, or the raw monotonic clock on a CPU
    """

    arm: Arm
    repetitions: int
    host_s: float
    second_s: float
    cpu_s: float
    sm_mhz: int | None = None
    throttle: tuple[str, ...] = ()

    def usable(self, shortest_s: float, tolerance: float) -> bool:
        """Return whether the clocks agree, the round is long enough and the GPU was not slowed down."""
        agree = abs(self.second_s - self.host_s) <= tolerance * self.host_s
        return agree and self.host_s >= shortest_s and not set(self.throttle) & set(SPOILING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTiming:
    """The raw rounds of one process and what follows from them.

    Units:   d = ln(t_baseline / t_candidate) per pair; positive: the candidate is faster
    """

    device: str
    config: TimingConfig
    rounds: tuple[Round, ...]
    control_rounds: tuple[Round, ...]
    foreign_cpus: float | None
    notes: tuple[str, ...] = ()

    def _logs(self, rounds: Sequence[Round]) -> list[float]:
        config = self.config
        kept = [pair for pair in zip(rounds[::2], rounds[1::2], strict=True)
                if all(r.usable(config.round_s, config.clock_tolerance) for r in pair)]  # fmt: skip
        per_call = [{r.arm: r.host_s / r.repetitions for r in pair} for pair in kept]
        return [math.log(t["A"] / t["B"]) for t in per_call]

    @property
    def pairs(self) -> list[float]:
        """Return d of each pair kept."""
        return self._logs(self.rounds)

    @property
    def control(self) -> list[float]:
        """Return d of each A/A pair kept."""
        return self._logs(self.control_rounds)

    @property
    def median(self) -> float:
        """Return this process's median of d (NaN if no pair was kept)."""
        return median(self.pairs) if self.pairs else math.nan

    @property
    def control_median(self) -> float:
        """Return this process's median of the A/A control (NaN if none was kept)."""
        return median(self.control) if self.control else math.nan

    @property
    def ratio(self) -> float:
        """Return the median of t_baseline / t_candidate."""
        return math.exp(self.median)

    @property
    def lower_ratio(self) -> float:
        """Return the one-sided 97.5 % lower bound of the ratio from this one process's pairs (quick mode's)."""
        return math.exp(float(summarise(self.pairs).lower)) if len(self.pairs) > 1 else math.nan

    def seconds(self, arm: Arm) -> float:
        """Return the median seconds of one call of ``arm``."""
        return median(r.host_s / r.repetitions for r in self.rounds if r.arm == arm)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why this timing may not be believed, in words; empty if it may."""
        found = list(cpu_problems(self.foreign_cpus)) if torch.device(self.device).type == "cpu" else []
        for name, rounds, kept in (
            ("pairs", self.rounds, self.pairs),
            ("control pairs", self.control_rounds, self.control),
        ):
            total = len(rounds) // 2
            if total and total - len(kept) > MAX_DROPPED * total:
                found.append(f"{total - len(kept)} of {total} {name} dropped: clocks apart, throttled or too short")
        return tuple(found)


class RoundClock:
    """Times repeated calls on two clocks that must agree."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._gpu = GpuMeter(device)

    @property
    def note(self) -> str:
        """Return why no telemetry was read, if so."""
        return self._gpu.note

    def time(self, action: Action, repetitions: int, arm: Arm = "A") -> Round:
        """Call ``action`` ``repetitions`` times and return the round; synchronises at both ends only."""
        cpu = time.process_time()
        host_s, second_s = (self._on_cuda if self.device.type == "cuda" else self._on_host)(action, repetitions)
        cpu = time.process_time() - cpu
        state = self._gpu.read()
        return Round(
            arm=arm,
            repetitions=repetitions,
            host_s=host_s,
            second_s=second_s,
            cpu_s=cpu,
            sm_mhz=state.sm_mhz if state else None,
            throttle=state.throttle if state else (),
        )

    @staticmethod
    def _on_host(action: Action, repetitions: int) -> tuple[float, float]:
        raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        start = _host_ns()
        for _ in range(repetitions):
            action()
        end = _host_ns()
        raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - raw
        return (end - start) / 1e9, raw / 1e9

    def _on_cuda(self, action: Action, repetitions: int) -> tuple[float, float]:
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start = _host_ns()
        begin.record()
        for _ in range(repetitions):
            action()
        finish.record()
        torch.cuda.synchronize(self.device)
        end = _host_ns()
        return (end - start) / 1e9, begin.elapsed_time(finish) / 1e3

    def calibrate(self, actions: Sequence[Action], round_s: float) -> int:
        """Return how many calls of the quickest of ``actions`` fill ``round_s`` with a tenth to spare."""
        quickest = math.inf
        for action in actions:
            repetitions = 1
            while (took := self.time(action, repetitions).host_s) < round_s / 10:
                repetitions = min(repetitions * 10, math.ceil(repetitions * 1.2 * round_s / 10 / max(took, 1e-9)))
            again = self.time(action, repetitions).host_s
            quickest = min(quickest, took / repetitions, again / repetitions)
        return math.ceil(1.1 * round_s / quickest)

    def run(self, arms: dict[Arm, Action], order: str, repetitions: int, round_s: float) -> tuple[Round, ...]:
        """Time the rounds of ``order``; starts over with more repetitions if a round turns out too short."""
        rounds: tuple[Round, ...] = ()
        for _ in range(4):
            rounds = ()
            for arm in order:
                key: Arm = "A" if arm == "A" else "B"
                rounds += (self.time(arms[key], repetitions, key),)
                if rounds[-1].host_s < round_s:
                    repetitions = math.ceil(repetitions * 1.2 * round_s / rounds[-1].host_s)
                    break
            else:
                break
        return rounds if len(rounds) % 2 == 0 else rounds[:-1]


def draw_order(pairs: int, seed: int) -> str:
    """Return the arms of ``2 · pairs`` rounds, in blocks ABBA or BAAB drawn from ``seed``."""
    draw = random.Random(seed)
    return "".join(draw.choice(("ABBA", "BAAB")) for _ in range(pairs // 2))


def time_pairs(
    baseline: Action,
    candidate: Action,
    *,
    device: str = "cpu",
    config: TimingConfig | None = None,
    control: Action | None = None,
) -> PairedTiming:
    """Time ``candidate`` against ``baseline`` in this process and return the raw rounds.

    ``control`` is a second build of the baseline for the A/A control; without it the baseline is its own.
    Both arms do the same work for each call; they are warmed together and called without arguments.
    """
    config = config or TimingConfig()
    clock = RoundClock(device)
    twin = control or baseline
    with _garbage_paused():
        started = time.monotonic()
        while True:
            for action in (baseline, candidate, twin):
                action()
            if clock.device.type == "cuda":
                torch.cuda.synchronize(clock.device)
            if time.monotonic() - started >= config.warmup_s:
                break
        repetitions = clock.calibrate((baseline, candidate), config.round_s)
        meter = CpuMeter()
        control_order = draw_order(config.control_pairs, config.seed + 1)
        control_rounds = clock.run({"A": baseline, "B": twin}, control_order, repetitions, config.round_s)
        order = draw_order(config.pairs, config.seed)
        rounds = clock.run({"A": baseline, "B": candidate}, order, repetitions, config.round_s)
        foreign = meter.foreign_cpus()
    return PairedTiming(
        device=device,
        config=config,
        rounds=rounds,
        control_rounds=control_rounds,
        foreign_cpus=foreign,
        notes=(clock.note,) if clock.note else (),
    )


@contextlib.contextmanager
def _garbage_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
