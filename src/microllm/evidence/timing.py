"""Two callables timed in pairs, in one process: who is faster, by how much, and may it be believed.

Place: one process's part of every comparison (benchmarks, tuner, structures' gate, lab); ``replicates`` starts the
processes, ``verdict`` decides over them. Raw rounds are kept and every statistic is computed from them.
Rounds come in ABBA or BAAB order, drawn from a recorded seed, after an A/A control in the same form; each round is
read on two clocks, and a pair is dropped whole when they disagree or the GPU was throttled. Both rounds of a pair do
equal counts of calls.

On a CPU rounds are short and many: neighbours of a shared machine change its speed by a tenth for seconds at a time,
which two rounds of half a second straddle and two of 20 ms hardly ever. Of equal arms, timed for 8 s each way on such a
machine, the median of d came to 0.2-0.9 % with the former and to 0.03-0.1 % with the latter.

Sources: Bulej et al., ICPE 2020 (paired measurement on shared machines).
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from microllm.errors import EvidenceError
from microllm.evidence.preflight import SPOILING, CpuMeter, GpuMeter, cpu_problems
from microllm.evidence.statistics import summarise

MIN_ROUND_S = 0.02
MIN_ARM_S = 1.0  # of one arm's rounds together, where a timing may decide
MAX_DROPPED = 0.2  # share of pairs
MAX_TRAILING_CPUS = 0.2
SETTLE_S, TRAIL_S = 0.02, 0.04  # after the last call: until pools of threads sleep, and while they are watched
Action = Callable[[], object]

_host_ns = time.perf_counter_ns  # bound here: a timed callable that patches time changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig:
    """How a comparison is timed; ``quick`` screens in one process and never decides a keep.

    Units:   ``pairs`` counts pairs of rounds; two pairs make one ABBA block
    """

    pairs: int = 8
    control_pairs: int = 4
    round_s: float = 0.5
    warmup_s: float = 1.0
    seed: int = 0
    clock_tolerance: float = 0.005
    quick: bool = False

    def __post_init__(self) -> None:
        if self.pairs < 2 or self.pairs % 2 or self.control_pairs < 0 or self.control_pairs % 2:
            raise EvidenceError(
                f"got {self.pairs} pairs and {self.control_pairs} of control; need even numbers, 2 or more"
            )
        if not self.round_s >= MIN_ROUND_S:
            raise EvidenceError(f"got rounds of {self.round_s} s; need at least {MIN_ROUND_S} s")
        if not self.quick and self.pairs * self.round_s < MIN_ARM_S:
            raise EvidenceError(
                f"got {self.pairs} pairs of {self.round_s} s; need {MIN_ARM_S} s of each arm, or quick=True, "
                "which decides nothing"
            )


QUICK = TimingConfig(control_pairs=2, round_s=MIN_ROUND_S, warmup_s=0.1, quick=True)
FULL = {"cpu": TimingConfig(pairs=100, control_pairs=40, round_s=MIN_ROUND_S), "cuda": TimingConfig()}
"""How a timing that may decide is made, by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Back-to-back calls of one arm, read on two clocks.

    Units:   seconds for all repetitions; ``second_s`` is CUDA events, or the raw monotonic clock on a CPU
    """

    arm: str
    repetitions: int
    host_s: float
    second_s: float
    sm_mhz: int | None = None
    throttle: tuple[str, ...] = ()

    def usable(self, shortest_s: float, tolerance: float) -> bool:
        """Return whether the clocks agree, the round is long enough and the GPU was not slowed down."""
        agree = abs(self.second_s - self.host_s) <= tolerance * self.host_s
        return agree and self.host_s >= shortest_s and not set(self.throttle) & set(SPOILING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTiming:
    """The raw rounds of one process and what follows from them.

    Units:   d = ln(t_baseline / t_candidate) per pair; positive: the candidate is faster; ``trailing_cpus`` in cores
             that this process's own threads kept busy once the last call had returned
    """

    device: str
    config: TimingConfig
    rounds: tuple[Round, ...]
    control_rounds: tuple[Round, ...]
    foreign_cpus: float | None
    notes: tuple[str, ...] = ()
    trailing_cpus: float = 0.0

    def __post_init__(self) -> None:
        for rounds in (self.rounds, self.control_rounds):
            pairs = [sorted(r.arm for r in rounds[at : at + 2] if r.repetitions > 0) for at in range(0, len(rounds), 2)]
            if any(pair != ["A", "B"] for pair in pairs):
                raise EvidenceError(f"got {len(rounds)} rounds that are no pairs of A and B; need one of each in turn")

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

    def seconds(self, arm: str) -> float:
        """Return the median seconds of one call of ``arm``."""
        return median(r.host_s / r.repetitions for r in self.rounds if r.arm == arm)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why this timing may not be believed, in words; empty if it may."""
        found = list(cpu_problems(self.foreign_cpus)) if torch.device(self.device).type == "cpu" else []
        if self.trailing_cpus > MAX_TRAILING_CPUS:
            found.append(
                f"own threads kept {self.trailing_cpus:.2f} cores busy after the last call: work was not timed"
            )
        kinds = (("pairs", self.rounds, self.pairs), ("control pairs", self.control_rounds, self.control))
        for name, rounds, kept in kinds:
            total, dropped = len(rounds) // 2, len(rounds) // 2 - len(kept)
            if dropped > MAX_DROPPED * total:
                found.append(f"{dropped} of {total} {name} dropped: clocks apart, throttled or too short")
        return tuple(found)


