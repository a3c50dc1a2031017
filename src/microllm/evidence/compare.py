"""Pair two traces site by site, judge each pair by a stated limit, and name the first site at fault.

Place: ``lab/align`` and tests give it a candidate's trace, the reference's (fp32), and for a low-precision candidate
the reference's own trace in that precision. Does not run models, and does not compare logits by meaning
(``logits`` does). Source: the error triple is the policy of torch's ``same()`` (candidate's error against a multiple
of the reference's own), stated once for all sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import model_validator

from microllm.errors import EvidenceError
from microllm.evidence.tensor_statistics import ErrorStatistics, Record, error_statistics
from microllm.evidence.trace import ROOT, Key, Kind, Sites, TensorRecord, Trace, site_matcher

Status = Literal["pass", "missing", "shape_mismatch", "truncated", "numeric_mismatch", "non_finite"]
BLOCKS = ("layers.*",)
_FORWARD = ("input", "output")


class Gate(Record):
    """Fixed limits, for a candidate in the reference's own precision; a pair passes within both.

    ``relative_l2`` bounds an activation's error as a whole and in the mean over its rows (tokens).
    A pair that differs by no more than ``negligible_abs`` passes whatever its relative error: for tensors that are
    zero but for rounding (the gradient of a K bias).

    Raises:
        ValueError: no limit is finite, which would pass anything.
    """

    max_abs: float = math.inf
    relative_l2: float = math.inf
    negligible_abs: float = 0.0

    @model_validator(mode="after")
    def _limits_something(self) -> Gate:
        if not (min(self.max_abs, self.relative_l2) < math.inf):
            raise ValueError("got a gate without a limit; need max_abs or relative_l2")
        return self


class TripleRule(Record):
    """Limit from a triple: err(candidate, R32) ≤ factor · err(R low, R32) + floor, err being relative L2.

    Numbers: of activations err is the mean over rows (tokens): where a first token is a thousand times the others'
        size, the error of the whole tensor is one rounding's luck and hides the others. Tensors under
        ``small_numel`` elements get ``small_factor``: few rounding errors do not average out
    """

    factor: float = 1.5
    small_factor: float = 2.5
    small_numel: int = 500
    floor: float = 1e-5

    def limit(self, reference_error: float, numel: int) -> float:
        """Return the largest relative L2 that passes."""
        factor = self.small_factor if numel < self.small_numel else self.factor
        return factor * reference_error + self.floor


class SiteComparison(Record):
    """One pair: its status, its error, the reference's own low-precision error (triple) and the limits."""

    kind: Kind
    site: str
    occurrence: int
    status: Status
    shape: tuple[int, ...]
    detail: str = ""
    error: ErrorStatistics | None = None
    reference_error: ErrorStatistics | None = None
    relative_l2_limit: float = math.inf
    max_abs_limit: float = math.inf


class Fault(Record):
    """The first site at fault in dataflow order: its layer, then the substage inside that layer.

    ``substage`` is the innermost recorded module whose input agrees while its result does not. ``kind`` "input" at
    ``seen_at`` says that the substage's own code, before it calls ``seen_at``, is wrong.
    """

    layer: str
    substage: str
    seen_at: str
    kind: Kind
    occurrence: int
    status: Status
    description: str


class TraceComparison(Record):
    """Every pair in the reference's dataflow order, and the first fault; passes iff every pair does."""

    mode: Literal["gate", "triple"]
    rows: tuple[SiteComparison, ...]
    fault: Fault | None

    @property
    def passed(self) -> bool:
        """Whether there were pairs and all of them passed."""
        return bool(self.rows) and all(row.status == "pass" for row in self.rows)

    def counts(self) -> dict[str, int]:
        """Return how many pairs have each status that occurs."""
        statuses = [row.status for row in self.rows]
        return {status: statuses.count(status) for status in sorted(set(statuses))}

    def layers(self, blocks: Sites = BLOCKS) -> tuple[SiteComparison, ...]:
        """Return the outputs of whole blocks: the per-layer error curve."""
        matches = site_matcher(blocks)
        return tuple(row for row in self.rows if row.kind == "output" and matches(row.site))


