"""``microllm tune``: better blocks for a kernel on this GPU, found within the contract and recorded by environment."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from microllm.lab.tune_config import TuneConfig

if TYPE_CHECKING:
    from microllm.lab.tune import Search


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Find faster blocks for a kernel on this GPU: contract first, then timing in pairs against today's choice.

    Tune one matrix at two numbers of rows, look at the report, and then let the winners in:

    microllm tune --op linear --shape "M1 K896 N4864" "M8 K896 N4864" --out tune.json

    microllm tune --op linear --shape "M1 K896 N4864" "M8 K896 N4864" --accept

    A candidate that does not keep the operator's contract is never timed. Accepted entries count for this device, this
    torch and triton and these kernels' source alone; microllm doctor and the report say which entries are not used.
    """

    config: TuneConfig = field(default_factory=TuneConfig)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="Print the report as JSON instead of a table.")] = False

    def run(self) -> int:
        """Print what was found; 0 whether anything won or not."""
        self.config.check()
        from microllm.lab.tune import tune

        report = tune(self.config, _progress)
        if self.as_json:
            print(report.model_dump_json())
            return 0
        for found in report.searches:
            print(_line(found))
        for text in report.ignored:
            print(f"not used: {text}")
        print(f"every candidate is in {self.config.out}")
        return 0


def _line(found: Search) -> str:
    rejected = sum(one.outcome == "rejected" for one in found.attempts)
    best = next((one for one in found.attempts if one.screened), None)
    counts = f"{found.workload}: {len(found.attempts)} candidates, {rejected} rejected"
    if found.winner is not None and best is not None:
        state = "accepted" if found.accepted else "run again with --accept to use it"
        return f"{counts}; {found.winner} is {min(best.confirmed):.3f} x as fast; {state}"
    if best is None:
        return f"{counts}; none was timed"
    shown = ", ".join(f"{ratio:.3f}" for ratio in best.confirmed or best.screened)
    return f"{counts}; none wins: the best, {best.choice}, is {shown} x as fast; {best.why or 'screened only'}"


def _progress(text: str) -> None:
    """Show one line at a time on a terminal, and nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r", file=sys.stderr, flush=True)
