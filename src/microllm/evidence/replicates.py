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
    seconds: float
    result: dict[str, Any] | None
    error: str = ""


def run_replicate(arguments: Sequence[str], *, timeout_s: float = 900.0) -> Replicate:
    """Run ``python *arguments`` and read the JSON object in its last line of output."""
    command, started = (sys.executable, *arguments), time.monotonic()
    result, error, output = None, "", ""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, check=False
        )  # fmt: skip
        output = done.stdout
        if done.returncode:
            error = f"exit code {done.returncode}: {done.stderr[-2000:]}"
        else:
            result = json.loads(output.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        error = f"no answer after {timeout_s} s"
    except (IndexError, ValueError, RecursionError):
        error = f"its last line of output is not JSON: {output[-300:]!r}"
    if not error and not isinstance(result, dict):
        result, error = None, "its last line of output is no JSON object"
    return Replicate(command=command, seconds=time.monotonic() - started, result=result, error=error)
