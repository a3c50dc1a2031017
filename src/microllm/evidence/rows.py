"""Benchmark rows: one model, one writer, one reader, and the tables made from them.

Place: every ``bench`` writes them under the repository's ``lab/rows``; README and docs show them between
``<!-- table:NAME -->`` and ``<!-- /table -->``. A failed row stays as data. Does not measure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from microllm.errors import EvidenceError
from microllm.evidence.environment import Environment
from microllm.evidence.journal import append_line, canonical_json, read_lines, sha256_hex
from microllm.evidence.receipt import now_utc
from microllm.evidence.tensor_statistics import Record

RowStatus = Literal[
    "pass", "precision_mismatch", "batch_invariance_mismatch", "limited", "oom", "unsupported", "unavailable", "invalid"
]
HIGHER_IS_BETTER: dict[str, bool] = {
    "tok/s": True, "req/s": True, "step/s": True, "TFLOPS": True, "GB/s": True, "TB/s": True, "x": True,
    "s": False, "ms": False, "us": False, "bytes": False, "MiB": False, "GiB": False,
}  # fmt: skip
"""Every unit a row may have, and which way is better: ratios above 1 always mean that ours is."""
QUALITY_FILE = "quality.jsonl"
"""The one file beside the rows whose lines are no rows: receipts of the quality gate (``lab/quality``)."""
_MARK = re.compile(r"(^<!-- table:([\w-]+) -->\n)((?:(?!^<!-- table:).)*?)(^<!-- /table -->)", re.DOTALL | re.MULTILINE)
_OPENING = re.compile(r"^<!-- table:.*", re.MULTILINE)


class Row(Record):
    """One workload against one peer and the limit measured in the same run.

    The ratios are computed: ``ratio_peer`` > 1 means that ours is better, ``ratio_limit`` is the share of the limit
    that ours reaches (above 1 the row is ``invalid``). ``parity`` is "pass" or why not; without it there is no speed.
    ``figures`` are what a benchmark saw besides, by names that end in their units; a row without any is written as
    before there were some.
    Units:   ``ours``, ``peer`` and ``limit`` in ``unit``
    """

    target: str
    workload: str
    device: str
    dtype: str
    ours: float | None = None
    peer_name: str | None = None
    peer: float | None = None
    limit: float | None = None
    unit: str
    ratio_peer: float | None = None
    ratio_limit: float | None = None
    num_forwards: int | None = None
    peak_bytes: int | None = None
    peer_peak_bytes: int | None = None
    parity: str
    figures: dict[str, float] | None = None
    status: RowStatus = "pass"
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    digest: str = ""

    @model_validator(mode="after")
    def _complete(self) -> Row:
        """Compute the ratios; a speed above its limit makes the row invalid, failed parity a mismatch."""
        if self.unit not in HIGHER_IS_BETTER:
            raise EvidenceError(f"got unit {self.unit!r}; need one of {', '.join(HIGHER_IS_BETTER)}")
        numbers = [value for value in (self.ours, self.peer, self.limit) if value is not None]
        if not all(0 < value < float("inf") for value in numbers):
            raise EvidenceError(f"got figures {numbers}; need finite numbers above 0, or None")
        if self.parity != "pass" and self.ours is not None:
            raise EvidenceError(
                f"got a speed although parity says {self.parity!r}; need ours=None: no parity, no speed"
            )
        computed: dict[str, Any] = {}
        for name, other in (("ratio_peer", self.peer), ("ratio_limit", self.limit)):
            given, ratio = getattr(self, name), _ratio(self.ours, other, self.unit)
            if given is not None and (ratio is None or not abs(given - ratio) <= 1e-9 * ratio):
                raise EvidenceError(f"got {name} {given}; it computes to {ratio}; leave it out")
            computed[name] = ratio
        if self.parity != "pass" and self.status == "pass":
            computed["status"] = "precision_mismatch"
        elif self.status == "pass" and self.ours is None:
            raise EvidenceError("got a row that passes without a figure; need ours, or a status that says why not")
        if (computed["ratio_limit"] or 0) > 1:
            computed["status"] = "invalid"
        for name, value in computed.items():
            object.__setattr__(self, name, value)  # the model is frozen: this is its construction
        return self

    @model_serializer(mode="wrap")
    def _without_empty_figures(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        if content["figures"] is None:
            del content["figures"]
        return content

    def compute_digest(self) -> str:
        """Return the sha256 of everything in the row but its digest."""
        content = self.model_dump(mode="json")
        del content["digest"]
        return sha256_hex(canonical_json(content))


def environment_fields(environment: Environment) -> dict[str, Any]:
    """Return the fields of a row that say where, with what and when it was measured."""
    return {
        "device": environment.device_name,
        "versions": environment.versions,
        "commit": environment.commit + ("+changes" if environment.dirty else ""),
        "command": " ".join(environment.command),
        "date": now_utc(),
    }


def write_row(path: Path, row: Row) -> Row:
    """Append ``row`` to ``path`` under its digest and return it so."""
    sealed = row.model_copy(update={"digest": row.compute_digest()})
    append_line(path, lambda _: canonical_json(sealed.model_dump(mode="json")))
    return sealed


def parse_row(line: str) -> Row:
    """Read one row.

    Raises:
        EvidenceError: it does not fit its model or its digest.
    """
    try:
        row = Row.model_validate_json(line)
    except ValidationError as error:
        raise EvidenceError(f"got a line that is no benchmark row: {error}; restore it") from error
    if row.digest != row.compute_digest() or line != canonical_json(row.model_dump(mode="json")):
        raise EvidenceError("got a row that is not as its digest says; restore it")
    return row


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, or of all ``*.jsonl`` in a folder but the quality receipts, in order.

    Raises:
        EvidenceError: a row does not fit its model or its digest; the text names file and line.
    """
    rows = []
    files = [file for file in sorted(path.glob("*.jsonl")) if file.name != QUALITY_FILE] if path.is_dir() else [path]
    for file in files:
        for number, line in enumerate(read_lines(file), 1):
            try:
                rows.append(parse_row(line))
            except EvidenceError as error:
                raise EvidenceError(f"{file}:{number}: {error}") from error
    return rows


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each target, workload, peer, device and dtype, in order of first appearance."""
    latest: dict[tuple[str | None, ...], Row] = {}
    for row in rows:
        latest[row.target, row.workload, row.peer_name, row.device, row.dtype, row.unit] = row
    return list(latest.values())


def rows_table(rows: Iterable[Row]) -> str:
    """Return the latest rows as a Markdown table."""
    columns = (
        "target", "workload", "device", "dtype", "ours", "peer", "ours / peer", "of limit", "status", "commit"
    )  # fmt: skip
    cells = []
    for row in latest_rows(rows):
        cells.append((
            row.target, row.workload, row.device, row.dtype, _figure(row.ours, row.unit),
            f"{row.peer_name}: {_figure(row.peer, row.unit)}" if row.peer_name else "—",
            "—" if row.ratio_peer is None else f"{row.ratio_peer:.2f}",
            "—" if row.ratio_limit is None else f"{row.ratio_limit:.2f}",
            row.status if row.parity == "pass" else f"{row.status}: {row.parity}", row.commit[:8],
        ))  # fmt: skip
    return markdown_table(columns, cells)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with a line break at its end; no cell can end its line, the cell or the table."""
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = [[" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def fill_tables(text: str, tables: Mapping[str, str]) -> str:
    """Return ``text`` with each marked table replaced by the current one.

    Raises:
        EvidenceError: a mark names a table that there is not, or is not closed.
    """
    marked = [match[1].strip() for match in _MARK.finditer(text)]
    if unclosed := [mark for mark in _OPENING.findall(text) if mark not in marked]:
        raise EvidenceError(f"got {unclosed[0]} without its end; need a line <!-- /table --> after it")

    def replace(match: re.Match[str]) -> str:
        name = match[2]
        if name not in tables:
            raise EvidenceError(f"got a mark for table {name!r}; need one of {', '.join(sorted(tables))}")
        return f"{match[1]}{tables[name]}{match[4]}"

    return _MARK.sub(replace, text)


def _ratio(ours: float | None, other: float | None, unit: str) -> float | None:
    if ours is None or other is None:
        return None
    return ours / other if HIGHER_IS_BETTER[unit] else other / ours


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"
