"""Three training steps of our model beside its twin: loss, every gradient, both moments, every parameter.

Place: ``microllm align --train``. Ours runs the trainer's own packed pass and ``ops.adamw``; the twin runs transformers
and torch's AdamW, both in fp32 on the same rows. A gradient that is nothing but rounding (a K bias has none: softmax
takes it away) is listed as negligible, and what Adam makes of it is not judged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from microllm.errors import EvidenceError
from microllm.evidence.environment import Environment, capture_environment
from microllm.evidence.journal import write_atomic
from microllm.evidence.tensor_statistics import Record
from microllm.evidence.trace import site_name
from microllm.io.resolve import resolve_model
from microllm.lab.align import AlignConfig, perturb_weight, token_ids
from microllm.lab.hf_twin import load_twin, twin_version
from microllm.model import Transformer
from microllm.ops.cross_entropy import IGNORE
from microllm.training import OptimizerConfig
from microllm.training.build import load_fp32
from microllm.training.dataset import Rows
from microllm.training.network import Copies, TrainNetwork
from microllm.training.optimizer import AdamW

NUM_STEPS, LENGTH, RATE = 3, 48, 1e-3
GATES = {"loss": 2e-6, "gradient": 2e-5, "exp_avg": 2e-5, "exp_avg_sq": 4e-5, "parameter": 5e-5}
"""Largest relative L2 error in fp32 of each kind of tensor. Adam moves an element whose gradient is rounding by a whole
rate either way: a parameter's gate leaves room for a few of those, and none for a weight decay that was left out."""
NEGLIGIBLE = 1e-6
"""A gradient whose norm is a smaller share of all gradients' is rounding."""


class TrainSite(Record):
    """One tensor at one step: its relative L2 error, and the gate."""

    step: int
    kind: str
    name: str
    error: float
    gate: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the gate."""
        return self.error <= self.gate


class AlignTrainReport(Record):
    """What was compared, and what of it is at fault."""

    passed: bool
    verdict: str
    model: str
    reference: str
    losses: tuple[float, ...]
    sites: tuple[TrainSite, ...]
    negligible: tuple[str, ...]
    perturbed: str
    environment: Environment


def run_align_train(config: AlignConfig) -> AlignTrainReport:
    """Take ``NUM_STEPS`` steps with both and return the report; write it where ``config.output`` says.

    Raises:
        EvidenceError: there are too few tokens to train on.
        MissingExtraError: transformers is not installed.
    """
    source = resolve_model(config.model)
    ids = token_ids(config, source)
    if len(ids) < 4:
        raise EvidenceError(f"got {len(ids)} tokens; need at least 4 to train on")
    documents = [torch.tensor(ids[i : i + LENGTH], device=config.device) for i in range(0, len(ids), LENGTH)]
    documents = [document for document in documents if len(document) > 1]
    model = load_fp32(source).to(config.device)
    twin = load_twin(source, device=config.device, attention=config.attention)
    perturbed = perturb_weight(model, config.perturb) if config.perturb is not None else ""
    sites, losses, negligible = _compare(model, twin, documents)
    worst = next((site for site in sites if not site.passed), None)
    counts = f"{len(sites)} tensors of {NUM_STEPS} steps"
    verdict = (
        f"align --train: pass — {counts}; worst gradient {_worst(sites, 'gradient'):.1e}, moments "
        f"{max(_worst(sites, 'exp_avg'), _worst(sites, 'exp_avg_sq')):.1e}, parameters {_worst(sites, 'parameter'):.1e}"
        if worst is None else
        f"align --train: FAIL — step {worst.step}: {worst.kind} {worst.name} {worst.error:.1e} (gate {worst.gate:.0e})"
    ) + f"; against {twin_version()}"  # fmt: skip
    report = AlignTrainReport(
        passed=worst is None, verdict=verdict, model=config.model, reference=twin_version(), losses=losses,
        sites=sites, negligible=negligible, perturbed=perturbed, environment=capture_environment(config.device),
    )  # fmt: skip
    if config.output is not None:
        write_atomic(Path(config.output) / "train.json", json.dumps(report.model_dump(), indent=1, default=str) + "\n")
    return report


def _compare(model: Transformer, twin: Any, documents: list[Tensor]) -> tuple[Any, Any, Any]:  # noqa: ANN401
    rows, count = _rows(documents)
    network = TrainNetwork(model, Copies(torch.float32), {}).train()
    ours, theirs = dict(model.named_parameters()), {site_name(n): p for n, p in twin.named_parameters()}
    theirs = {name: theirs[name] for name in ours}
    model.requires_grad_(requires_grad=True)
    twin.requires_grad_(requires_grad=True)
    settings = OptimizerConfig(learning_rate=RATE)
    optimizer = AdamW(ours, settings, seed=0)
    reference = torch.optim.AdamW([
        {"params": [p for p in theirs.values() if (p.dim() >= 2) == decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ], lr=RATE, betas=(settings.beta1, settings.beta2), eps=settings.eps)  # fmt: skip
    sites: list[TrainSite] = []
    losses: list[float] = []
    negligible: set[str] = set()

    def judge(step: int, kind: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (mine, other) in pairs.items():
            if name not in negligible:
                error = float((mine - other).norm() / other.norm().clamp(min=1e-30))
                sites.append(TrainSite(step=step, kind=kind, name=name, error=error, gate=GATES[kind]))

    for step in range(1, NUM_STEPS + 1):
        loss, other_loss = network(rows), _twin_loss(twin, documents) / count
        loss.backward()
        other_loss.backward()
        losses += [loss.item(), other_loss.item()]
        judge(step, "loss", {"loss": (loss.detach(), other_loss.detach())})
        least = NEGLIGIBLE * float(torch.nn.utils.get_total_norm([_grad(p) for p in theirs.values()]))
        negligible |= {name for name, p in theirs.items() if float(_grad(p).norm()) < least}
        judge(step, "gradient", {name: (_grad(p), _grad(theirs[name])) for name, p in ours.items()})
        optimizer.step(RATE, step)
        reference.step()
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = getattr(optimizer, kind)
            judge(step, kind, {name: (moments[name], reference.state[p][kind]) for name, p in theirs.items()})
        judge(step, "parameter", {name: (p.detach(), theirs[name].detach()) for name, p in ours.items()})
        for parameter in (*ours.values(), *theirs.values()):
            parameter.grad = None
    return tuple(sites), tuple(losses), tuple(sorted(negligible))


def _rows(documents: list[Tensor]) -> tuple[Rows, int]:
    """Return the documents laid end to end, and how many targets they have."""
    targets = torch.cat([torch.cat((d[1:], d.new_tensor([IGNORE]))) for d in documents])
    count = int((targets != IGNORE).sum())
    lengths = [len(d) for d in documents]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=targets.device)
    positions = torch.cat([torch.arange(n, device=targets.device) for n in lengths])
    weights = (targets != IGNORE).float() / count
    return Rows(torch.cat(documents), targets, positions, starts, weights, max(lengths)), count


def _twin_loss(twin: Any, documents: list[Tensor]) -> Tensor:  # noqa: ANN401
    """Return the summed loss of the documents, each run alone."""
    losses = [
        functional.cross_entropy(twin(document[None]).logits[0, :-1].float(), document[1:], reduction="sum")
        for document in documents
    ]
    return torch.stack(losses).sum()


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _worst(sites: tuple[TrainSite, ...], kind: str) -> float:
    return max((site.error for site in sites if site.kind == kind), default=0.0)