def compare_traces(
    candidate: Trace,
    reference: Trace,
    *,
    low: Trace | None = None,
    gate: Gate = Gate(relative_l2=1e-5),  # noqa: B008  frozen
    rule: TripleRule = TripleRule(),  # noqa: B008  frozen
    sites: Sites = None,
    blocks: Sites = BLOCKS,
    allow_truncated: bool = False,
) -> TraceComparison:
    """Compare by (kind, site, occurrence): by the triple's ``rule`` if ``low`` is given, else by ``gate``.

    A pair that only one side has is ``missing`` and fails: choose ``sites`` that both models have. A pair of which
    not every element was kept is ``truncated`` and fails, unless ``allow_truncated`` judges what was kept.

    Raises:
        EvidenceError: nothing is left to compare, or only one of ``candidate`` and ``low`` was teacher-forced.
    """
    if low is not None and low.teacher_forced != candidate.teacher_forced:
        raise EvidenceError(
            f"got teacher_forced={candidate.teacher_forced} for the candidate and {low.teacher_forced} for the "
            "low-precision reference; need both in one mode; record the latter again"
        )
    matches = site_matcher(sites)
    pairs, known, lows = _by_key(candidate), _by_key(reference), _by_key(low) if low is not None else None
    rows: list[SiteComparison] = []
    for record in (r for r in reference.records if matches(r.site)):
        other = pairs.get(record.key)
        if other is None:
            rows.append(_row(record, "missing", "not in the candidate"))
        elif lows is not None and record.key not in lows:
            rows.append(_row(record, "missing", "not in the low-precision reference"))
        else:
            own = lows[record.key] if lows is not None else None
            rows.append(_judge(other, record, own, gate, rule, allow_truncated=allow_truncated))
    extra = (r for r in candidate.records if matches(r.site) and r.key not in known)
    rows.extend(_row(record, "missing", "not in the reference") for record in extra)
    if not rows:
        raise EvidenceError(f"got sites {sites!r}, which no record matches; need at least one pair")
    mode: Literal["gate", "triple"] = "gate" if low is None else "triple"
    return TraceComparison(mode=mode, rows=tuple(rows), fault=first_fault(rows, blocks))


def first_fault(rows: Iterable[SiteComparison], blocks: Sites = BLOCKS) -> Fault | None:
    """Return the first disagreement among rows in dataflow order, or None.

    A module's input is recorded before what runs inside it and its output after, so the first bad output has a good
    input and good submodules, and the first bad input was spoilt by the code of the module around it. Forward rows
    are looked at first; if they all agree, the first bad gradient, parameter or optimizer tensor is named.
    """
    rows = list(rows)
    bad = [row for row in rows if row.status in ("numeric_mismatch", "non_finite", "shape_mismatch")]
    row = next((r for r in bad if r.kind in _FORWARD), bad[0] if bad else None)
    if row is None:
        return None
    layer, substage = _layer(row.site, blocks), row.site
    where = f"{row.kind} of {row.site}" + (f" (call {row.occurrence + 1})" if row.occurrence else "")
    if row.kind == "input":
        substage = _enclosing(row.site, {r.site for r in rows})
        if substage == ROOT and row.site == layer:
            layer = ROOT  # the code between the blocks
        elif substage == ROOT:
            substage = layer
        where += f", made by {substage} itself,"
    return _fault(row, layer, substage, f"{layer}: {where} is the first at fault: {row.detail}")


def first_non_finite(trace: Trace, blocks: Sites = BLOCKS) -> Fault | None:
    """Return the innermost first site whose input is finite and whose output is not; any ``keep`` will do."""
    inputs = {(r.site, r.occurrence): r for r in trace.records if r.kind == "input"}
    for record in trace.records:
        if record.kind != "output" or record.statistics.all_finite:
            continue
        given = inputs.get((record.site, record.occurrence))
        if given is None or given.statistics.all_finite:
            whole, layer = record.statistics.numel, _layer(record.site, blocks)
            detail = f"{whole - record.statistics.finite_count} of {whole} elements are NaN or infinite"
            row = _row(record, "non_finite", detail)
            return _fault(row, layer, record.site, f"{layer}: output of {record.site}, from finite input: {detail}")
    return None


