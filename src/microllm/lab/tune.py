"""The tuner: candidates for a kernel's choice, through the contract first, then timed in pairs against today's.

Place: ``microllm tune``. A candidate that does not keep the contract is never timed. What is left is screened with
short rounds, a search goes on from the best, and the best few are timed again, longer, each after an A/A control: only
that timing lets one win. Winners go to ``tuned.json`` if they are accepted; everything goes to the report.

Numbers: ratios are t_today / t_candidate; above 1 the candidate is faster
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from microllm import ops
from microllm.errors import ConfigError
from microllm.evidence.environment import Environment, capture_environment
from microllm.evidence.journal import write_atomic
from microllm.evidence.tensor_statistics import Record
from microllm.evidence.timing import FULL, QUICK, PairedTiming, TimingConfig, time_pairs
from microllm.lab.bench_ops import OpsConfig, cases_of
from microllm.lab.roofline import TORCH_DTYPES
from microllm.lab.tune_config import TuneConfig, parse_candidate, parse_shape
from microllm.lab.tune_subjects import Subject, Tile, Workbench, rows_of
from microllm.ops import tuned

LEAST_EFFECT = math.log(1.01)
"""What a winner gains at least, as the mean over the sizes it is timed at."""
GUARD = math.exp(-0.005)
"""No size may be slower than this, at the lower bound."""
SCREENING = replace(QUICK, clock_tolerance=0.02)
"""Rounds of 20 ms, which starting and ending them lengthens on the host's clock."""
DEFAULT_MODEL = "qwen2.5-0.5b"


class Attempt(Record):
    """One candidate: what became of it and why; ratios by size, none for one that was rejected.

    ``screened`` are medians of short rounds; ``confirmed`` medians, ``lower`` one-sided 97.5 % bounds of long ones.
    """

    choice: Tile
    outcome: Literal["rejected", "screened", "beaten", "winner"]
    why: str = ""
    screened: tuple[float, ...] = ()
    confirmed: tuple[float, ...] = ()
    lower: tuple[float, ...] = ()

    @property
    def gain(self) -> float:
        """The mean logarithm of the last ratios there are; NaN counts as none."""
        ratios = self.confirmed or self.screened
        return sum(map(math.log, ratios)) / len(ratios) if ratios and not any(map(math.isnan, ratios)) else -math.inf


class Search(Record):
    """One entry that was sought: today's choice, what was tried, and what won, if anything did."""

    workload: str
    op: str
    shape: Tile
    dtype: str
    mode_b: bool
    today: Tile
    attempts: tuple[Attempt, ...]
    winner: Tile | None
    accepted: bool = False


class TuneReport(Record):
    """All searches of a run; ``complete`` says whether it came to its end."""

    version: Literal[1] = 1
    environment: Environment
    quick: bool
    complete: bool
    ignored: tuple[str, ...]
    searches: tuple[Search, ...]


def tune(config: TuneConfig, progress: Callable[[str], None] = lambda text: None) -> TuneReport:
    """Search every entry that ``config`` asks for; write the report after each, and the winners if they are accepted.

    Raises:
        ConfigError: an operator, shape or candidate that cannot be; the text says which.
        OSError: the report, or with ``accept`` the table, cannot be written: before anything is timed.
        EvidenceError: the device no longer runs what it ran before.
    """
    config.check()
    subjects = list(_subjects(config))
    given = [_given(subject, config) for subject in subjects]  # a mistake in the last one is told before the first
    report = TuneReport(
        environment=capture_environment(config.device), quick=config.quick, complete=False, searches=(),
        ignored=tuple(tuned.ignored(tuned.device_name(torch.device(config.device)))),
    )  # fmt: skip
    _write(report, config)
    if config.accept:
        tuned.accept(())
    for subject, choices in zip(subjects, given, strict=True):
        found = search(Workbench(subject, config.rotate_mib), config, choices, progress)
        if found.winner is not None and config.accept:
            tuned.accept((subject.entry(found.winner),))
            found = found.model_copy(update={"accepted": True})
        report = report.model_copy(update={"searches": (*report.searches, found)})
        _write(report, config)
    report = report.model_copy(update={"complete": True})
    _write(report, config)
    return report


def _write(report: TuneReport, config: TuneConfig) -> None:
    write_atomic(config.out, report.model_dump_json(indent=1) + "\n")


def search(bench: Workbench, config: TuneConfig, given: Sequence[Tile], progress: Callable[[str], None]) -> Search:
    """Screen candidates, go on from the best, time the best few again, and say which wins."""
    subject = bench.subject
    today, tried = subject.standing(), dict[str, Attempt]()
    bench.warm()

    def screen(choices: Iterator[Tile]) -> None:
        for choice in choices:
            key = str(sorted(choice.items()))
            if choice == today or key in tried or len(tried) >= config.most:
                continue
            progress(f"{subject.workload}: candidate {len(tried) + 1}")
            tried[key] = _screened(bench, choice, config)

    if given:
        screen(iter(given))
    else:
        screen(iter([*subject.first(), *subject.near(today)]))
        for _ in range(config.climbs):
            best = max(tried.values(), key=lambda one: one.gain, default=None)
            if best is not None and best.gain > 0:
                screen(subject.near(best.choice))
    attempts = sorted(tried.values(), key=lambda one: -one.gain)
    if not config.quick:
        finalists = [one for one in attempts[: config.finalists] if one.gain > 0]
        progress(f"{subject.workload}: {len(finalists)} finalists")
        attempts = _judged([_confirmed(bench, one, config) for one in finalists]) + attempts[len(finalists) :]
    return Search(
        workload=subject.workload, op=subject.op, shape=subject.shape, dtype=str(subject.dtype).removeprefix("torch."),
        mode_b=subject.order, today=today, attempts=tuple(attempts),
        winner=next((one.choice for one in attempts if one.outcome == "winner"), None),
    )  # fmt: skip


