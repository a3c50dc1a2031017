"""One fresh process of an experiment: its correctness gate, or one replicate of its timing.

Place: ``experiment run`` starts ``python -m microllm.lab.replicate TASK`` and reads the JSON object in the last line
of its output. Does not judge and writes no file.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from microllm.evidence.environment import capture_environment
from microllm.evidence.gates import gate_metrics, refusals, run_gate
from microllm.evidence.memory_ledger import memory_ledger
from microllm.evidence.preflight import check_machine
from microllm.evidence.receipt import now_utc
from microllm.evidence.timing import time_pairs
from microllm.lab.contract import Build, Case, Contract, load_entry, read_contract
from microllm.lab.suspicion import find_faults, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the process is to do.

    Units:   ``wait_s`` is how long it waits for a quiet machine before each timing
    """

    phase: Literal["gate", "time"]
    directory: str
    seeds: tuple[int, ...]
    quick: bool = False
    wait_s: float = 0.0

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments to Python that start it."""
        return ("-m", "microllm.lab.replicate", json.dumps(asdict(self)))


def check(task: Task, contract: Contract) -> dict[str, Any]:
    """Run the correctness gate of every workload on each seed and return the reports."""
    directory = Path(task.directory)
    baseline, candidate = _arms(directory, contract)
    broken = load_entry(directory, contract.broken) if contract.broken else baseline
    reports: dict[str, list[dict[str, Any]]] = {}
    for workload, seed in itertools.product(contract.workloads, task.seeds):
        case = contract.case(workload, seed)
        # Without a planted break of its own, the experiment's is the right computation on the wrong input.
        wrong = case if contract.broken else contract.case(workload, seed + 1)
        report = run_gate(
            contract.gate, host=_output(baseline, case), candidate=_second_output(candidate, case),
            broken=_output(broken, wrong), floors=contract.limits,
        )  # fmt: skip
        faults = find_faults(candidate, case, contract.case(workload, seed + 1), _output(baseline, case)())
        reasons = [*report.reasons, *faults]
        found = {**report.model_dump(mode="json"), "passed": report.passed and not faults, "reasons": reasons}
        reports.setdefault(workload.name, []).append(found)
    environment = capture_environment(contract.device, seed=task.seeds[0], repository=directory)
    return {"reports": reports, "environment": asdict(environment)}


def measure(task: Task, contract: Contract) -> dict[str, Any]:
    """Time candidate against baseline on every workload and return the raw rows."""
    baseline, candidate = _arms(Path(task.directory), contract)
    rows = []
    for workload in contract.workloads:
        case, started = contract.case(workload, task.seeds[0]), now_utc()
        arms = [build(case) for build in (baseline, candidate, baseline)]
        deadline = time.monotonic() + task.wait_s
        while (preflight := check_machine(contract.device)).problems and time.monotonic() < deadline:
            time.sleep(2.0)
        config = contract.timing(case.seed, quick=task.quick)
        timing = time_pairs(arms[0], arms[1], control=arms[2], device=contract.device, config=config)
        metrics = gate_metrics(contract.gate, joined(arms[1]()), joined(arms[0]()))
        del arms
        rows.append({
            "workload": workload.name, "seed": case.seed, "started": started, "pid": os.getpid(),
            "timing": asdict(timing), "preflight": asdict(preflight),
            "baseline_peak_bytes": _peak_bytes(baseline, case), "candidate_peak_bytes": _peak_bytes(candidate, case),
            "parity": "; ".join(refusals(metrics, contract.limits)) or "pass",
        })  # fmt: skip
    return {"rows": rows}


def main() -> None:
    """Do the task in the first argument and put its JSON on the last line of standard output."""
    given = json.loads(sys.argv[1])
    task = Task(**{**given, "seeds": tuple(given["seeds"])})
    contract = read_contract(Path(task.directory))
    if contract.num_threads:
        torch.set_num_threads(contract.num_threads)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)  # what the experiment prints is no part of the result
        result = check(task, contract) if task.phase == "gate" else measure(task, contract)
        json.dump(result, output)


def _arms(directory: Path, contract: Contract) -> tuple[Build, Build]:
    assert contract.baseline is not None
    assert contract.candidate is not None
    return load_entry(directory, contract.baseline), load_entry(directory, contract.candidate)


def _output(build: Build, case: Case) -> Callable[[], Tensor]:
    action = build(case)
    return lambda: joined(action())


def _second_output(build: Build, case: Case) -> Callable[[], Tensor]:
    """Return a callable for the arm's second output, the first one spoilt: a result that is kept fails the gate."""
    action = build(case)

    def again() -> Tensor:
        first = action()
        with torch.inference_mode():
            for part in (first,) if isinstance(first, Tensor) else first:
                part.fill_(torch.nan if part.is_floating_point() else 0)
        return joined(action())

    return again


def _peak_bytes(build: Build, case: Case) -> int:
    """Return how far memory grew above what was held before ``build`` built its arm and the arm ran once."""
    if torch.device(case.device).type != "cuda":
        with memory_ledger() as ledger:
            build(case)()
        return ledger.report.peak_bytes.get("cpu", 0)
    torch.cuda.synchronize(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    held = torch.cuda.memory_allocated(case.device)
    build(case)()
    torch.cuda.synchronize(case.device)
    return torch.cuda.max_memory_allocated(case.device) - held


if __name__ == "__main__":
    main()
