"""The processes of a benchmark's arms: started together, asked one at a time, ended whatever happens.

Place: between ``bench``, which decides what is asked, and ``bench_worker``, which answers. Arms that wait use no
processor: their threads sleep after a moment. Does not measure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from microllm.errors import UnavailableError
from microllm.evidence.preflight import CpuMeter

WORKER = Path(__file__).with_name("bench_worker.py")
Kind = Literal["microllm", "transformers", "llama.cpp"]
Peer = Literal["transformers", "llama.cpp"]
INSTALL: dict[str, str] = {
    "llama_cpp": "pip install llama-cpp-python==0.3.36 (it compiles: a C++ compiler and minutes)",
    "transformers": "pip install 'microllm[hf]'",
    "gguf": "pip install 'microllm[hf]'",
}
"""What brings a peer's missing module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """What an arm's process is told: which engine, which file, in which precision, on how many threads.

    Units:   ``context`` is how many tokens its cache must hold
    """

    arm: Kind
    precision: str
    model: str
    num_threads: int
    context: int

    @property
    def name(self) -> str:
        """Return what tables call it."""
        return self.arm if self.arm == "llama.cpp" else f"{self.arm} {self.precision}"

    def command(self) -> list[str]:
        """Return the command that starts its process."""
        told = {"arm": self.arm, "precision": self.precision, "model": self.model, "num_threads": self.num_threads}
        # -P: the folder of the script holds a profile.py, which must not stand in for Python's own.
        return [sys.executable, "-P", str(WORKER), json.dumps({**told, "context": self.context})]


class Worker:
    """One running arm; ``forms`` and ``dtype`` are what it said of itself when its model was loaded."""

    def __init__(self, spec: ArmSpec, process: subprocess.Popen[str], complaints: Any) -> None:  # noqa: ANN401
        self.spec, self._process, self._complaints = spec, process, complaints
        loaded = self._read()
        if module := loaded.get("missing"):
            raise UnavailableError(f"got no module {module!r}; need it for {spec.name}; run: {INSTALL.get(module, '')}")
        self.forms, self.dtype = tuple(loaded["forms"]), str(loaded["dtype"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            UnavailableError: the process ended instead; the text holds its last words.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise UnavailableError(self._last_words()) from error
        return self._read()

    def ask_timed(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request that is timed; the answer also has ``foreign_cpus``, the cores that other work kept busy."""
        meter, started = CpuMeter(), time.perf_counter()
        answer = self.ask(request)
        busy, took = meter.foreign_cpus(), time.perf_counter() - started
        return {**answer, "foreign_cpus": None if busy is None else max(0.0, busy - answer["cpu_s"] / took)}

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        status = self._process.wait()
        self._complaints.seek(0)
        words = self._complaints.read().strip().splitlines()[-3:]
        return f"got exit status {status} from {self.spec.name}; need an answer; its last words: {' / '.join(words)}"


class Workers:
    """Starts arms; leaving the context ends them all, by an exception too."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, spec: ArmSpec) -> Worker:
        """Start an arm and wait until its model is loaded.

        Raises:
            UnavailableError: it cannot be had; the text says why, or what to install.
        """
        complaints = self._stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        process = self._stack.enter_context(subprocess.Popen(
            spec.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
        ))  # fmt: skip
        self._stack.callback(process.kill)
        return Worker(spec, process, complaints)