def why_not(timings: Sequence[PairedTiming]) -> str:
    """Return why a candidate does not win by its timings, one for each size, or nothing."""
    problems = sorted({problem for timing in timings for problem in timing.problems})
    if problems:
        return "; ".join(problems)
    lower = [timing.lower_ratio for timing in timings]
    effect = sum(timing.median for timing in timings) / len(timings)
    noise = max(abs(timing.control_median) for timing in timings)
    if effect < LEAST_EFFECT:
        return f"less than 1 % faster: {math.expm1(effect):+.2%}"
    if min(lower) < GUARD:
        return f"at one size it may be slower: the lower bound is {min(lower):.4f}"
    if not sum(map(math.log, lower)) > 0:
        return "it may be no faster: the lower bounds' mean is not above 1"
    if not noise < effect / 2:
        return f"equal arms differed by {noise:.2%}, half of what it gains or more"
    return ""


def _screened(bench: Workbench, choice: Tile, config: TuneConfig) -> Attempt:
    verdict = bench.gate(choice)
    if verdict != "pass":
        return Attempt(choice=choice, outcome="rejected", why=verdict)
    timings = [time_pairs(*arms, device=config.device, config=SCREENING) for arms in bench.arms(choice)]
    why = "; ".join(sorted({problem for timing in timings for problem in timing.problems}))
    return Attempt(choice=choice, outcome="screened", why=why, screened=tuple(timing.ratio for timing in timings))


def _confirmed(bench: Workbench, attempt: Attempt, config: TuneConfig) -> Attempt:
    kind = torch.device(config.device).type
    longer = FULL["cpu"] if kind == "cpu" else TimingConfig(round_s=config.round_s, warmup_s=0.2)
    timings = [time_pairs(*arms, device=config.device, config=longer) for arms in bench.arms(attempt.choice)]
    why = why_not(timings)
    ratios, lower = tuple(timing.ratio for timing in timings), tuple(timing.lower_ratio for timing in timings)
    outcome = "beaten" if why else "winner"
    return attempt.model_copy(update={"outcome": outcome, "why": why, "confirmed": ratios, "lower": lower})


def _judged(finalists: list[Attempt]) -> list[Attempt]:
    """Leave the best winner one; the others are beaten by it."""
    ranked = sorted(finalists, key=lambda one: (one.outcome != "winner", -one.gain))
    return [
        one.model_copy(update={"outcome": "beaten", "why": "another one is faster"})
        if place and one.outcome == "winner"
        else one
        for place, one in enumerate(ranked)
    ]


def _subjects(config: TuneConfig) -> Iterator[Subject]:
    """Yield what is sought: for each operator and matrix an entry a number of rows, or one for all of them."""
    dtype = TORCH_DTYPES[config.dtype]
    models = config.model or (() if config.shape else (DEFAULT_MODEL,))
    shapes = OpsConfig(model=models, op=config.op, decode_rows=config.rows, training_rows=())
    calls = [(case.op, case.sizes) for case in cases_of(shapes)] if models else []
    calls += [(op, parse_shape(text, ops.CONTRACTS[op])) for op in config.op for text in config.shape]
    found: dict[tuple[str, str], Subject] = {}
    for op, sizes in calls:
        subject = Subject(op=op, sizes=(sizes,), dtype=dtype, device=config.device, order=config.what == "order")
        key = (op, str(subject.shape))
        if key in found and subject.order:
            have = found[key].sizes
            if rows_of(sizes) not in [rows_of(each) for each in have]:
                sizes_of_all = (*have, sizes)
                subject = Subject(op=op, sizes=sizes_of_all, dtype=dtype, device=config.device, order=True)
        elif key in found:
            continue
        found[key] = subject
    yield from found.values()


def _given(subject: Subject, config: TuneConfig) -> list[Tile]:
    """Return the caller's candidates, whole.

    Raises:
        ConfigError: one cannot be run, or there is none at all for the subject.
    """
    if subject.order and not subject.has_order:
        raise ConfigError(
            f"got --what order for {subject.workload}; need bf16 or fp16 on NVIDIA: here it has tiles alone"
        )
    choices = []
    for text in config.candidate:
        choice = parse_candidate(text)
        if what := subject.problem(choice):
            raise ConfigError(f"got candidate {text} for {subject.workload}: {what}; leave it out or change it")
        choices.append(subject.standing(choice))
    if not choices and not any(True for _ in subject.first()):
        raise ConfigError(f"got no candidate for {subject.workload}; name one with --candidate")
    return choices
