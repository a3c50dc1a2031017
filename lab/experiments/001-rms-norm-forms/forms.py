"""Two forms of RMSNorm in fp32: written out in five operators, and torch's own function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from microllm.lab.contract import Case

EPS = 1e-6


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Return rows and weight, drawn from the case's seed."""
    generator = torch.Generator().manual_seed(case.seed)
    rows, width = int(str(case.arguments["rows"])), int(str(case.arguments["width"]))
    return torch.randn(rows, width, generator=generator), torch.rand(width, generator=generator)


def written_out(case: Case) -> Callable[[], Tensor]:
    """Build the baseline."""
    x, w = inputs(case)
    return lambda: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w


def one_call(case: Case) -> Callable[[], Tensor]:
    """Build the candidate."""
    x, w = inputs(case)
    return lambda: functional.rms_norm(x, w.shape, w, EPS)
