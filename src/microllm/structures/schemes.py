"""Schemes: the one entry for precision: what is measured at calibration points, and what is done with each region.

Place: a door asks ``statistics`` before it calibrates and ``decide`` after. A scheme chooses formats; packing and
kernels are the implementations'. Keeping the host is a decision like any other, with its reason.

    none                      what only fuses; every product stays the host's
    bf16_structural           every region in the host's own dtype
    w8a16_decode              int8 weights, body and head, for rows of the decode band; longer ones go to the host
    w4a16_decode              int4 weights (groups of 32 below 1 B parameters, else 64), decode band; head as int8
    fp8_static                e4m3 weights and inputs, inputs by one calibrated scale
    fp8_static_keep_outliers  the same, but the host where an input's scale is above 20 times the median
    auto                      the fastest with a receipt on this device, else bf16_structural
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from torch import Tensor

from microllm.errors import StructureError
from microllm.structures.discovery import Candidate
from microllm.structures.formats import FormatName
from microllm.structures.guard import BANDS, Band

CEILING = 20.0
"""A point whose statistic is above this many medians is an outlier."""
SMALL_PARAMETERS = 1_000_000_000
PRODUCTS = ("decoder_ffn", "linear_proj", "qkv_pack", "lm_head")
FUSIONS = ("residual_norm", "qkv_rope", "qk_norm_rope", "attention_core")
DECODE: frozenset[Band] = frozenset(("decode",))


@dataclass(frozen=True, slots=True)
class Statistic:
    """What is measured at a point: "amax" or "second_moment", per "tensor" or "channel"; or "gram", per "tensor"."""

    name: str
    granularity: str = "tensor"


@dataclass(frozen=True, slots=True)
class Point:
    """A calibration point: the region it belongs to, its name, and the module whose input it is."""

    structure: str
    path: str
    name: str
    module: str

    @property
    def key(self) -> str:
        """Return path|name, by which reports speak of it."""
        return f"{self.path}|{self.name}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done with one region."""

    bind: bool
    reason: str
    format: FormatName = "float"
    group: int = 0
    bands: frozenset[Band] = frozenset(BANDS)
    amax: Mapping[str, float] = field(default_factory=dict)
    grams: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a scheme decides on: the regions, what was measured by "path|point", and the host's size."""

    candidates: Sequence[Candidate]
    values: Mapping[str, Any]
    num_parameters: int


class Scheme(Protocol):
    """A precision for a whole host."""

    @property
    def name(self) -> str:
        """Return what receipts call it."""
        ...

    def statistics(self, points: Sequence[Point]) -> Mapping[str, Statistic | None]:
        """Return what each point ("path|point") must be measured for; None, or left out, for nothing."""
        ...

    def decide(self, report: Report) -> Mapping[str, Decision]:
        """Return a decision for each region, by "structure|path"; a region left out is kept."""
        ...


def region_key(candidate: Candidate) -> str:
    """Return structure|path."""
    return f"{candidate.structure.name}|{candidate.path}"


@dataclass(frozen=True)
class Structural:
    """Floats as the host has them; ``products`` too, or only what fuses."""

    name: str
    products: bool = True

    def statistics(self, points: Sequence[Point]) -> Mapping[str, Statistic | None]:
        """Measure nothing."""
        return {}

    def decide(self, report: Report) -> Mapping[str, Decision]:
        """Bind what fuses, and products if asked."""
        bound = Decision(True, "in the host's dtype")
        kept = Decision(False, "scheme none keeps products in the host")
        return {
            region_key(c): bound if self.products or c.structure.name in FUSIONS else kept
            for c in report.candidates if c.structure.name != "decoder_block" or self.products
        }  # fmt: skip


