"""Experiments: write the contract, run correctness and then timing in fresh processes, judge.

Place: what ``microllm lab new | run | judge`` call. An experiment is a directory ``lab/experiments/<id>`` with
``contract.json``, the files its entry points lie in, ``rows.jsonl``, ``receipts.jsonl`` and ``verdict.json``.
The process that runs an experiment touches no device: what it starts does.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from microllm.errors import EvidenceError
from microllm.evidence.calibration import read_calibration
from microllm.evidence.environment import Environment, capture_environment, command_line, read_commit, read_device_name
from microllm.evidence.gates import Kind
from microllm.evidence.journal import exclusive, write_atomic
from microllm.evidence.receipt import append_receipt, now_utc
from microllm.evidence.replicates import Replicate, run_replicate
from microllm.evidence.rows import Row, latest_rows, read_rows
from microllm.evidence.timing import FULL
from microllm.evidence.verdict import CONFIRMATION_GAP_S
from microllm.lab.contract import Contract, read_contract
from microllm.lab.judgement import Judgement, judge_experiment, judge_sessions
from microllm.lab.record import RawRow, Records, Session, SessionBody
from microllm.lab.replicate import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class NewConfig:
    """What ``lab new`` needs to write a contract."""

    name: str
    """A few words; the experiment's id is made of them and the next number."""
    hypothesis: str
    """What is believed, and why, so that it can turn out wrong."""
    refuted_if: str
    """Which outcome refutes it."""
    mechanism: str
    """What makes it faster: fewer launches, fewer bytes, less waiting."""
    predicted_effect: float
    """The predicted gain as the logarithm of the ratio of times: 0.01 for 1 %."""
    baseline: str | None = None
    """Entry point "file.py:function" in the experiment's folder, or "package.module:function"."""
    candidate: str | None = None
    """Entry point of the candidate."""
    broken: str | None = None
    """Entry point with a fault planted, for the gate's negative control; else the baseline on another input."""
    kind: Literal["experiment", "baseline"] = "experiment"
    """A baseline starts a track from recorded peer ratios and runs nothing."""
    device: str = "cpu"
    """Where it runs: cpu, cuda or cuda:N."""
    dtype: str = "float32"
    """Handed to the entry points, and part of the track."""
    workloads: tuple[str, ...] = ("default",)
    """Each "name" or "name={json arguments}"; the first is the target, the others guard."""
    models: tuple[str, ...] = ()
    """Models that the track is about."""
    peers: tuple[str, ...] = ()
    """Each "name=version" of what the track compares with."""
    gate: Kind = "values"
    """Judge correctness by value (cosine) or by what would be chosen (teacher-forced top-1 agreement)."""
    floors: tuple[str, ...] = ()
    """Each "metric=limit" that refuses; without any, the pass band of the gate's kind."""
    min_effect: float = 0.003
    """The least gain that is worth keeping, at least 0.003."""
    memory_limit: float = 1.01
    """The most peak memory, as a ratio to the baseline's."""
    memory_trade: str = ""
    """Why more memory is accepted, if the limit is above 1.01."""
    adds_policy_code: bool = False
    """A model policy that adds code must gain 1 %."""
    num_threads: int | None = None
    """Threads of torch on the CPU; None leaves its own choice."""
    score_targets: tuple[str, ...] = ()
    """For a baseline: the targets whose latest rows give the peer ratios."""
    root: Path = Path("lab")
    """Where the records lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What ``lab run`` needs."""

    id: str
    """The experiment's id, number or name."""
    quick: bool = False
    """Screen in one process with short rounds; decides nothing."""
    wait_s: float = 120.0
    """Wait so many seconds for a quiet machine before each timing."""
    root: Path = Path("lab")
    """Where the records lie."""


def check_root(root: Path) -> None:
    """Refuse a place where no records can lie: to find nothing wrong in it would say nothing."""
    if not root.is_dir():
        raise EvidenceError(f"got root {str(root)!r}, which is no folder; need the records' own; run: microllm lab new")


def experiment_directories(root: Path) -> list[Path]:
    """Return the directories of all experiments, in order of their numbers."""
    return sorted(path.parent for path in (root / "experiments").glob("*/contract.json"))


