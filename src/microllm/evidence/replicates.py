"""Fresh processes that each measure once: the process is the unit that a verdict counts.

Place: starts what ``timing`` runs in, and the peers of a benchmark. A process's last line of standard output is its
result, one JSON object. Does not interpret it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """What one process gave: its JSON object, or why there is none.

    Units:   ``seconds`` from start to end of the process
    """

    command: tuple[str, ...]
    returncode: int | None
    seconds: float
    result: dict[str, Any] | None
    error: str

    @property
    def crashed(self) -> bool:
        """Return whether the process gave no result."""
        return self.result is None


def run_replicate(arguments: Sequence[str], *, timeout_s: float = 900.0) -> Replicate:
    """Run ``python *arguments`` to its end and read the JSON object in its last line of output."""
    command = (sys.executable, *arguments)
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        returncode, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        returncode, output, errors = None, "", f"no answer after {timeout_s} s"
    result, error = None, ""
    if returncode == 0:
        try:
            result = json.loads(output.strip().splitlines()[-1])
        except (IndexError, ValueError):
            error = f"its last line of output is not JSON: {output[-300:]!r}"
        if result is not None and not isinstance(result, dict):
            result, error = None, f"its last line of output is no JSON object: {output[-300:]!r}"
    else:
        error = f"exit code {returncode}: {errors[-2000:]}"
    return Replicate(
        command=command,
        returncode=returncode,
        seconds=time.monotonic() - started,
        result=result,
        error=error,
    )


def run_replicates(arguments: Sequence[Sequence[str]], *, timeout_s: float = 900.0) -> list[Replicate]:
    """Run one process after another, one for each list of arguments to Python."""
    return [run_replicate(each, timeout_s=timeout_s) for each in arguments]
