"""What ``import microllm`` gives, needs and costs."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

import microllm

MAX_NAMES = 12
MAX_IMPORT_S = 0.2  # more than `import torch`

# Absent on a plain machine, or there only for the commands.
NOT_NEEDED = [
    "triton", "pynvml", "transformers", "accelerate", "gguf", "fastapi", "uvicorn", "prometheus_client",
    "llguidance", "matplotlib", "tensorboard", "tyro", "rich",
]  # fmt: skip
EXTRAS = [name for name in NOT_NEEDED if name not in ("tyro", "rich")]

# A module that is None in sys.modules cannot be imported.
BLOCK = "import sys, json\nsys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))\n"

IMPORT_ALL = """
import importlib, pkgutil, microllm
skipped = ("microllm.ops.kernels", "microllm.serving.", "microllm.__main__")
modules = pkgutil.walk_packages(microllm.__path__, "microllm.")
names = [module.name for module in modules if not module.name.startswith(skipped)]
for name in names:
    importlib.import_module(name)
print(len(names))
"""

MEASURE = """
import time
import torch
start = time.process_time()
import microllm
print(time.process_time() - start)
"""


def run_fresh(code: str, *arguments: str, **variables: str) -> str:
    """Run ``code`` in a new interpreter and return what it printed."""
    command, environment = [sys.executable, "-c", code, *arguments], os.environ | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_exact_sorted_and_short():
    names = microllm.__all__
    assert names == sorted(names, key=str.lower)
    assert len(names) == len(set(names)) <= MAX_NAMES
    public = {
        name
        for name, value in vars(microllm).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public == {name for name in names if not name.startswith("_")}


def test_every_public_name_is_documented():
    for name in microllm.__all__:
        value = getattr(microllm, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{name} has no docstring"
            assert value.__module__.startswith("microllm."), f"{name} is not ours"


def test_import_needs_no_extra_and_loads_no_command():
    code = BLOCK + "import microllm\nprint(*microllm.__all__)"
    assert run_fresh(code, json.dumps(NOT_NEEDED)).split() == list(microllm.__all__)


@pytest.mark.slow
def test_every_module_imports_without_extras():
    assert int(run_fresh(BLOCK + IMPORT_ALL, json.dumps(EXTRAS))) > 30


@pytest.mark.slow
def test_import_is_quick(tmp_path):
    # Other work on the machine only adds: the least of a few runs is the cost, compiled as an installed package is.
    seconds = []
    while len(seconds) < 6:
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
        seconds.append(float(run_fresh(MEASURE, **compiled)))
        if seconds[-1] < MAX_IMPORT_S:
            return
    raise AssertionError(f"importing microllm took {seconds} s after torch; need one below {MAX_IMPORT_S}")


def test_import_chooses_no_device_and_no_thread_count():
    code = (
        "import torch\n"
        "before = torch.get_num_threads(), torch.get_default_device(), torch.is_grad_enabled()\n"
        "import microllm\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert before == (torch.get_num_threads(), torch.get_default_device(), torch.is_grad_enabled())\n"
    )
    run_fresh(code)
