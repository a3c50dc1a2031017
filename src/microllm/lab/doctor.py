"""What this machine can run, and why not: hardware, packages and models, each with a remedy.

Place: called by ``microllm doctor``. Measures nothing and downloads nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass

import torch

from microllm.errors import MicroLLMError
from microllm.io.demo import fetch_demo
from microllm.ops import tuned

EXTRAS: dict[str, tuple[str, str]] = {
    "triton": ("gpu", "fast kernels on a GPU"),
    "pynvml": ("gpu", "GPU clocks and throttle reasons in receipts"),
    "transformers": ("hf", "align, peers of bench, structures' hosts"),
    "gguf": ("hf", "transformers reading GGUF files for align"),
    "fastapi": ("serve", "the HTTP server"),
    "llguidance": ("guided", "structured output"),
    "matplotlib": ("plot", "pictures in reports"),
    "tensorboard": ("tensorboard", "training curves in TensorBoard"),
}
"""Import name of each optional package: the extra that brings it, and what needs it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: its state, whether it can be used, and what to do when it cannot."""

    what: str
    state: str
    usable: bool
    remedy: str = ""


def examine_machine() -> list[Finding]:
    """Return what this machine has, in the order a newcomer needs to know it."""
    return [*_hardware(), *_packages(), _tuned(), _demo()]


def _hardware() -> list[Finding]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", True),
        Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads", True),
        Finding(
            "cpu",
            f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {memory_gib:.0f} GiB memory",
            True,
        ),
    ]
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "no GPU is visible" if built else "this torch is a CPU build"
        found.append(Finding("gpu", why, False, "models run on the CPU; for a GPU install a CUDA build of torch"))
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        state = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
        found.append(Finding(f"gpu cuda:{index}", state, True))
    return found


def _packages() -> list[Finding]:
    found, distributions = [], importlib.metadata.packages_distributions()
    for package, (extra, purpose) in EXTRAS.items():
        present = importlib.util.find_spec(package) is not None
        remedy = "" if present else f"pip install 'microllm[{extra}]'"
        names = distributions.get(package, ())
        version = importlib.metadata.version(names[0]) if names else "installed"
        state = f"{version} ({purpose})" if present else f"absent ({purpose})"
        found.append(Finding(package, state, present, remedy))
    return found


def _tuned() -> Finding:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        count, unused = len(tuned.entries()), tuned.ignored(tuned.device_name(device))
    except MicroLLMError as error:
        return Finding("tuned choices", str(error), False, "restore the file")
    state = f"{count}, {len(unused)} not used here" + (f" ({unused[0]})" if unused else "")
    return Finding("tuned choices", state, not unused, "microllm tune --accept finds new ones" if unused else "")


def _demo() -> Finding:
    try:
        path = fetch_demo(offline=True)
    except MicroLLMError as error:
        return Finding("demo model", str(error), False, "microllm pull --model demo")
    return Finding("demo model", f"{path.name}, {path.stat().st_size / 2**20:.0f} MiB", True)
