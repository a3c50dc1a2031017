"""The raw records of an experiment: rows beside the contract, sessions in the chain of receipts.

Place: ``experiment`` appends them, ``judgement`` and ``validate`` read them. A row that no session receipt names
(its run was killed) is kept and counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from microllm.errors import EvidenceError
from microllm.evidence.environment import Environment
from microllm.evidence.journal import append_line, canonical_json, read_lines, sha256_hex
from microllm.evidence.preflight import Preflight
from microllm.evidence.receipt import Receipt, append_receipt, read_receipts
from microllm.evidence.tensor_statistics import Record
from microllm.evidence.timing import PairedTiming


def _moment(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"got {text!r}; need a time with its zone")
    return text


class RawRow(Record):
    """One workload in one process: everything that was read off, and nothing concluded."""

    session: int
    process: int
    workload: str
    seed: int
    started: Annotated[str, AfterValidator(_moment)]
    pid: int
    status: Literal["ok", "crash"] = "ok"
    timing: PairedTiming | None = None
    preflight: Preflight | None = None
    baseline_peak_bytes: int | None = None
    candidate_peak_bytes: int | None = None
    parity: str = ""
    error: str = ""


class SessionBody(Record):
    """The body of a session's receipt: what was run and the digests of its rows, in order.

    ``gate`` holds the reports by workload, ``process_sd`` the calibration that the machine had. A session's
    extension has a receipt of its own under the same number. ``sources`` has the digests of the folder's Python files.
    ``interrupted`` covers the rows of a run that was killed.
    """

    session: int
    quick: bool
    gate: dict[str, list[dict[str, Any]]]
    gates_pass: bool
    process_sd: float | None
    rows: tuple[str, ...] = ()
    crash: str = ""
    sources: dict[str, str] = Field(default_factory=dict)
    interrupted: bool = False

    @classmethod
    def interruption(cls, rows: tuple[str, ...]) -> SessionBody:
        """Return the body that covers rows which a killed run left."""
        return cls(session=0, quick=False, gate={}, gates_pass=False, process_sd=None, rows=rows, interrupted=True)


@dataclass(slots=True, kw_only=True)
class Session:
    """A session put together from its receipts and rows."""

    number: int
    bodies: list[SessionBody] = field(default_factory=list)
    rows: list[RawRow] = field(default_factory=list)


class Records:
    """The files of one experiment's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rows_path = directory / "rows.jsonl"
        self.receipts_path = directory / "receipts.jsonl"

    @property
    def genesis(self) -> str:
        """Return what the chain starts from: the digest of the contract's bytes."""
        return sha256_hex((self.directory / "contract.json").read_bytes())

    def sources(self) -> dict[str, str]:
        """Return the digests of the Python files beside the contract."""
        return {path.name: sha256_hex(path.read_bytes()) for path in sorted(self.directory.glob("*.py"))}

    def append_row(self, row: RawRow) -> str:
        """Append a row and return its line's digest."""
        return sha256_hex(append_line(self.rows_path, lambda _: canonical_json(row.model_dump(mode="json"))))

    def append_session(self, body: SessionBody, environment: Environment) -> Receipt:
        """Seal a session's receipt."""
        return append_receipt(
            self.receipts_path, "session", body.model_dump(mode="json"), environment, genesis=self.genesis
        )

    def receipts(self, kind: str) -> list[Receipt]:
        """Return the receipts of one kind, in order."""
        return [receipt for receipt in read_receipts(self.receipts_path) if receipt.kind == kind]

    def bodies(self) -> list[SessionBody]:
        """Return what the receipts of the sessions say, in order.

        Raises:
            EvidenceError: a body does not fit.
        """
        try:
            return [SessionBody.model_validate(receipt.body) for receipt in self.receipts("session")]
        except ValidationError as error:
            raise EvidenceError(f"{self.receipts_path}: a session does not fit: {error}; restore it") from error

    def uncovered(self) -> list[str]:
        """Return the digests of the rows after the last one that a receipt names."""
        covered = sum(len(body.rows) for body in self.bodies())
        return [sha256_hex(line) for line in read_lines(self.rows_path)[covered:]]

    def sessions(self) -> list[Session]:
        """Return the sessions in order; rows of interrupted runs are left out.

        Raises:
            EvidenceError: a row is not the one that its receipt names.
        """
        lines = read_lines(self.rows_path)
        sessions: dict[int, Session] = {}
        at = 0
        for body in self.bodies():
            found, at = lines[at : at + len(body.rows)], at + len(body.rows)
            if [sha256_hex(line) for line in found] != list(body.rows):
                raise EvidenceError(f"{self.rows_path}: rows of session {body.session} are not those of its receipt")
            if body.interrupted:
                continue
            session = sessions.setdefault(body.session, Session(number=body.session))
            session.bodies.append(body)
            session.rows += [parse_row(line) for line in found]
        return list(sessions.values())


def parse_row(line: str) -> RawRow:
    """Read one raw row.

    Raises:
        EvidenceError: it does not fit the schema.
    """
    try:
        return RawRow.model_validate_json(line)
    except ValidationError as error:
        raise EvidenceError(f"got a line that is no raw row: {error}; restore it") from error
