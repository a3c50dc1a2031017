"""What a measurement ran on: device, driver, libraries, commit, seed, command.

Place: in every receipt and row. Reads versions without importing what it names. Does not judge: see ``preflight``.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

import torch

from microllm.errors import UnavailableError

PUBLISHED: dict[str, dict[str, float]] = {
    name: {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9, "GB/s": bandwidth}
    for name, bandwidth in (("NVIDIA H200", 4800.0), ("NVIDIA H100 80GB HBM3", 3352.0))
}
"""Dense peaks in TFLOPS (int8: tera-operations) and memory bandwidth, by device name."""
_PACKAGES = ("triton", "transformers", "vllm", "numpy", "microllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Everything that a figure depends on and that its code does not say."""

    device: str
    device_name: str
    device_uuid: str
    driver: str
    num_cpus: int
    num_threads: int
    platform: str
    python: str
    torch: str
    cuda: str
    packages: dict[str, str]
    commit: str
    dirty: bool
    seed: int
    command: tuple[str, ...]

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions that a benchmark row carries."""
        return {"python": self.python, "torch": self.torch, "cuda": self.cuda, **self.packages}


def capture_environment(
    device: str, *, seed: int = 0, command: tuple[str, ...] | None = None, repository: Path | None = None
) -> Environment:
    """Return the environment of this process for work on ``device`` ("cpu", "cuda" or "cuda:N")."""
    device_name, (commit, dirty) = read_device_name(device), read_commit(repository or Path.cwd())
    cuda = torch.device(device).type == "cuda"
    return Environment(
        device=device, device_name=device_name,
        device_uuid=str(torch.cuda.get_device_properties(device).uuid) if cuda else "",
        driver=_driver_version() if cuda else "",
        num_cpus=os.cpu_count() or 1, num_threads=torch.get_num_threads(), platform=platform.platform(),
        python=platform.python_version(), torch=str(torch.__version__), cuda=str(torch.version.cuda or ""),
        packages=_package_versions(), commit=commit, dirty=dirty, seed=seed,
        command=command_line() if command is None else command,
    )  # fmt: skip


def environment_drift(recorded: Environment, now: Environment) -> tuple[str, ...]:
    """Return one sentence for each part of the environment that is no longer as recorded.

    The commit, seed and command differ by intent and are left out.
    """
    ignored = {"commit", "dirty", "seed", "command", "packages"}
    pairs = [(f.name, getattr(recorded, f.name), getattr(now, f.name)) for f in fields(Environment)]
    pairs = [pair for pair in pairs if pair[0] not in ignored]
    names = sorted((set(recorded.packages) | set(now.packages)) - {"microllm"})
    pairs += [(name, recorded.packages.get(name, "absent"), now.packages.get(name, "absent")) for name in names]
    return tuple(f"{name}: recorded {then!r}, now {today!r}" for name, then, today in pairs if then != today)


def read_device_name(device: str) -> str:
    """Return the product name of ``device``; tracks and calibrations are keyed by it.

    Raises:
        UnavailableError: there is no such device.
    """
    try:
        if torch.device(device).type == "cuda":
            return torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UnavailableError(f"got device {device!r}; need one that this machine has: {reason}") from error
    found = _search("/proc/cpuinfo", r"model name\s*: (.+)") or platform.processor() or platform.machine()
    return f"{found} ({os.cpu_count()} cores)"


def command_line() -> tuple[str, ...]:
    """Return how this process was started; of a program's absolute path only its name."""
    return tuple(Path(word).name if word.startswith("/") else word for word in sys.orig_argv)


def read_commit(repository: Path) -> tuple[str, bool]:
    """Return the commit that ``repository`` is at and whether tracked files differ from it."""
    commit = _output(["git", "-C", str(repository), "rev-parse", "HEAD"])
    status = _output(["git", "-C", str(repository), "status", "--porcelain", "--untracked-files=no"])
    return (commit or "unknown", bool(status) or commit is None)


def _driver_version() -> str:
    return _search("/proc/driver/nvidia/version", r" (\d+\.[\d.]+) ")


def _search(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match[1].strip() if match else ""


def _package_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
