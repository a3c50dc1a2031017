"""Receipts: what was measured, on what, with what verdict, under one digest, chained to the receipt before.

Place: the lab appends one for each session and each verdict; structures for each attach. ``verify_chain`` recomputes
everything. A file holds one receipt a line as canonical JSON, so that any changed byte is caught, also one that JSON
would not mind. Does not decide what a body holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from microllm.errors import EvidenceError
from microllm.evidence.environment import Environment
from microllm.evidence.journal import append_line, canonical_json, finite_json, read_lines, sha256_hex
from microllm.evidence.tensor_statistics import Record

GENESIS = "0" * 64


class Receipt(Record):
    """One link: ``digest`` is the sha256 over the canonical JSON of every other field, ``previous`` included."""

    version: Literal[1] = 1
    kind: str
    created: str
    environment: Environment
    body: dict[str, Any]
    previous: str
    digest: str = ""

    def compute_digest(self) -> str:
        """Return the digest that this receipt's content has."""
        content = self.model_dump(mode="json")
        del content["digest"]
        return sha256_hex(canonical_json(content))

    def line(self) -> str:
        """Return the receipt's one text."""
        return canonical_json(self.model_dump(mode="json"))


def now_utc() -> str:
    """Return the time of day as every record writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def make_receipt(kind: str, body: dict[str, Any], environment: Environment, previous: str = GENESIS) -> Receipt:
    """Return a sealed receipt that follows the one whose digest is ``previous``."""
    clean = finite_json(body)
    assert isinstance(clean, dict)
    unsealed = Receipt(kind=kind, created=now_utc(), environment=environment, body=clean, previous=previous)
    return unsealed.model_copy(update={"digest": unsealed.compute_digest()})


def append_receipt(
    path: Path, kind: str, body: dict[str, Any], environment: Environment, genesis: str = GENESIS
) -> Receipt:
    """Append a receipt to the chain in ``path``, whose first link follows ``genesis``."""
    made: list[Receipt] = []

    def make_line(last: str | None) -> str:
        previous = genesis if last is None else parse_receipt(last).digest
        made.append(make_receipt(kind, body, environment, previous))
        return made[0].line()

    append_line(path, make_line)
    return made[0]


def parse_receipt(line: str) -> Receipt:
    """Read one receipt; does not verify it.

    Raises:
        EvidenceError: it is no receipt.
    """
    try:
        return Receipt.model_validate_json(line)
    except ValidationError as error:
        raise EvidenceError(f"got a line that is no receipt; need one made by this package: {error}") from error


def read_receipts(path: Path) -> list[Receipt]:
    """Return the receipts of a chain in order; does not verify them."""
    return [parse_receipt(line) for line in read_lines(path)]


def verify_chain(lines: Sequence[str], genesis: str = GENESIS) -> list[str]:
    """Return one sentence for each receipt that is not as it was sealed; empty if all are."""
    problems, previous = [], genesis
    for number, line in enumerate(lines, 1):
        where = f"receipt {number}"
        try:
            receipt = parse_receipt(line)
            if receipt.digest != receipt.compute_digest():
                problems.append(f"{where}: its content does not have its digest")
            elif line != canonical_json(json.loads(line)) or line != receipt.line():
                problems.append(f"{where}: its text is not the canonical one")
        except ValueError as error:  # also of an integer or a text that JSON has and Python does not
            problems.append(f"{where}: {str(error).splitlines()[0]}")
            continue
        if receipt.previous != previous:
            problems.append(f"{where}: it does not follow the receipt before it")
        previous = receipt.digest
    return problems
