"""The verdict: computed from per-process medians by a stated rule, never typed.

    keep          gates pass, lower bound > 0, at least P - 1 of P processes positive, effect ≥ δ, every guard's lower
                  bound > -0.5 %, peak memory ≤ +1 % or a declared trade; P ≥ 6
    discard       upper bound < δ, or a guard's upper bound < -0.5 %; or still open at P = 12
    inconclusive  anything else at 6 ≤ P < 12 (one extension to 12); always with fewer processes, in quick mode, or on
                  a machine whose A/A process SD is above 0.4 % or unknown
    crash, invalid, baseline   as they say

A keep counts once the same rule keeps it again, in new processes at another time: ``confirm``.

Place: judges what ``timing`` measured in the processes of ``replicates``. Pure functions on numbers; measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from microllm.errors import EvidenceError
from microllm.evidence.statistics import Interval, sign_flip_p, summarise

Status = Literal["keep", "discard", "inconclusive", "crash", "invalid", "baseline"]
MAX_PROCESS_SD = 0.004
CONFIRMATION_GAP_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The numbers of the rule; a contract fixes them before any figure is seen.

    Units:   effects in natural logarithms (0.003 reads as 0.3 %); ``memory_limit`` a ratio of peaks
    """

    min_effect: float = 0.003
    guard_limit: float = -0.005
    memory_limit: float = 1.01
    min_processes: int = 6
    max_processes: int = 12
    max_process_sd: float = MAX_PROCESS_SD


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one session measured, reduced to what the rule reads.

    ``medians``, each guard's and ``control`` hold one median of d for each process; ``peak_ratio`` is candidate's
    peak over baseline's (worst workload); ``invalid`` and ``crash`` say what went wrong.
    """

    medians: Sequence[float]
    control: Sequence[float] = ()
    guards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    gates_pass: bool = True
    peak_ratio: float | None = 1.0
    process_sd: float | None = None
    quick: bool = False
    crash: str = ""
    invalid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A status with its numbers and reasons; ``extend`` asks for the one extension to 12 processes."""

    status: Status
    reasons: tuple[str, ...]
    num_processes: int = 0
    num_positive: int = 0
    effect: float | None = None
    lower: float | None = None
    upper: float | None = None
    sign_flip_p: float | None = None
    extend: bool = False
    confirmed: bool = False


OPEN, KEEP, DISCARD = 0, 1, 2


def decide(target: Interval, rule: Rule, *, others_allow: bool = True) -> NDArray[np.int64]:
    """Return KEEP, DISCARD or OPEN for each session in ``target``.

    ``others_allow`` is what gates, guards and memory say. The rule looks twice: at 6 processes, and at 12, where what
    is not kept is discarded; in between a session is open.
    """
    keep = (target.lower > 0) & (target.effect >= rule.min_effect) & others_allow
    keep &= target.num_positive >= target.count - 1
    discard = (target.upper < rule.min_effect) | (target.count >= rule.max_processes)
    looks = target.count == rule.min_processes or target.count >= rule.max_processes
    return np.where(keep, KEEP, np.where(discard, DISCARD, OPEN)) * looks


def judge(measured: Measured, rule: Rule | None = None) -> Verdict:
    """Return the verdict on one session."""
    rule = rule or Rule()
    if measured.crash:
        return Verdict(status="crash", reasons=(measured.crash,))
    count = len(measured.medians)
    faults = _faults(measured, rule)
    if faults or (measured.invalid and not measured.quick):
        return Verdict(status="invalid", reasons=(*faults, *measured.invalid), num_processes=count)
    if count < 2 or measured.quick:
        reasons = (_QUICK,) * measured.quick + (_FEW.format(count, rule.min_processes),) + tuple(measured.invalid)
        effect = float(np.median(measured.medians)) if count else None
        return Verdict(status="inconclusive", reasons=reasons, num_processes=count, effect=effect)
    target = summarise(measured.medians)
    blocked = _why_never_decided(measured, rule)
    regressed, undecided = _guards(measured.guards, rule)
    others = (*regressed, *undecided, *_memory(measured.peak_ratio, rule))
    code = int(decide(target, rule, others_allow=not others))
    status: Status = "keep" if code == KEEP else "discard" if code == DISCARD or regressed else "inconclusive"
    p = sign_flip_p(measured.medians)
    check = (float(target.lower) > 0) == (p <= 0.05)
    doubt = () if check else (f"the sign-flip test (p = {p:.3f}) does not side with the t bound",)
    return Verdict(
        status="inconclusive" if blocked else status, reasons=(*blocked, *_target(target, rule), *others, *doubt),
        num_processes=count, num_positive=int(target.num_positive), effect=float(target.effect),
        lower=float(target.lower), upper=float(target.upper), sign_flip_p=p,
        extend=status == "inconclusive" and not blocked,
    )  # fmt: skip


