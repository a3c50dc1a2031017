"""Record how well this machine can time: A/A sessions that must keep nothing, and planted slowdowns to be found.

    python tools/calibrate_timing.py --device cpu --share                       15 minutes
    python tools/calibrate_timing.py --device cuda --runs 3 --share --pairs 4   5 minutes

By default ten A/A sessions and five planted ones. A session is 6 fresh processes (12 where 6 leave it open); the
workload is 100 equal units, and a planted slowdown is one unit more: 1 % more work. The record, one JSON
line, holds the process SD that the lab's verdicts read. ``--share`` lets each process serve all sessions. Needs torch
and numpy only. Exits with 1 if a session of equal arms was kept or a planted slowdown was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from microllm.evidence.calibration import Calibration, process_sd, write_calibration
from microllm.evidence.environment import capture_environment
from microllm.evidence.preflight import check_machine
from microllm.evidence.replicates import run_replicate
from microllm.evidence.timing import FULL, QUICK, Action, TimingConfig, time_pairs
from microllm.evidence.verdict import MAX_PROCESS_SD, Measured, Verdict, judge

UNITS = 100


def build(device: str) -> Callable[[int], Action]:
    """Return what makes an arm of so many equal units of work; all arms work on the same memory.

    A unit is a matrix product on a CPU. On a GPU it is a pass over memory far larger than its cache: the clock of
    large products moves with the power limit, and what a cache holds depends on where a buffer happens to lie.
    """
    if torch.device(device).type == "cuda":
        source = torch.randn(1 << 27, device=device).to(torch.bfloat16)
        target = torch.empty_like(source)

        def unit() -> None:
            torch.neg(source, out=target)
    else:
        left, right, out = (torch.randn(192, 192) for _ in range(3))

        def unit() -> None:
            torch.mm(left, right, out=out)

    def arm(units: int) -> Action:
        def work() -> None:
            for _ in range(units):
                unit()

        return work

    return arm


def full(device: str) -> TimingConfig:
    """Return how a timing that may decide is made on ``device``."""
    return FULL[torch.device(device).type]


def work_in_process(options: argparse.Namespace) -> None:
    """Time one pair of arms for each kind in ``options.worker`` and print the medians as JSON."""
    if options.threads:
        torch.set_num_threads(options.threads)
    config = QUICK if options.quick else replace(full(options.device), pairs=options.pairs, round_s=options.round_s)
    config = replace(config, control_pairs=0)  # the sessions are the control
    arm = build(options.device)
    found = []
    for kind, seed in json.loads(options.worker):
        deadline = time.monotonic() + options.wait_s
        while (preflight := check_machine(options.device)).problems and time.monotonic() < deadline:
            time.sleep(2.0)
        baseline, candidate = (arm(units) for units in (UNITS, UNITS + (kind == "planted")))
        timed = time_pairs(baseline, candidate, device=options.device, config=replace(config, seed=seed))
        found.append({"median": timed.median, "problems": [*preflight.problems, *timed.problems]})
    environment = asdict(capture_environment(options.device, command=()))
    print(json.dumps({"found": found, "environment": environment}))


class Sessions:
    """Runs processes and collects each session's medians."""

    def __init__(self, options: argparse.Namespace, arguments: list[str]) -> None:
        self.options, self.arguments = options, arguments
        self.kinds = ["aa"] * options.runs + ["planted"] * options.planted
        self.medians: list[list[float]] = [[] for _ in self.kinds]
        self.num_disturbed = 0
        self.environment: dict[str, object] = {}

    def run(self, chosen: list[int]) -> None:
        """Run one batch of processes for the sessions ``chosen``."""
        for group in [chosen] if self.options.share else [[index] for index in chosen]:
            for process in range(self.options.processes):
                seeds = [(self.kinds[index], 1000 * process + index) for index in group]
                done = run_replicate([__file__, *self.arguments, "--worker", json.dumps(seeds)], timeout_s=3600)
                if done.result is None:
                    raise SystemExit(f"a process gave no result: {done.error}")
                self.environment = done.result["environment"]
                for index, found in zip(group, done.result["found"], strict=True):
                    self.medians[index].append(found["median"])
                    self.num_disturbed += bool(found["problems"])
                    text = f"{self.kinds[index]} {index} process {process}: {found['median']:+.3%}"
                    print(text, *found["problems"], sep="; ", file=sys.stderr)

    def judged(self, index: int, sd: float) -> Verdict:
        """Judge a session; a planted slowdown with its arms swapped, so that finding it is a keep."""
        sign = -1 if self.kinds[index] == "planted" else 1
        medians = [sign * median for median in self.medians[index]]
        return judge(Measured(medians=medians, process_sd=sd, quick=self.options.quick))


def main() -> int:
    """Calibrate, print the record and append it to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=10, help="A/A sessions")
    parser.add_argument("--planted", type=int, default=5, help="sessions with one product in 100 more")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--pairs", type=int, help="of rounds in a process (default: the lab's for this device)")
    parser.add_argument("--round-s", type=float)
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU; 0 leaves its own choice")
    parser.add_argument("--wait-s", type=float, default=60.0, help="wait this long for a quiet machine")
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--quick", action="store_true", help="short rounds, to try the tool; decides nothing")
    parser.add_argument("--out", type=Path, default=Path("lab/calibrations.jsonl"))
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.pairs = options.pairs or full(options.device).pairs
    options.round_s = options.round_s or full(options.device).round_s
    if options.worker:
        work_in_process(options)
        return 0
    sessions = Sessions(options, sys.argv[1:])
    everyone = list(range(len(sessions.kinds)))
    sessions.run(everyone)
    # Whether a session is open depends on its bounds alone; the machine's SD comes from all of them together.
    sessions.run([index for index in everyone if sessions.judged(index, MAX_PROCESS_SD).extend])
    medians, planted = sessions.medians[: options.runs], sessions.medians[options.runs :]
    sd = process_sd(medians)
    kept = [sessions.judged(index, sd).status == "keep" for index in everyone]
    calibration = Calibration(
        device_name=str(sessions.environment["device_name"]),
        process_sd=sd,
        num_kept=sum(kept[: options.runs]),
        num_planted=options.planted,
        num_found=sum(kept[options.runs :]),
        medians=tuple(map(tuple, medians)),
        planted_medians=tuple(map(tuple, planted)),
        pairs=options.pairs,
        round_s=options.round_s,
        num_disturbed=sessions.num_disturbed,
        environment=sessions.environment,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if not options.quick:
        write_calibration(options.out, calibration)
    summary = {name: value for name, value in asdict(calibration).items() if name != "environment"}
    print(json.dumps(summary))
    return int(calibration.num_kept > 0 or calibration.num_found < options.planted)


if __name__ == "__main__":
    sys.exit(main())
