"""Correctness gates: is a candidate's output still the host's, by value or by what it would choose.

Place: before any timing (lab, tuner, structures). Bands say how good; they warn. The caller's floors refuse.
A gate first proves itself: the host run again is bit-identical (null check), and a planted break moves the metric
(negative control). NaN passes nothing. Does not run models: it is given callables.

    values          cosine ≥ 0.999 pass, ≥ 0.995 warn, else low; max-abs, relative L2 and RMS beside it
    distribution    teacher-forced top-1 agreement ≥ 0.95 pass, ≥ 0.85 warn, else low; KL, perplexity change beside it
    strict          logits: max-abs ≤ 0.1, RMS ≤ 0.02, tokens equal (``STRICT``)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor
from torch.nn import functional

from microllm.errors import EvidenceError
from microllm.evidence.logits import compare_logits
from microllm.evidence.tensor_statistics import Record, error_statistics, same_bits

Band = Literal["pass", "warn", "low"]
Kind = Literal["values", "distribution"]
JUDGED: dict[Kind, str] = {"values": "cosine", "distribution": "top1_agreement"}
BANDS: dict[str, tuple[float, float]] = {"cosine": (0.999, 0.995), "top1_agreement": (0.95, 0.85)}
STRICT: dict[str, float] = {"max_abs": 0.1, "rms": 0.02, "top1_agreement": 1.0}
MOVED = 1e-4
"""A planted break must lower the judged metric by more than this below a perfect 1."""


class Metrics(Record):
    """What a gate measured; a metric that its kind does not have is None.

    Units:   KL in nats; ``perplexity_change`` is candidate's over reference's, minus 1
    Numbers: fp64; cosine, agreement and KL are NaN as soon as the candidate holds a NaN or an infinity
    """

    cosine: float | None = None
    top1_agreement: float | None = None
    kl: float | None = None
    perplexity_change: float | None = None
    max_abs: float
    relative_l2: float
    rms: float
    num_non_finite: int
    num_rows: int


class GateReport(Record):
    """What a gate saw and decided; ``refused`` names each floor that was not reached."""

    kind: Kind
    metrics: Metrics
    band: Band
    null_identical: bool
    control: float
    control_moved: bool
    refused: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Return whether the gate proved itself and no floor refused."""
        return self.null_identical and self.control_moved and not self.refused

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why it did not pass, in words."""
        found = list(self.refused)
        if not self.null_identical:
            found.append("null check: the host run again differs from itself; make it deterministic first")
        if not self.control_moved:
            found.append("negative control: a planted break does not move the metric; the gate sees nothing")
        return tuple(found)


def gate_metrics(kind: Kind, candidate: Tensor, reference: Tensor, targets: Tensor | None = None) -> Metrics:
    """Return the metrics that a gate of ``kind`` judges by; ``targets`` (the tokens that follow) give perplexity.

    Shapes:  values: any, equal; distribution: logits (N, V) of the same tokens, targets (N,)

    Raises:
        EvidenceError: the shapes do not fit, or there is no element.
    """
    logits = kind == "distribution"
    fits = candidate.shape == reference.shape and reference.numel() and (reference.ndim == 2 or not logits)
    if not fits or (targets is not None and targets.shape != reference.shape[:1]):
        shapes = f"{tuple(candidate.shape)} and {tuple(reference.shape)}"
        raise EvidenceError(
            f"got outputs {shapes}; need equal shapes with elements, logits (N, V) with N targets if any"
        )
    compared = compare_logits(candidate, reference) if logits else None
    error = compared.error if compared else error_statistics(candidate, reference)
    spoiled = math.nan if error.non_finite or error.special_mismatches else 0.0
    change = None if targets is None else _mean_nll(candidate, targets) - _mean_nll(reference, targets)
    return Metrics(
        cosine=None if compared else 1.0 - error.cosine_deficit + spoiled,
        top1_agreement=compared.top1_agreement + spoiled if compared else None,
        kl=compared.mean_kl + spoiled if compared else None,
        perplexity_change=None if change is None else math.expm1(change), max_abs=error.max_abs + spoiled,
        relative_l2=error.relative_l2 + spoiled, rms=error.rms + spoiled,
        num_non_finite=error.non_finite, num_rows=reference.shape[0] if reference.ndim else 1,
    )  # fmt: skip


def band(metric: str, value: float | None) -> Band:
    """Return the band of a judged metric; NaN and None are low."""
    passes, warns = BANDS[metric]
    if value is None or not value >= warns:
        return "low"
    return "pass" if value >= passes else "warn"


def refusals(metrics: Metrics, floors: Mapping[str, float]) -> tuple[str, ...]:
    """Return one sentence for each floor that ``metrics`` does not reach.

    For ``cosine`` and ``top1_agreement`` a floor is the least allowed, for the other metrics the most.

    Raises:
        EvidenceError: a floor's name is no metric.
    """
    found = []
    for name, limit in floors.items():
        if name not in Metrics.model_fields:
            raise EvidenceError(f"got a floor for {name!r}; need one of {', '.join(Metrics.model_fields)}")
        value = getattr(metrics, name)
        higher = name in BANDS
        if value is None or not (value >= limit if higher else value <= limit):
            found.append(f"{name} is {value}; need {'at least' if higher else 'at most'} {limit}")
    return tuple(found)


def run_gate(
    kind: Kind,
    *,
    host: Callable[[], Tensor],
    candidate: Callable[[], Tensor],
    broken: Callable[[], Tensor],
    floors: Mapping[str, float],
    targets: Tensor | None = None,
) -> GateReport:
    """Run the null check, the candidate and the planted break, and report.

    ``broken`` returns the output with a fault planted where the candidate replaces the host.
    """
    reference = host().detach().clone()
    null_identical = same_bits(reference, host())
    metrics = gate_metrics(kind, candidate(), reference, targets)
    judged = JUDGED[kind]
    control = getattr(gate_metrics(kind, broken(), reference, targets), judged)
    return GateReport(
        kind=kind, metrics=metrics, band=band(judged, getattr(metrics, judged)), null_identical=null_identical,
        control=control, control_moved=not control >= 1.0 - MOVED, refused=refusals(metrics, floors),
    )  # fmt: skip


def _mean_nll(logits_NV: Tensor, targets_N: Tensor) -> float:
    rows = max(1, (1 << 20) // logits_NV.shape[1])
    total = 0.0
    for logits, targets in zip(logits_NV.split(rows), targets_N.split(rows), strict=True):
        total += functional.cross_entropy(logits.double(), targets.long(), reduction="sum").item()
    return total / logits_NV.shape[0]
