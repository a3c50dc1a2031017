"""Start-up as a person meets it: from process start to the first piece of answer on its output, in fresh processes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from microllm.errors import ConfigError, UnavailableError
from microllm.evidence.environment import capture_environment
from microllm.evidence.rows import Row, environment_fields
from microllm.inference.llm import choose_device

_IMPORT_TORCH = [sys.executable, "-c", "import torch; print('.', flush=True)"]  # timed to its output, not to its exit


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """One start-up measurement: which model answers what, how often."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    prompt: str = "What is the capital of France?"
    """What the model answers."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    repeats: int = 3
    """How many processes are timed, after one that only warms the disk cache."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"got repeats={self.repeats}; need at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """What was measured; the row's limit is the time that ``import torch`` alone takes.

    Units:   seconds from process start; bytes of resident memory at the peak of the process
    """

    first_token_s: tuple[float, ...]
    total_s: tuple[float, ...]
    peak_bytes: int
    import_torch_s: float
    answer: str
    row: Row

    @property
    def median_first_token_s(self) -> float:
        """Return the median time to the first piece of answer."""
        return statistics.median(self.first_token_s)


def measure_startup(config: StartupConfig) -> Startup:
    """Start ``microllm generate`` in fresh processes after one that warms the disk cache, and time each.

    Raises:
        UnavailableError: the command failed; the text holds the end of what it said.
    """
    command = [
        sys.executable, "-m", "microllm", "generate", "--model", config.model, "--prompt", config.prompt,
        "--max-tokens", "8", "--temperature", "0", "--device", config.device,
    ]  # fmt: skip
    _run_once(command)
    imports, runs = [_run_once(_IMPORT_TORCH)], []
    for _ in range(config.repeats):  # in turns, so that a busy moment of the machine meets both
        runs.append(_run_once(command))
        imports.append(_run_once(_IMPORT_TORCH))
    import_torch_s = min(first_s for first_s, *_ in imports)
    times, totals, peaks, answers = zip(*runs, strict=True)
    equal = len(set(answers)) == 1
    environment = capture_environment(choose_device(config.device).type)
    row = Row.model_validate({
        **environment_fields(environment), "target": "C4" if environment.device == "cpu" else "S3",
        "workload": f"process start to first token, {config.model}, {config.repeats} fresh processes, warm disk cache",
        "dtype": "auto", "unit": "s", "ours": statistics.median(times) if equal else None, "limit": import_torch_s,
        "peak_bytes": max(peaks), "parity": "pass" if equal else "the processes gave different greedy answers",
    })  # fmt: skip
    return Startup(
        first_token_s=times, total_s=totals, peak_bytes=max(peaks), import_torch_s=import_torch_s,
        answer=answers[0], row=row,
    )  # fmt: skip


def _run_once(command: list[str]) -> tuple[float, float, int, str]:
    """Return seconds to the first byte of output, seconds to the end, peak resident bytes, and the output."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        first_s = time.perf_counter() - started
        answer = (first + process.stdout.read()).decode(errors="replace")
        complaint = process.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0 or not first:
        raise UnavailableError(
            f"got exit status {process.returncode} from {' '.join(command[1:])}; need an answer; "
            f"its last words: {complaint[-500:].strip()}"
        )
    return first_s, time.perf_counter() - started, usage.ru_maxrss * 1024, answer
