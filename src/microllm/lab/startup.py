"""Start-up as a person meets it: from process start to the first piece of answer on its output, in fresh processes.

Ours is ``microllm generate``, once with whatever it caches of a model and once without (a fresh ``MICROLLM_HOME``); a
peer is the shortest program that answers the same message (``bench_start``). All run in turns, ABBA.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microllm.errors import ConfigError, UnavailableError
from microllm.evidence.environment import capture_environment
from microllm.evidence.rows import Row, environment_fields
from microllm.inference.placement import choose_device
from microllm.io.resolve import ModelSource, resolve_model
from microllm.lab.bench_process import INSTALL, Peer

_IMPORT_TORCH = [sys.executable, "-c", "import torch; print('.', flush=True)"]  # timed to its output, not to its exit
BARS = (4.0, 2.5)
"""C4's seconds to reach with the demo on two cores, and those beyond."""
_PEER = [sys.executable, "-P", str(Path(__file__).with_name("bench_start.py"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """One start-up measurement: which model answers what, beside whom, how often."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    prompt: str = "What is the capital of France?"
    """What the model answers."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "auto"
    """Ours, as generate takes it."""
    peer: tuple[Peer, ...] = ()
    """Engines to compare with, on a CPU; transformers starts from the same file and from a directory made of it."""
    num_threads: int = min(2, os.cpu_count() or 1)
    """Threads of every process."""
    repeats: int = 3
    """How many processes of each are timed, after one that only warms the disk cache."""

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.num_threads < 1:
            raise ConfigError(f"got repeats={self.repeats}, num_threads={self.num_threads}; need at least 1 of each")


@dataclass(slots=True, kw_only=True)
class Starts:
    """One program's starts.

    Units:   seconds from process start; bytes of resident memory at the peak of the process
    """

    name: str
    command: Callable[[], list[str]]
    first_token_s: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    missing: str = ""

    @property
    def median_s(self) -> float | None:
        """Return the median time to the first piece of answer."""
        return statistics.median(self.first_token_s) if self.first_token_s else None

    def describe(self) -> str:
        """Return one line about it."""
        if self.median_s is None:
            return self.missing
        times = ", ".join(f"{s:.2f}" for s in self.first_token_s)
        memory = f"{self.peak_bytes / 2**20:,.0f} MiB"
        return f"first token after {self.median_s:.2f} s (median of {times}), peak memory {memory}"

    def warm(self, *, is_peer: bool) -> None:
        """Start it untimed; a peer that fails is missing, and says why.

        Raises:
            UnavailableError: ours failed.
        """
        if self.missing:
            return
        try:
            _run_once(self.command())
        except UnavailableError as error:
            if not is_peer:
                raise
            absent = [module for module in INSTALL if f"No module named '{module}'" in str(error)]
            self.missing = f"got no module {absent[0]!r}; run: {INSTALL[absent[0]]}" if absent else str(error)

    def run(self) -> None:
        """Start it once more."""
        first_s, peak_bytes, answer = _run_once(self.command())
        self.first_token_s.append(first_s)
        self.answers.append(answer)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """What was measured; the rows' limit is the time that ``import torch`` alone takes."""

    starts: tuple[Starts, ...]
    import_torch_s: float
    rows: tuple[Row, ...]

    def describe(self) -> str:
        """Return a line for each program, one for torch alone, and how far C4's bars are."""
        lines = [f"{starts.name}: {starts.describe()}" for starts in self.starts]
        lines.append(f"import torch alone takes {self.import_torch_s:.2f} s; every disk cache was warm")
        ours = self.starts[0].median_s
        if self.rows[0].target == "C4" and ours is not None:
            words = [f"{word} {bar:g} s: {bar / ours:.2f} x" for word, bar in zip(("bar", "beyond"), BARS, strict=True)]
            lines.append(f"C4 {'; '.join(words)} (1 or more reaches it)")
        return "\n".join(lines)


def measure_startup(config: StartupConfig, progress: Callable[[str], None] = lambda _: None) -> Startup:
    """Start each program in fresh processes after one that warms the disk cache, and time each.

    Raises:
        UnavailableError: our command failed; the text holds the end of what it said. A peer that fails is a row.
    """
    source = resolve_model(config.model)
    with tempfile.TemporaryDirectory(prefix="microllm-startup-") as folder:
        all_starts = list(_programs(config, source, Path(folder), progress))
        for starts in all_starts[:1] + all_starts[2:]:  # ours with nothing cached reads what ours has read
            progress(f"warming {starts.name}")
            starts.warm(is_peer=starts is not all_starts[0])
        running, imports = [starts for starts in all_starts if not starts.missing], [_run_once(_IMPORT_TORCH)]
        for number in range(config.repeats):  # in turns, so that a busy moment of the machine meets all
            for starts in running if number % 2 == 0 else reversed(running):
                progress(f"start {number + 1} of {config.repeats}: {starts.name}")
                starts.run()
            imports.append(_run_once(_IMPORT_TORCH))
    import_torch_s = min(first_s for first_s, *_ in imports)
    rows = tuple(_rows(config, all_starts, import_torch_s))
    return Startup(starts=tuple(all_starts), import_torch_s=import_torch_s, rows=rows)


def _programs(
    config: StartupConfig, source: ModelSource, folder: Path, progress: Callable[[str], None]
) -> Iterator[Starts]:
    environment = ["env", f"OMP_NUM_THREADS={config.num_threads}"]
    options = [
        "--prompt", config.prompt, "--max-tokens", "8", "--temperature", "0", "--device", config.device,
        "--precision", config.precision, "--num-threads", str(config.num_threads),
    ]  # fmt: skip
    ours = [sys.executable, "-m", "microllm", "generate"]

    def cold() -> list[str]:
        home = tempfile.mkdtemp(dir=folder)
        return [*environment, f"MICROLLM_HOME={home}", *ours, "--model", str(source.path), *options]

    yield Starts(name="microllm", command=lambda: [*environment, *ours, "--model", config.model, *options])
    yield Starts(name="microllm, nothing cached", command=cold)
    told = [config.prompt, str(config.num_threads)]
    if "llama.cpp" in config.peer:
        command = [*environment, *_PEER, "llama.cpp", str(source.path), *told]
        yield Starts(name="llama.cpp", command=lambda: command)
    if "transformers" in config.peer:
        same = [*environment, *_PEER, "transformers", str(source.path), *told]
        yield Starts(name="transformers", command=lambda: same)
        if source.kind == "gguf":
            progress("making the directory that transformers starts from")
            directory = str(folder / "model")
            convert = [*_PEER, "convert", str(source.path), directory]
            done = subprocess.run(convert, capture_output=True, text=True, errors="replace", check=False)
            missing = f"got no directory made of the file: {done.stderr[-300:].strip()}" if done.returncode else ""
            other = [*environment, *_PEER, "transformers", directory, *told]
            yield Starts(name="transformers safetensors", command=lambda: other, missing=missing)


def _rows(config: StartupConfig, all_starts: list[Starts], import_torch_s: float) -> Iterator[Row]:
    """Yield a row of ours against each peer, or alone if there is none, and one with nothing cached."""
    ours, cold, *peers = all_starts
    environment = capture_environment(choose_device(config.device).type)
    equal = len({*ours.answers, *cold.answers}) == 1
    parity = "pass" if equal else "the processes gave different greedy answers"
    words = f"process start to first token, {config.model}, {config.repeats} fresh processes, warm disk cache"

    def row(starts: Starts, workload: str, **more: Any) -> Row:  # noqa: ANN401
        missing = more.pop("missing", "")
        return Row.model_validate({
            **environment_fields(environment), "target": "C4" if environment.device == "cpu" else "S3",
            "workload": workload, "dtype": config.precision, "unit": "s",
            "ours": starts.median_s if equal and not missing else None, "limit": import_torch_s,
            "peak_bytes": starts.peak_bytes, "parity": missing or parity,
            "status": "unavailable" if missing else "pass", **more,
        })  # fmt: skip

    for peer in peers:
        theirs = {"peer": peer.median_s, "peer_peak_bytes": peer.peak_bytes or None}
        yield row(ours, words, peer_name=peer.name, missing=peer.missing, **theirs)
    if not peers:
        yield row(ours, words)
    yield row(cold, f"{words}, nothing cached of the model")


def _run_once(command: list[str]) -> tuple[float, int, str]:
    """Return seconds to the first byte of output, peak resident bytes, and the output."""
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
    return first_s, usage.ru_maxrss * 1024, answer
