"""What every test starts from: no hub, one seed, one property-testing profile."""

from __future__ import annotations

import os

import pytest

# Read when transformers and tokenizers are first imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Read when torch is: its threads sleep between parallel regions. Spinning, they make these tests fourteen times slower
# on a machine that has other work, and save nothing on an idle one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from hypothesis import settings

# No deadline: an example's first run may compile or read a file. In CI the examples are the same every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start each test from one seed, whatever ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the tests that need a GPU this machine does not have."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none here"))