def find_experiment(root: Path, name: str) -> Path:
    """Return the directory of the experiment with this id, number or name.

    Raises:
        EvidenceError: none or several fit.
    """
    found = [path for path in experiment_directories(root) if name in (path.name, path.name[:3], path.name[4:])]
    if len(found) != 1:
        known = ", ".join(path.name for path in experiment_directories(root)) or "none"
        raise EvidenceError(f"got experiment {name!r}, which fits {len(found)}; need one of: {known}")
    return found[0]


def new_experiment(config: NewConfig) -> Path:
    """Write the contract of a new experiment and return its directory.

    Raises:
        EvidenceError: a field of the contract is missing or does not fit.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
    numbers = [path.name[:3] for path in experiment_directories(config.root)]
    number = max((int(each) for each in numbers if each.isdecimal()), default=0) + 1
    workloads = [_named_json(text) for text in config.workloads]
    track = {
        "device_name": read_device_name(config.device), "dtype": config.dtype, "models": config.models,
        "workloads": [name for name, _ in workloads], "peers": dict(map(_pair, config.peers)),
    }  # fmt: skip
    timing = FULL["cuda" if config.device.startswith("cuda") else "cpu"]
    given = {name: value for name, value in asdict(config).items() if name in Contract.model_fields} | {
        "id": f"{number:03d}-{slug}", "created": now_utc(), "commit": read_commit(config.root)[0], "track": track,
        "workloads": [{"name": name, "arguments": arguments} for name, arguments in workloads],
        "floors": dict(map(_pair, config.floors)), "pairs": timing.pairs, "control_pairs": timing.control_pairs,
        "round_s": timing.round_s,
    }  # fmt: skip
    try:
        contract = Contract.model_validate(given)
    except ValidationError as error:
        raise EvidenceError(f"got a contract that promises too little: {error}") from error
    directory = config.root / "experiments" / contract.id
    write_atomic(directory / "contract.json", json.dumps(contract.model_dump(mode="json"), indent=2) + "\n")
    return directory


def run_experiment(config: RunConfig) -> Judgement:
    """Run a session of an experiment (correctness first, then timing) and judge it.

    A full session is 6 processes, and 12 if 6 leave the question open; ``quick`` is one process and decides nothing.

    Raises:
        EvidenceError: the verdict is final, a confirmation is too early or of other code, another run is at work, or
            this is another machine than the track's.
    """
    directory = find_experiment(config.root, config.id)
    refusal = f"got experiment {directory.name}, which is being run by another process; need one run at a time; wait"
    with exclusive(directory / "contract.json", refusal):
        return _run_alone(config, directory, read_contract(directory), Records(directory))


def _run_alone(config: RunConfig, directory: Path, contract: Contract, records: Records) -> Judgement:
    if contract.kind == "baseline":
        return _run_baseline(config.root, directory, contract)
    sessions = records.sessions()
    judgement = judge_sessions(contract, sessions)
    _check_may_run(judgement, sessions, records, quick=config.quick)
    gate, environment = _check_correctness(contract, records)
    last = max((body.session for body in records.bodies()), default=0)
    begun = [s.number for s, verdict in zip(sessions, judgement.sessions, strict=True) if verdict.extend]
    calibration = read_calibration(config.root / "calibrations.jsonl", environment)
    reports = gate.result["reports"] if gate.result else {}
    body = SessionBody(
        session=begun[0] if begun and not config.quick else last + 1, quick=config.quick, gate=reports,
        gates_pass=bool(reports) and all(each["passed"] for found in reports.values() for each in found),
        process_sd=calibration.process_sd if calibration else None, crash=gate.error, sources=records.sources(),
    )  # fmt: skip
    rule = contract.rule
    parts = [range(rule.min_processes), range(rule.min_processes, rule.max_processes)][len(begun[:1]) :]
    if config.quick or not body.gates_pass:
        parts = [range(int(body.gates_pass))]
    for processes in parts:
        rows = _run_processes(records, contract, body.session, processes, config)
        records.append_session(body.model_copy(update={"rows": rows}), environment)
        judgement = judge_experiment(directory)
        if not judgement.sessions[-1].extend:
            break
    return judgement


def _check_correctness(contract: Contract, records: Records) -> tuple[Replicate, Environment]:
    """Run the gate in a process of its own and return what it gave, and where it ran."""
    seeds = tuple(secrets.randbelow(2**31) for _ in range(contract.num_gate_seeds))
    gate = run_replicate(Task(phase="gate", directory=str(records.directory), seeds=seeds).arguments())
    environment = capture_environment("cpu", repository=records.directory)
    if gate.result is not None:
        environment = Environment(**{**gate.result["environment"], "command": command_line()})
        if environment.device_name != contract.track.device_name:
            raise EvidenceError(
                f"got device {environment.device_name!r}; the track's is {contract.track.device_name!r}; "
                "need the same machine, or a new experiment for this one: curves of different tracks never mix"
            )
    if abandoned := records.uncovered():
        records.append_session(SessionBody.interruption(tuple(abandoned)), environment)
    return gate, environment


def _run_processes(
    records: Records, contract: Contract, session: int, processes: range, config: RunConfig
) -> tuple[str, ...]:
    digests = []
    for process in processes:
        seed, started, place = secrets.randbelow(2**31), now_utc(), str(records.directory)
        task = Task(phase="time", directory=place, seeds=(seed,), quick=config.quick, wait_s=config.wait_s)
        timeout_s = 900.0 + config.wait_s * len(contract.workloads)
        done = run_replicate(task.arguments(), timeout_s=timeout_s)
        crash = {"workload": contract.workloads[0].name, "seed": seed, "started": started, "pid": 0}
        found = done.result["rows"] if done.result else [{**crash, "status": "crash", "error": done.error}]
        rows = [RawRow.model_validate({"session": session, "process": process, **each}) for each in found]
        digests += [records.append_row(row) for row in rows]
        if done.result is None:
            break
    return tuple(digests)


def _check_may_run(judgement: Judgement, sessions: list[Session], records: Records, *, quick: bool) -> None:
    if judgement.final:
        status = judgement.verdict.status
        raise EvidenceError(f"got an experiment whose verdict is final ({status}); need a new one: microllm lab new")
    if judgement.kept_at is not None and not quick:
        waited = (datetime.fromisoformat(now_utc()) - datetime.fromisoformat(judgement.kept_at)).total_seconds()
        if waited < CONFIRMATION_GAP_S:
            left = math.ceil((CONFIRMATION_GAP_S - waited) / 60)
            raise EvidenceError(f"got a keep to confirm too early; need another time; run again in {left} minutes")
    for session, verdict in zip(sessions, judgement.sessions, strict=True):
        waits = verdict.extend or verdict.status == "keep"
        if waits and not quick and session.bodies[0].sources != records.sources():
            raise EvidenceError(
                f"got other Python files than session {session.number} ran; need the same to extend or confirm it; "
                "put them back, or write a new experiment: microllm lab new"
            )


def _run_baseline(root: Path, directory: Path, contract: Contract) -> Judgement:
    """Seal the peer ratios that the track starts from: the latest passing rows of its targets on its device.

    A workload with several forms of peers counts once, beside the quickest of them.
    """
    rows = read_rows(root / "rows") if (root / "rows").exists() else []
    track = contract.track
    fitting = [row for row in rows if row.device == track.device_name and row.dtype == track.dtype]
    chosen = [row for row in latest_rows(fitting) if row.target in contract.score_targets and row.status == "pass"]
    hardest: dict[tuple[str, str], Row] = {}
    for row in sorted((row for row in chosen if row.ratio_peer is not None), key=lambda row: row.ratio_peer or 0.0):
        hardest.setdefault((row.target, row.workload), row)
    ratios = {row.digest: row.ratio_peer for row in hardest.values()}
    missing = set(contract.score_targets) - {row.target for row in hardest.values()}
    if missing:
        raise EvidenceError(
            f"got no passing row against a peer for {sorted(missing)} on this track; run: microllm bench"
        )
    records = Records(directory)
    if not records.receipts("baseline"):
        environment = capture_environment("cpu", repository=directory)
        append_receipt(records.receipts_path, "baseline", {"ratios": ratios}, environment, genesis=records.genesis)
    return judge_experiment(directory)


def _named_json(text: str) -> tuple[str, dict[str, Any]]:
    name, _, arguments = text.partition("=")
    try:
        return name, json.loads(arguments or "{}")
    except ValueError as error:
        raise EvidenceError(f"got workload {text!r}; need name or name={{json}}: {error}") from error


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise EvidenceError(f"got {text!r}; need name=value")
    return name, value
