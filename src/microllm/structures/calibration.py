"""Calibration: what activations are like at a structure's points, over samples, and the receipt of it.

Place: between discovery and a scheme's decision. Two levels: inside a sample the largest over calls, across samples a
percentile of the samples' own vectors, which are kept on the host. A point keeps a number, a vector, or for GPTQ a Gram
matrix, never an activation; points whose Gram matrices would take more than ``MAX_EXTRA_BYTES`` together are measured
in turns. A statistic that cannot be measured fails before any sample runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from microllm.errors import StructureError
from microllm.evidence.tensor_statistics import Record
from microllm.structures.schemes import CEILING, Point, Statistic

PERCENTILE = 99.9
MAX_EXTRA_BYTES = 64 * 1024 * 1024
_MEASURES = {("amax", "tensor"), ("amax", "channel"), ("second_moment", "channel"), ("gram", "tensor")}
Sample = Callable[[], object]


class PrecisionSpec(Record):
    """How one tensor is held: a receipt.

    ``scale`` is a number, or for weights the least and greatest of theirs; ``source`` says whether scales come from
    calibration, from the weights, or from nothing because the format has none.
    """

    dtype: Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8_e4m3"]
    granularity: Literal["per_tensor", "per_channel", "per_group", "none"] = "none"
    group_size: int | None = None
    scheme: Literal["symmetric", "asymmetric", "none"] = "none"
    scale: float | tuple[float, float] | None = None
    source: Literal["calibration", "weights", "host"] = "host"
    method: str = ""
    samples: int = 0
    percentile: float | None = None


class CalibrationNotes(Record):
    """What was calibrated, how, and how far samples differ; ``fit`` where no held-out sample judged it."""

    method: Literal["none", "single_sample", "percentile"]
    samples: int
    percentile: float
    points: int
    judged_on: Literal["heldout", "fit"]
    dispersion: dict[str, float]
    above_ceiling: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The reduced values by "path|point", and the notes."""

    values: Mapping[str, Any]
    notes: CalibrationNotes


def samples_of(forward: Any, observations: Sequence[Any] | None, max_samples: int | None) -> list[Sample]:
    """Return one call a sample, from a callable, a list of them, or a callable of one sample with observations.

    Raises:
        StructureError: something is not callable, or there is no sample.
    """
    calls: list[Sample]
    if observations is not None:
        if not callable(forward):
            raise StructureError(f"got forward {forward!r} with observations; need a callable of one sample")
        calls = [lambda each=each: forward(each) for each in observations]
    else:
        calls = list(forward) if isinstance(forward, list | tuple) else [forward]
    if not calls or not all(callable(call) for call in calls):
        raise StructureError("got no sample, or one that is no callable; need at least one forward")
    return calls[:max_samples]


def calibrate(
    model: nn.Module, points: Sequence[Point], wanted: Mapping[str, Statistic | None], samples: Sequence[Sample], *,
    percentile: float = PERCENTILE, heldout: bool = False,
) -> Calibration:  # fmt: skip
    """Run the samples and return what was measured.

    Raises:
        StructureError: an unknown statistic or point, a sample that misses a point, or a percentile out of range.
    """
    by_key = {point.key: point for point in points}
    measured = {key: statistic for key, statistic in wanted.items() if statistic is not None}
    for key, statistic in measured.items():
        if (statistic.name, statistic.granularity) not in _MEASURES:
            raise StructureError(f"got statistic {statistic}; need one of {sorted(_MEASURES)}; teach the collector it")
        if key not in by_key:
            raise StructureError(f"got a statistic for {key!r}; need a point that a bound region has")
    if not 0 <= percentile <= 100:
        raise StructureError(f"got percentile {percentile}; need 0 to 100")
    reduced: dict[str, Any] = {}
    for turn in _turns(model, by_key, measured):
        reduced |= _measure(model, by_key, turn, samples, percentile)
    numbers = {key: value for key, value in reduced.items() if isinstance(value, float)}
    method = "none" if not measured else "single_sample" if len(samples) == 1 else "percentile"
    notes = CalibrationNotes(
        method=method, samples=len(samples) if measured else 0, percentile=percentile, points=len(measured),
        judged_on="heldout" if heldout else "fit", dispersion=dispersion(list(numbers.values())),
        above_ceiling=above_ceiling(numbers),
    )  # fmt: skip
    return Calibration(values=reduced, notes=notes)


def accumulate(vectors: Sequence[np.ndarray], percentile: float) -> np.ndarray:
    """Return the percentile, element by element, of the samples' vectors; 100 is their maximum.

    Raises:
        StructureError: none, not of one length, or a percentile out of range.
    """
    if not vectors or any(v.ndim != 1 or v.shape != vectors[0].shape for v in vectors) or not 0 <= percentile <= 100:
        raise StructureError("got vectors that do not fit each other, or a percentile out of 0 to 100")
    return np.percentile(np.stack(vectors).astype(np.float64), percentile, axis=0).astype(np.float32)