def confirm(first: Verdict, second: Verdict, gap_s: float) -> Verdict:
    """Return the final verdict of a kept session and a second one in new processes, begun ``gap_s`` after it.

    The second session decides: if it keeps too, the keep counts; else its own status stands.

    Raises:
        EvidenceError: the first was no keep, or the second followed too soon.
    """
    if first.status != "keep":
        raise EvidenceError(f"got a first verdict {first.status!r}; need a keep: only that is confirmed")
    if gap_s < CONFIRMATION_GAP_S:
        raise EvidenceError(f"got a second session {gap_s:.0f} s after the first; need {CONFIRMATION_GAP_S:.0f} s")
    twice = second.status == "keep"
    reason = "kept twice, at two times" if twice else "kept once, not kept again"
    return replace(second, reasons=(reason, *second.reasons), confirmed=twice)


_QUICK = "quick mode screens; it decides nothing"
_FEW = "{} processes; need {} for a verdict: fewer only screen"


def _faults(measured: Measured, rule: Rule) -> tuple[str, ...]:
    found = []
    if not measured.gates_pass:
        found.append("a correctness gate failed: what is wrong has no speed")
    values = [*measured.medians, *(value for guard in measured.guards.values() for value in guard)]
    if not all(math.isfinite(value) for value in (*values, *measured.control)):
        found.append("a process has no finite median")
    elif len(measured.control) > 1:
        control = summarise(measured.control)
        apart = float(control.lower) > 0 or float(control.upper) < 0
        if apart and abs(float(control.effect)) >= rule.min_effect:
            found.append(f"the A/A control differs from itself by {float(control.effect):+.2%}")
    return tuple(found)


def _why_never_decided(measured: Measured, rule: Rule) -> tuple[str, ...]:
    found = []
    if len(measured.medians) < rule.min_processes:
        found.append(_FEW.format(len(measured.medians), rule.min_processes))
    if measured.process_sd is None:
        found.append("this machine has no recorded A/A calibration")
    elif not measured.process_sd <= rule.max_process_sd:
        found.append(
            f"this machine's process SD is {measured.process_sd:.2%}; above {rule.max_process_sd:.1%} none is decided"
        )
    return tuple(found)


def _guards(guards: Mapping[str, Sequence[float]], rule: Rule) -> tuple[list[str], list[str]]:
    regressed, undecided = [], []
    for name, medians in guards.items():
        if len(medians) < 2:
            undecided.append(f"guard {name}: measured by {len(medians)} processes")
            continue
        guard = summarise(medians)
        effect, lower, upper = (float(bound) for bound in (guard.effect, guard.lower, guard.upper))
        text = f"guard {name}: {effect:+.2%} [{lower:+.2%}, {upper:+.2%}]; allowed {rule.guard_limit:.1%}"
        if upper < rule.guard_limit:
            regressed.append(text)
        elif not lower > rule.guard_limit:
            undecided.append(text)
    return regressed, undecided


def _memory(peak_ratio: float | None, rule: Rule) -> tuple[str, ...]:
    if peak_ratio is None:
        return ("peak memory was not measured",)
    if not peak_ratio <= rule.memory_limit:
        return (f"peak memory is {peak_ratio:.3f} of the baseline's; at most {rule.memory_limit:.3f}",)
    return ()


def _target(target: Interval, rule: Rule) -> tuple[str, ...]:
    effect, lower, upper = float(target.effect), float(target.lower), float(target.upper)
    return (
        f"effect {effect:+.2%} [{lower:+.2%}, {upper:+.2%}]; needs {rule.min_effect:.1%} and a lower bound above 0",
        f"{int(target.num_positive)} of {target.count} processes positive; needs {target.count - 1}",
    )
