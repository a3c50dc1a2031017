"""Run compute-sanitizer over a small case of every kernel on a GPU, and write what it found as JSON.

    python tools/sanitize.py --out sanitizer.json          memcheck and racecheck, all operators that have a kernel
    python tools/sanitize.py --run rms_norm rope           the cases alone, with no sanitizer: what is sanitized

All operators run in one process for each tool, since a process takes seconds to start; only when a tool reports
something does each operator get a process of its own, to say whose it is. Exit status 1 when anything is found.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from microllm import ops

TOOLS = ("memcheck", "racecheck")
ERRORS = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) ")


def with_kernels() -> list[str]:
    """Return the operators that have a kernel."""
    return [name for name, row in ops.CONTRACTS.items() if "triton" in row.levels["cuda"]]


def run_cases(names: Sequence[str]) -> None:
    """Run the first two examples of each operator, in bf16 where it takes that."""
    for name in names:
        row = ops.CONTRACTS[name]
        dtype = torch.bfloat16 if torch.bfloat16 in row.forward else torch.float32
        for sizes in row.sizes[:2]:
            values = [_moved(value) for value in row.example(sizes, dtype).values()]
            with ops.use("triton", name):
                ops.OPERATORS[name](*values)
        torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


def _moved(value: object) -> object:
    if isinstance(value, list):
        return [_moved(v) for v in value]
    return value.cuda() if isinstance(value, torch.Tensor) else value


def sanitize(tool: str, names: Sequence[str]) -> tuple[int | None, str]:
    """Return how many errors a tool found in a process that runs ``names`` (None: it did not finish), and its text."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, __file__, "--run", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    found = ERRORS.search(text)
    finished = all(f"ran {name}\n" in text for name in names)
    return (int(found[1]) if found and finished else None), text


def report(names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return, by tool and operator, the number of errors, and the end of the text where there were any."""
    found: dict[str, dict[str, object]] = {}
    for tool in TOOLS:
        errors, _ = sanitize(tool, names)
        found[tool] = {name: {"errors": 0} for name in names}
        for name in names if errors != 0 else ():
            errors, text = sanitize(tool, [name])
            found[tool][name] = {"errors": errors} if errors == 0 else {"errors": errors, "text": text[-4000:]}
    return found


def main() -> int:
    """Run the sanitizer, or the cases alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", metavar="OPERATOR", help="run these operators' cases and nothing else")
    parser.add_argument("--out", type=Path, default=Path("sanitizer.json"), help="where the summary goes")
    options = parser.parse_args()
    if options.run:
        run_cases(options.run)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("got no compute-sanitizer; need CUDA's toolkit on the PATH; install it", file=sys.stderr)
        return 2
    found = report(with_kernels())
    bad = {f"{tool} {name}" for tool, rows in found.items() for name, row in rows.items() if row != {"errors": 0}}
    summary = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "clean": not bad, "tools": found,
    }  # fmt: skip
    options.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found['memcheck'])} operators, {', '.join(TOOLS)}: {'; '.join(sorted(bad)) or 'clean'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