@dataclass(frozen=True)
class WeightOnly:
    """Integer weights for decoding; ``gptq`` measures the inputs' Gram matrices and quantises by them.

    ``group``: of int8 columns (0: one scale a row), of int4 by the model's size where 0. ``head``: the head's format.
    """

    name: str
    format: FormatName
    group: int = 0
    head: FormatName | None = "int8"
    gptq: bool = False

    def statistics(self, points: Sequence[Point]) -> Mapping[str, Statistic | None]:
        """Measure Gram matrices for GPTQ, else nothing."""
        wanted = [p for p in points if self.gptq and p.structure in PRODUCTS and p.structure != "lm_head"]
        return {point.key: Statistic("gram") for point in wanted}

    def decide(self, report: Report) -> Mapping[str, Decision]:
        """Bind products for the decode band, and what fuses in the host's dtype."""
        decisions = {}
        for c in report.candidates:
            name = c.structure.name
            if name in FUSIONS:
                decision = Decision(True, "fuses, in the host's dtype")
            elif name == "lm_head" and self.head is None:
                decision = Decision(False, f"{self.name} keeps the head")
            else:
                format = self.head if name == "lm_head" and self.head is not None else self.format
                decision = self._product(c, format, report)
            decisions[region_key(c)] = decision
        return decisions

    def _product(self, c: Candidate, format: FormatName, report: Report) -> Decision:
        group = self.group
        if format == "int4":
            group = self.group or (32 if report.num_parameters < SMALL_PARAMETERS else 64)
        widths = {w.shape[1] for w in c.weights.values() if w.dim() == 2}
        if group and any(width % group for width in widths):
            return Decision(False, f"widths {sorted(widths)} do not divide into groups of {group}")
        grams = {name: report.values[f"{c.path}|{name}"] for name in c.points if f"{c.path}|{name}" in report.values}
        return Decision(True, f"{format} weights for decoding", format, group, DECODE, grams=grams)


@dataclass(frozen=True)
class Fp8Static:
    """e4m3 weights and inputs; with ``keep_outliers`` the host where an input is far above the others."""

    name: str
    keep_outliers: bool = False

    def statistics(self, points: Sequence[Point]) -> Mapping[str, Statistic | None]:
        """Measure the largest absolute input of each product."""
        return {p.key: Statistic("amax") for p in points if p.structure in PRODUCTS}

    def decide(self, report: Report) -> Mapping[str, Decision]:
        """Bind products with their inputs' scales, and what fuses in the host's dtype."""
        decisions, values = {}, [float(v) for v in report.values.values()]
        ceiling = CEILING * median(values) if values else 0.0
        for c in report.candidates:
            amax = {name: float(report.values.get(f"{c.path}|{name}", 0.0)) for name in c.points}
            above = {name: value for name, value in amax.items() if value > ceiling}
            if c.structure.name in FUSIONS:
                decision = Decision(True, "fuses, in the host's dtype")
            elif c.structure.name == "decoder_block":
                decision = Decision(False, "a chain has no fp8 form")
            elif not all(value > 0 for value in amax.values()):
                decision = Decision(False, f"inputs of amax {amax}: nothing to scale by")
            elif self.keep_outliers and above:
                decision = Decision(False, f"outliers {above} above {CEILING:g} medians ({ceiling:.3g})")
            else:
                decision = Decision(True, "e4m3 weights and inputs", "fp8", amax=amax)
            decisions[region_key(c)] = decision
        return decisions


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Structural("none", products=False),
        Structural("bf16_structural"),
        WeightOnly("w8a16_decode", "int8"),
        WeightOnly("w4a16_decode", "int4"),
        Fp8Static("fp8_static"),
        Fp8Static("fp8_static_keep_outliers", keep_outliers=True),
    )
}
"""The schemes by name; "auto" is one of them, by this device's receipts (``decisions.resolve_auto``)."""


def find_scheme(scheme: str | Scheme) -> Scheme:
    """Return the scheme of a name, or the object that was given.

    Raises:
        StructureError: an unknown name, or an object that lacks a method.
    """
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            raise StructureError(f"got scheme {scheme!r}; need auto or one of {', '.join(SCHEMES)}, or an object")
        return SCHEMES[scheme]
    for method in ("statistics", "decide"):
        if not callable(getattr(scheme, method, None)):
            raise StructureError(f"got scheme {scheme!r}; need methods statistics(points) and decide(report)")
    return scheme