class RoundClock:
    """Times repeated calls on two clocks that must agree."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.gpu = GpuMeter(device)

    def time(self, action: Action, repetitions: int, arm: str = "A") -> Round:
        """Call ``action`` ``repetitions`` times and return the round; synchronises at both ends only."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.device.type == "cuda" else []
        self.synchronize()
        raw, host = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW), _host_ns()
        for event in events[:1]:
            event.record(torch.cuda.current_stream(self.device))
        for _ in range(repetitions):
            action()
        for event in events[1:]:
            event.record(torch.cuda.current_stream(self.device))
        self.synchronize()
        host, raw = _host_ns() - host, time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - raw
        second_s = events[0].elapsed_time(events[1]) / 1e3 if events else raw / 1e9
        state = self.gpu.read()
        sm_mhz, throttle = (state.sm_mhz, state.throttle) if state else (None, ())
        return Round(
            arm=arm, repetitions=repetitions, host_s=host / 1e9, second_s=second_s, sm_mhz=sm_mhz, throttle=throttle
        )  # fmt: skip

    def synchronize(self) -> None:
        """Wait for the device, if there is one to wait for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def trailing_cpus(self, action: Action, repetitions: int) -> float:
        """Return how many cores this process keeps busy after a round that has ended; a GPU was waited for."""
        if self.device.type == "cuda":
            return 0.0
        self.time(action, repetitions)
        time.sleep(SETTLE_S)
        busy, started = time.process_time(), _host_ns()
        time.sleep(TRAIL_S)
        return (time.process_time() - busy) / ((_host_ns() - started) / 1e9)

    def calibrate(self, actions: Sequence[Action], round_s: float) -> int:
        """Return how many calls of the quickest of ``actions`` fill ``round_s`` with a tenth to spare."""
        quickest = math.inf
        for action in actions:
            repetitions = 1
            while (took := self.time(action, repetitions).host_s) < round_s / 10:
                repetitions = min(repetitions * 10, math.ceil(repetitions * 0.12 * round_s / max(took, 1e-9)))
            took = min(took, self.time(action, repetitions).host_s)
            quickest = min(quickest, took / repetitions)
        return math.ceil(1.1 * round_s / quickest)

    def run(self, arms: dict[str, Action], order: str, repetitions: int, round_s: float) -> tuple[Round, ...]:
        """Time the rounds of ``order``; a pair that turns out too short is timed again, with more repetitions."""
        rounds: list[Round] = []
        for pair in zip(order[::2], order[1::2], strict=True):
            done = [self.time(arms[arm], repetitions, arm) for arm in pair]
            if (shortest := min(each.host_s for each in done)) < round_s:
                repetitions = math.ceil(repetitions * 1.2 * round_s / shortest)
                done = [self.time(arms[arm], repetitions, arm) for arm in pair]
            rounds += done
        return tuple(rounds)


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
    config, clock, twin = config or TimingConfig(), RoundClock(device), control or baseline
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        started = time.monotonic()
        while True:
            for action in (baseline, candidate, twin):
                action()
            clock.synchronize()
            if time.monotonic() - started >= config.warmup_s:
                break
        repetitions = clock.calibrate((baseline, candidate), config.round_s)
        meter = CpuMeter()
        order = draw_order(config.control_pairs, config.seed + 1)
        control_rounds = clock.run({"A": baseline, "B": twin}, order, repetitions, config.round_s)
        order = draw_order(config.pairs, config.seed)
        rounds = clock.run({"A": baseline, "B": candidate}, order, repetitions, config.round_s)
        foreign_cpus, trailing_cpus = meter.foreign_cpus(), clock.trailing_cpus(candidate, repetitions)
    finally:
        if was_enabled:
            gc.enable()
    return PairedTiming(
        device=device, config=config, rounds=rounds, control_rounds=control_rounds, foreign_cpus=foreign_cpus,
        trailing_cpus=trailing_cpus, notes=(clock.gpu.note,) if clock.gpu.note else (),
    )  # fmt: skip
