"""The recorded A/A calibration of a machine: how far processes of the same code differ.

Place: ``tools/calibrate_timing.py`` writes it, the lab reads it, ``verdict`` refuses to decide above 0.4 %.
Plain dataclasses, so that a bare machine with torch alone can record one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from microllm.errors import EvidenceError
from microllm.evidence.environment import Environment
from microllm.evidence.journal import append_line, canonical_json, read_lines, sha256_hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A/A sessions of one device, and planted slowdowns that the rule had to find.

    ``num_disturbed`` counts the timings that the preflight or the clocks found fault with.

    Units:   ``process_sd`` in natural logarithms (0.004 reads as 0.4 %); ``round_s`` in seconds
    """

    device_name: str
    process_sd: float
    num_kept: int
    num_planted: int
    num_found: int
    medians: tuple[tuple[float, ...], ...]
    planted_medians: tuple[tuple[float, ...], ...]
    pairs: int
    round_s: float
    num_disturbed: int
    environment: dict[str, Any]
    date: str


def process_sd(medians: Sequence[Sequence[float]]) -> float:
    """Return the SD of per-process medians of d, pooled within A/A sessions (each of at least two processes)."""
    squares = sum(float(np.var(session)) * len(session) for session in medians)
    degrees = sum(len(session) - 1 for session in medians)
    if degrees < 1:
        raise EvidenceError("got no A/A session of two processes; need one to know how far processes differ")
    return math.sqrt(squares / degrees)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Append a calibration to the record in ``path``, under its digest."""
    body = asdict(calibration)
    append_line(path, lambda _: canonical_json({**body, "digest": sha256_hex(canonical_json(body))}))


def read_calibration(path: Path, environment: Environment) -> Calibration | None:
    """Return the latest calibration of the device that ``environment`` names, if one is recorded."""
    found = [parse_calibration(line) for line in read_lines(path)]
    return next((each for each in reversed(found) if each.device_name == environment.device_name), None)


def parse_calibration(line: str) -> Calibration:
    """Read one line of the record.

    Raises:
        EvidenceError: it is no calibration, is not as its digest says, or its process SD is not that of its medians.
    """
    try:
        body = json.loads(line)
        digest = body.pop("digest", "")
        calibration, own_sd = Calibration(**body), process_sd(body["medians"])
        whole = digest == sha256_hex(canonical_json(body)) and line == canonical_json({**body, "digest": digest})
        if not whole or not math.isclose(calibration.process_sd, own_sd, rel_tol=1e-9):
            raise EvidenceError("it is not as its digest, or its process SD not as its medians, say")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise EvidenceError(f"got a line that is no calibration: {error}; record it again") from error
    return calibration
