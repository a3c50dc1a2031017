"""A store that is nobody's, tokens, and plans put in place without a gate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from microllm import structures
from microllm.structures import AttachConfig


@pytest.fixture
def config(tmp_path: Path) -> AttachConfig:
    return AttachConfig(store=tmp_path / "store")


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    return torch.randint(97, (1, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def attached(config: AttachConfig, ids: torch.Tensor) -> Callable[..., Any]:
    """Return a function that puts a scheme in place without judging it: the contract does not depend on the gate."""

    def make(model: Any, scheme: str = "bf16_structural", **activation: Any) -> Any:
        plan = structures.auto_swaps(model, lambda: model(ids), scheme=scheme, config=config)
        return plan.activate(**activation)

    return make
