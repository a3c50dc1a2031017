"""Are the lab's records whole: every file fits its schema, every digest recomputes, every verdict follows.

Place: ``lab validate`` (schemas and relations; one table, no code for any single experiment) and ``lab verify``
(receipts and verdicts recomputed; with ``env`` also what has changed since on this machine). Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from microllm.errors import UnavailableError
from microllm.evidence.calibration import parse_calibration
from microllm.evidence.environment import capture_environment, environment_drift
from microllm.evidence.journal import canonical_json, read_lines
from microllm.evidence.receipt import parse_receipt, verify_chain
from microllm.evidence.rows import QUALITY_FILE
from microllm.evidence.rows import parse_row as parse_benchmark_row
from microllm.lab.contract import load_entry, read_contract
from microllm.lab.experiment import check_root, experiment_directories
from microllm.lab.judgement import recompute
from microllm.lab.quality import parse_quality_row
from microllm.lab.record import Records, parse_row

SEALED_LINES: dict[str, Callable[[str], object]] = {
    "rows/*.jsonl": parse_benchmark_row,
    f"rows/{QUALITY_FILE}": parse_quality_row,
    "calibrations.jsonl": parse_calibration,
}
"""Which reader each line of which file must get past, the last pattern that fits; of these each line has its digest."""
LINE_SCHEMAS: dict[str, Callable[[str], object]] = {
    "experiments/*/rows.jsonl": parse_row,
    "experiments/*/receipts.jsonl": parse_receipt,
    **SEALED_LINES,
}
"""The same for all files."""
UNREADABLE = (ValueError, ArithmeticError, LookupError, RecursionError, OSError)
"""What records that nobody should have written can end in; EvidenceError is a ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfig:
    """Where the records lie."""

    root: Path = Path("lab")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Where the records lie, and whether to list what has drifted on this machine."""

    root: Path = Path("lab")
    env: bool = False


def validate(config: ValidateConfig) -> list[str]:
    """Return one sentence for each record that does not fit its schema or its neighbours; empty if all do.

    Raises:
        EvidenceError: there is no such folder.
    """
    check_root(config.root)
    problems = list(_bad_lines(config.root, LINE_SCHEMAS))
    numbers: dict[str, Path] = {}
    for directory in sorted(path for path in (config.root / "experiments").glob("*") if path.is_dir()):
        problems += [f"{directory}: {text}" for text in _relations(directory)]
        if directory.name[:3] in numbers:
            problems.append(f"{directory}: its number is also that of {numbers[directory.name[:3]].name}")
        numbers[directory.name[:3]] = directory
    return problems


def _relations(directory: Path) -> Iterator[str]:
    try:
        contract = read_contract(directory)
        if contract.id != directory.name:
            yield f"its contract is that of {contract.id!r}"
        for entry in (contract.baseline, contract.candidate, contract.broken):
            if entry:
                load_entry(directory, entry)
        for session in Records(directory).sessions():
            for row in session.rows:
                if row.started < contract.created:
                    yield f"session {session.number} has a number from before the contract"
                if row.workload not in contract.track.workloads:
                    yield f"session {session.number} has workload {row.workload!r}, which the contract lacks"
    except UNREADABLE as error:
        yield _one_line(error)


def verify(config: VerifyConfig) -> list[str]:
    """Return one sentence for each receipt, row or verdict that does not recompute; empty if all do.

    With ``env`` the drift of the environment follows, each sentence beginning with "drift: ".

    Raises:
        EvidenceError: there is no such folder.
    """
    check_root(config.root)
    problems = list(_bad_lines(config.root, SEALED_LINES))
    for directory in experiment_directories(config.root):
        problems += [f"{directory}: {text}" for text in _recompute(directory)]
        if config.env:
            problems += [f"drift: {directory.name}: {text}" for text in _drift(directory)]
    return problems


def _recompute(directory: Path) -> Iterator[str]:
    records, path = Records(directory), directory / "verdict.json"
    try:
        broken = verify_chain(read_lines(records.receipts_path), records.genesis)
        yield from broken
        if broken:
            return
        if left := records.uncovered():
            yield f"{len(left)} rows are in no receipt (a run was killed, or they were added by hand); run it again"
        for last in records.bodies()[-1:]:
            if last.sources not in ({}, records.sources()):
                yield "its Python files are not those that the last session ran"
        body, sealed = recompute(directory).to_json(), records.receipts("verdict")
        if not path.exists():
            if records.receipts("session"):
                yield "it was run but has no verdict.json; run: microllm lab judge"
        elif not sealed or sealed[-1].body != body:
            yield "the last verdict's receipt is not what the rows give (nor is verdict.json, if it says otherwise)"
        elif path.read_bytes() != f"{canonical_json({**body, 'receipt': sealed[-1].digest})}\n".encode():
            yield "verdict.json is not what the rows give"
    except UNREADABLE as error:
        yield _one_line(error)


def _drift(directory: Path) -> Iterator[str]:
    for receipt in Records(directory).receipts("session")[-1:]:
        try:
            now = capture_environment(receipt.environment.device, repository=directory)
        except UnavailableError as error:
            yield f"device {receipt.environment.device!r} is not on this machine: {_one_line(error)}"
        else:
            yield from environment_drift(receipt.environment, now)


def _bad_lines(root: Path, schemas: Mapping[str, Callable[[str], object]]) -> Iterator[str]:
    found = {path: parse for pattern, parse in schemas.items() for path in sorted(root.glob(pattern))}
    for path, parse in found.items():
        if path.read_bytes()[-1:] not in (b"", b"\n"):
            yield f"{path}: its last line is torn"
        try:
            lines = read_lines(path)
        except UNREADABLE as error:
            yield _one_line(error)
            continue
        for number, line in enumerate(lines, 1):
            try:
                parse(line)
            except UNREADABLE as error:
                yield f"{path}:{number}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
