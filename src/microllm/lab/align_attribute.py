"""What rounding a projection's weights, its input, or both to bf16 costs, when the product itself stays in fp32.

Place: ``microllm align --attribute``: it tells what a dtype loses by its operands from what a kernel loses by its sums.
The reference is our own model in fp32 on the same tokens. Inference only; does not time anything.
"""

from __future__ import annotations

import json
from typing import Literal

import torch
from torch import Tensor, nn

from microllm import ops
from microllm.errors import ConfigError
from microllm.evidence.environment import Environment, capture_environment
from microllm.evidence.journal import write_atomic
from microllm.evidence.tensor_statistics import Record, error_statistics
from microllm.evidence.trace import record
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import resolve_model
from microllm.lab.align import AlignConfig, token_ids
from microllm.lab.align_bisect import Progress, projections, substituted
from microllm.model import load_model

Side = Literal["weights", "activations", "both"]


class AttributedSite(Record):
    """One projection rounded alone: relative L2 error of its own output, and of the logits."""

    site: str
    output_error: float
    logits_error: float


class AttributeReport(Record):
    """Every projection in the model's order, and the logits' error with all of them rounded at once."""

    side: Side
    verdict: str
    model: str
    rows: tuple[AttributedSite, ...]
    logits_error: float
    environment: Environment


class _Rounded(nn.Module):
    """An fp32 projection, one or both operands of which are rounded to bf16."""

    def __init__(self, linear: nn.Module, side: Side) -> None:
        super().__init__()
        self.weight, self.bias = linear.get_parameter("weight"), getattr(linear, "bias", None)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.side == "activations" else _rounded(self.weight)
        return ops.linear(x if self.side == "weights" else _rounded(x), weight, self.bias)


def run_align_attribute(config: AlignConfig, progress: Progress) -> AttributeReport:
    """Round each projection alone, then all; write attribute.json where ``config.output`` says.

    Raises:
        ConfigError: the side is none of the three, or another kind of run is asked for as well.
    """
    side = config.attribute
    if side is None or side not in ("weights", "activations", "both"):
        raise ConfigError(f"got attribute={side!r}; need 'weights', 'activations' or 'both'")
    if config.train or config.bisect is not None or config.perturb is not None:
        raise ConfigError("got attribute with train, bisect or perturb; need it alone; run them one after the other")
    source = resolve_model(config.model)
    ids_BT = torch.tensor([token_ids(config, source)], device=config.device)
    model = load_model(open_checkpoint(source), dtype=torch.float32, device=config.device)
    sites = projections(model)
    rounded: dict[str, nn.Module] = {site: _Rounded(model.get_submodule(site), side) for site in sites}
    rows, together = _attribute(model, ids_BT, rounded, progress)
    worst = max(rows, key=lambda row: row.logits_error)
    report = AttributeReport(
        side=side, model=config.model, rows=tuple(rows), logits_error=together,
        verdict=f"align --attribute {side}: logits' relative L2 error {together:.1e} with {len(rows)} projections "
        f"rounded to bf16 and multiplied in fp32; most by one: {worst.site} {worst.logits_error:.1e}",
        environment=capture_environment(config.device),
    )  # fmt: skip
    if config.output is not None:
        body = json.dumps(report.model_dump(), indent=1, default=str)
        write_atomic(config.output / "attribute.json", body + "\n")
    return report


def _attribute(
    model: nn.Module, ids_BT: Tensor, rounded: dict[str, nn.Module], progress: Progress
) -> tuple[list[AttributedSite], float]:
    """Return a row for each projection, and the logits' error with all of them rounded."""
    rows: list[AttributedSite] = []
    with torch.no_grad():
        with record(model, sites=list(rounded), keep="whole") as trace:
            reference = model(ids_BT)
        for site, module in rounded.items():
            given, exact = (trace.find(kind, site) for kind in ("input", "output"))
            assert given is not None
            assert exact is not None
            assert given.values is not None
            assert exact.values is not None
            own = error_statistics(module(given.values.to(ids_BT.device)).cpu(), exact.values)
            with substituted(model, {site: module}):
                whole = error_statistics(model(ids_BT), reference)
            rows.append(AttributedSite(site=site, output_error=own.relative_l2, logits_error=whole.relative_l2))
            progress(f"{len(rows)} of {len(rounded)}: {site}")
        with substituted(model, rounded):
            together = error_statistics(model(ids_BT), reference).relative_l2
    return rows, together


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)