def _fault(row: SiteComparison, layer: str, substage: str, description: str) -> Fault:
    return Fault(
        layer=layer, substage=substage, seen_at=row.site, kind=row.kind, occurrence=row.occurrence, status=row.status,
        description=description,
    )  # fmt: skip


def _by_key(trace: Trace) -> dict[Key, TensorRecord]:
    return {record.key: record for record in trace.records}


def _row(record: TensorRecord, status: Status, detail: str) -> SiteComparison:
    return SiteComparison(
        kind=record.kind, site=record.site, occurrence=record.occurrence, status=status, shape=record.shape,
        detail=detail,
    )  # fmt: skip


def _judge(
    candidate: TensorRecord,
    reference: TensorRecord,
    low: TensorRecord | None,
    gate: Gate,
    rule: TripleRule,
    *,
    allow_truncated: bool,
) -> SiteComparison:
    """Judge one pair: by ``rule`` if the low-precision record is given, else by ``gate``."""
    for record in (candidate, low) if low is not None else (candidate,):
        obstacle = _obstacle(record, reference, allow_truncated=allow_truncated)
        if obstacle is not None:
            return _row(reference, *obstacle)
    error, own = _error(candidate, reference), None
    limit_l2, limit_abs = gate.relative_l2, gate.max_abs
    if low is not None:
        own = _error(low, reference)
        limit_l2, limit_abs = rule.limit(_judged(own, reference), own.numel), math.inf
    judged = _judged(error, reference) if low is not None else max(_judged(error, reference), error.relative_l2)
    within = judged <= limit_l2 and error.max_abs <= limit_abs
    if error.special_mismatches:
        status = "non_finite"
        detail = f"{error.special_mismatches} elements differ in being finite, first {error.first_special_index}"
    else:
        status = "pass" if within or error.max_abs <= gate.negligible_abs else "numeric_mismatch"
        detail = (
            f"relative L2 {judged:.2e} (limit {limit_l2:.2e}), "
            f"max abs {error.max_abs:.2e} (limit {limit_abs:.2e}) at {error.worst_index}"
        )
    found = {"error": error, "reference_error": own, "relative_l2_limit": limit_l2, "max_abs_limit": limit_abs}
    return _row(reference, status, detail).model_copy(update=found)


def _judged(error: ErrorStatistics, record: TensorRecord) -> float:
    """Return the error that is held against the limit: activations by row, so that each token counts alike."""
    return error.row_relative_l2 if record.kind in _FORWARD else error.relative_l2


def _obstacle(record: TensorRecord, reference: TensorRecord, *, allow_truncated: bool) -> tuple[Status, str] | None:
    """Return why the two cannot be compared element by element, or None."""
    if record.shape != reference.shape:
        return "shape_mismatch", f"got shape {record.shape}, the reference has {reference.shape}"
    if record.complete and reference.complete:
        return None
    if record.statistics.finite_count != reference.statistics.finite_count:
        lost = reference.statistics.finite_count - record.statistics.finite_count
        return "non_finite", f"{lost} more elements are NaN or infinite than in the reference"
    kept = [values.shape for values in (record.values, reference.values) if values is not None]
    if allow_truncated and len(kept) == 2 and kept[0] == kept[1]:
        return None
    return "truncated", "not every element was kept; record with keep='whole'"


def _error(record: TensorRecord, reference: TensorRecord) -> ErrorStatistics:
    assert record.values is not None
    assert reference.values is not None
    return error_statistics(record.values, reference.values)


def _enclosing(site: str, sites: set[str]) -> str:
    """Return the nearest recorded module around a site."""
    parts = site.split(".")
    above = (".".join(parts[:size]) for size in range(len(parts) - 1, 0, -1))
    return next((name for name in above if name in sites), ROOT)


def _layer(site: str, blocks: Sites) -> str:
    """Return the block that a site lies in; outside of blocks, its first part."""
    matches, parts = site_matcher(blocks), site.split(".")
    above = (".".join(parts[:size]) for size in range(1, len(parts) + 1))
    return next((name for name in above if matches(name)), parts[0])