def dispersion(values: Sequence[float]) -> dict[str, float]:
    """Return the greatest, the median and the ratio of the two over points."""
    if not values:
        return {}
    top, middle = float(np.max(values)), float(np.median(values))
    return {"max": top, "median": middle, "ratio": top / max(middle, 1e-12)}


def above_ceiling(values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the points above 20 medians, and warn of them."""
    limit = CEILING * float(np.median(list(values.values()))) if values else 0.0
    found = tuple(sorted(key for key, value in values.items() if value > limit))
    if found:
        warnings.warn(
            f"{len(found)} of {len(values)} calibration points are above {CEILING:g} medians, {found[0]} among them",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    return found


def stratified_indices(documents: Sequence[object], count: int) -> list[int]:
    """Return the indices of ``count`` items, spread over documents and, within each, over positions.

    ``documents[i]`` says which document item i is of; items of one are in the order of their positions.

    Raises:
        StructureError: ``count`` is below 1 or above the number of items.
    """
    if not 1 <= count <= len(documents):
        raise StructureError(f"got {count} of {len(documents)} items; need 1 to all of them")
    groups: dict[object, list[int]] = {}
    for i, document in enumerate(documents):
        groups.setdefault(document, []).append(i)
    num_groups = min(len(groups), max(count // 2, min(count, 3)))
    keys = list(groups)
    chosen = [groups[keys[i * len(keys) // num_groups]] for i in range(num_groups)]
    picked: list[int] = []
    for number, items in enumerate(chosen):
        share = count // num_groups + (number < count % num_groups)
        picked += [items[(2 * i + 1) * len(items) // (2 * share)] for i in range(min(share, len(items)))]
    rest = [i for i in range(len(documents)) if i not in set(picked)]
    missing = count - len(set(picked))
    picked += [rest[i * len(rest) // missing] for i in range(missing)]
    return sorted(set(picked))


def _turns(
    model: nn.Module, points: Mapping[str, Point], measured: Mapping[str, Statistic]
) -> list[dict[str, Statistic]]:  # fmt: skip
    """Return the points in groups whose statistics take at most ``MAX_EXTRA_BYTES`` together (or one alone)."""
    turns: list[dict[str, Statistic]] = [{}]
    used = 0
    for key, statistic in measured.items():
        width = int(next(model.get_submodule(points[key].module).parameters()).shape[-1])
        size = 4 * (width * width if statistic.name == "gram" else width)
        if used + size > MAX_EXTRA_BYTES and turns[-1]:
            turns.append({})
            used = 0
        turns[-1][key] = statistic
        used += size
    return turns


def _measure(
    model: nn.Module, points: Mapping[str, Point], wanted: Mapping[str, Statistic], samples: Sequence[Sample],
    percentile: float,
) -> dict[str, Any]:  # fmt: skip
    if not wanted:
        return {}
    per_sample: dict[str, list[np.ndarray]] = {key: [] for key in wanted}
    sums: dict[str, list[Any]] = {}
    current: dict[str, Tensor] = {}

    def watch(key: str, statistic: Statistic) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            rows = args[0].detach().reshape(-1, args[0].shape[-1]).float()
            if statistic.name == "amax":
                value = rows.abs().amax(0) if statistic.granularity == "channel" else rows.abs().amax()[None]
                current[key] = torch.maximum(current[key], value) if key in current else value
            else:
                value = rows.T @ rows if statistic.name == "gram" else rows.square().sum(0)
                total = sums.setdefault(key, [torch.zeros_like(value), 0])
                total[0] += value
                total[1] += len(rows)
                current[key] = value[:1]

        return hook

    with ExitStack() as stack, torch.no_grad():
        for key, statistic in wanted.items():
            module = model.get_submodule(points[key].module)
            stack.callback(module.register_forward_pre_hook(watch(key, statistic)).remove)
        for number, sample in enumerate(samples):
            current.clear()
            sample()
            missed = sorted(set(wanted) - set(current))
            if missed:
                raise StructureError(
                    f"got sample {number}, which misses {missed[:3]}; need samples that reach every point"
                )
            for key, value in current.items():
                if key not in sums:
                    per_sample[key].append(value.cpu().numpy())
    reduced: dict[str, Any] = {key: (total / count).cpu() for key, (total, count) in sums.items()}
    for key, vectors in per_sample.items():
        if vectors:
            vector = accumulate(vectors, percentile)
            reduced[key] = float(vector[0]) if len(vector) == 1 else torch.from_numpy(vector)
    return reduced
