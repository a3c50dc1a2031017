"""From an experiment's records to its verdict: a pure reading of files, so that anybody can recompute it.

Place: between ``record`` (raw) and ``evidence/verdict`` (the rule). ``validate`` recomputes with the same function.

    a session that is invalid, crashed, quick or blocked decides nothing; a later one may
    a discard is final; a keep waits for one session more of the same files, begun 30 minutes later or more, and that
    one is final
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from microllm.errors import EvidenceError
from microllm.evidence.environment import capture_environment
from microllm.evidence.journal import canonical_json, finite_json, write_atomic
from microllm.evidence.receipt import append_receipt
from microllm.evidence.verdict import CONFIRMATION_GAP_S, Measured, Verdict, confirm, judge
from microllm.lab.contract import Contract, read_contract
from microllm.lab.record import RawRow, Records, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict so far, each session's own, and whether another session may still change it."""

    verdict: Verdict
    sessions: tuple[Verdict, ...]
    final: bool
    kept_at: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``verdict.json`` holds, as JSON data."""
        body = finite_json({name: value for name, value in asdict(self).items() if name != "kept_at"})
        assert isinstance(body, dict)
        return body


def measured(session: Session, contract: Contract) -> Measured:
    """Reduce a session's raw rows to what the rule reads."""
    first, target = session.bodies[0], contract.workloads[0].name
    medians: dict[str, list[float]] = {workload.name: [] for workload in contract.workloads}
    control: list[float] = []
    ratios: list[float | None] = []
    problems: list[str] = []
    crashes = [body.crash for body in session.bodies if body.crash]
    if any(body.sources != first.sources for body in session.bodies):
        problems.append("its Python files changed before its extension")
    for row in session.rows:
        if row.timing is None:
            crashes.append(f"process {row.process}: {row.error}")
            continue
        if row.workload not in medians:
            raise EvidenceError(f"got a row of workload {row.workload!r}; need one of the contract's; restore it")
        medians[row.workload].append(row.timing.median)
        if row.workload == target and row.timing.control_rounds:
            control.append(row.timing.control_median)
        ratios.append(_peak_ratio(row))
        found = {*row.timing.problems, *(row.preflight.problems if row.preflight else ())}
        found |= set() if row.parity == "pass" else {f"after the timing: {row.parity}"}
        problems += [f"process {row.process}, {row.workload}: {text}" for text in sorted(found)]
    known = [ratio for ratio in ratios if ratio is not None]
    return Measured(
        medians=medians.pop(target), control=control, guards=medians,
        gates_pass=all(body.gates_pass for body in session.bodies),
        peak_ratio=max(known) if known and len(known) == len(ratios) else None,
        process_sd=first.process_sd, quick=first.quick, crash="; ".join(crashes), invalid=tuple(problems),
    )  # fmt: skip


def judge_sessions(contract: Contract, sessions: Sequence[Session]) -> Judgement:
    """Return the judgement that an experiment's sessions amount to."""
    verdicts: list[Verdict] = []
    current = Verdict(status="inconclusive", reasons=("nothing was run yet",))
    kept: tuple[Verdict, str, dict[str, str]] | None = None
    for session in sessions:
        found = judge(measured(session, contract), contract.rule)
        verdicts.append(found)
        if kept is None:
            current = found
            if found.status == "keep":
                kept = found, max(row.started for row in session.rows), session.bodies[0].sources
                current = replace(found, reasons=("kept once; not confirmed yet", *found.reasons))
            elif found.status == "discard":
                return Judgement(verdict=found, sessions=tuple(verdicts), final=True)
        elif session.bodies[0].sources == kept[2] and (found.status in ("keep", "discard") or found.extend):
            gap = _seconds_between(kept[1], session)
            if gap >= CONFIRMATION_GAP_S:
                current = confirm(kept[0], found, gap)
                if not found.extend:
                    return Judgement(verdict=current, sessions=tuple(verdicts), final=True)
    return Judgement(verdict=current, sessions=tuple(verdicts), final=False, kept_at=kept[1] if kept else None)


def recompute(directory: Path) -> Judgement:
    """Return the judgement that an experiment's records give; a baseline states a score and is compared to none."""
    contract, records = read_contract(directory), Records(directory)
    if contract.kind == "experiment":
        return judge_sessions(contract, records.sessions())
    ran = bool(records.receipts("baseline"))
    verdict = Verdict(status="baseline", reasons=("a track's start" if ran else "nothing was run yet",))
    return Judgement(verdict=verdict, sessions=(), final=ran)


def judge_experiment(directory: Path) -> Judgement:
    """Compute the verdict of an experiment, write ``verdict.json`` and seal it with a receipt if it is new."""
    records, judgement = Records(directory), recompute(directory)
    body = judgement.to_json()
    sealed = records.receipts("verdict")
    if not sealed or sealed[-1].body != body:
        environment = capture_environment("cpu", repository=directory)
        sealed.append(append_receipt(records.receipts_path, "verdict", body, environment, genesis=records.genesis))
    write_atomic(directory / "verdict.json", canonical_json({**body, "receipt": sealed[-1].digest}) + "\n")
    return judgement


def _peak_ratio(row: RawRow) -> float | None:
    ours, theirs = row.candidate_peak_bytes, row.baseline_peak_bytes
    if ours is None or theirs is None:
        return None
    if theirs <= 0:
        return 1.0 if ours <= 0 else float("inf")
    return ours / theirs


def _seconds_between(earlier: str, session: Session) -> float:
    later = min(row.started for row in session.rows)
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
