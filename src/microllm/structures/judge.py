"""The gate of an attach: unit by unit and phase by phase, does it still choose the same, and is it faster.

Place: between the build and the commit. A unit is a structure; under fp8 a producer and the consumers of its scale are
one. A phase is a deployed form: of a causal language model the prompt, and decoding of 1 and of 8 rows over a warm
cache. The host proves itself first (its rerun is bit-identical) and each unit is proved to be seen (the same numbers in
wrong places move the metric). Decides by the caller's floors and the clock; bands warn.

Axes:    B = rows, T = tokens, N = judged positions, V = vocabulary
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from microllm.errors import StructureError
from microllm.evidence.gates import JUDGED, MOVED, STRICT, GateReport, Kind, band, gate_metrics, refusals
from microllm.evidence.tensor_statistics import Record, same_bits
from microllm.evidence.timing import PairedTiming, TimingConfig, time_pairs
from microllm.step import Graphs
from microllm.structures.build import Build
from microllm.structures.guard import BANDS, Band, Seat, joined_ledger
from microllm.structures.host import Host
from microllm.structures.sites import Site
from microllm.structures.stack import forced_logits, logits_of, new_cache, run_prompt, run_tokens

NUM_FORCED = 32
"""Tokens that a decode phase is judged on, a row."""
FP8_CHAIN = ("residual_norm", "decoder_ffn", "qkv_pack")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One deployed form: the outputs that are judged, the call that is timed, and the band of its rows.

    Shapes:  distribution: outputs (N, V), targets (N,)
    """

    name: str
    band: Band
    kind: Kind
    outputs: Callable[[], Tensor]
    action: Callable[[], object]
    targets: Tensor | None = None


class PhaseResult(Record):
    """What one unit was in one phase; no timing where the caller asked for none.

    Units:   ``ratio`` is the host's time over the unit's, ``lower`` its one-sided bound
    """

    phase: str
    gate: GateReport
    strict: tuple[str, ...]
    ratio: float | None
    lower: float | None
    ledger: dict[str, Any]
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Return whether nothing stands against it."""
        return not self.reasons


class UnitResult(Record):
    """A unit's phases, and the bands that it keeps."""

    unit: str
    seats: int
    phases: tuple[PhaseResult, ...]
    bands: tuple[Band, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What decides: the caller's floors and the least speed-up (0: not timed)."""

    floors: Mapping[str, float]
    min_speedup: float
    timing: TimingConfig


class Judge:
    """The host's own outputs a phase, proved once, and what units are beside them."""

    def __init__(self, build: Build, phases: Sequence[Phase], rules: Rules) -> None:
        self.build, self.phases, self.rules = build, phases, rules
        self._references: dict[str, Tensor] = {}
        self.null_identical: dict[str, bool] = {}
        for phase in phases:
            reference = phase.outputs().detach().clone()
            self._references[phase.name] = reference
            self.null_identical[phase.name] = same_bits(reference, phase.outputs())

    def judge(self, unit: str, seats: Sequence[Seat]) -> UnitResult:
        """Judge seats together in each phase of their bands."""
        results: list[PhaseResult] = []
        bands: set[Band] = {b for seat in seats for b in seat.form.bands}
        for phase in self.phases:
            if phase.band in bands:
                results.append(self._phase(phase, seats))
        kept: list[Band] = [
            b for b in BANDS if b in bands and (own := self._of_band(results, b)) and all(r.passed for r in own)
        ]
        return UnitResult(unit=unit, seats=len(seats), phases=tuple(results), bands=tuple(kept))

    def _of_band(self, results: Iterable[PhaseResult], wanted: Band) -> list[PhaseResult]:
        names = {phase.name for phase in self.phases if phase.band == wanted}
        return [result for result in results if result.phase in names]

    def _phase(self, phase: Phase, seats: Sequence[Seat]) -> PhaseResult:
        reference, judged = self._references[phase.name], JUDGED[phase.kind]
        before = [(seat.ledger.calls, seat.ledger.fallbacks) for seat in seats]
        with installed(self.build, seats):
            candidate = phase.outputs().detach().clone()
            ran = sum(seat.ledger.calls - calls for seat, (calls, _) in zip(seats, before, strict=True))
            fell = sum(seat.ledger.fallbacks - falls for seat, (_, falls) in zip(seats, before, strict=True))
            for seat in seats:
                seat.broken = True
            broken = phase.outputs().detach()
        metrics = gate_metrics(phase.kind, candidate, reference, phase.targets)
        control = getattr(gate_metrics(phase.kind, broken, reference, phase.targets), judged)
        gate = GateReport(
            kind=phase.kind, metrics=metrics, band=band(judged, getattr(metrics, judged)),
            null_identical=self.null_identical[phase.name], control=control, control_moved=not control >= 1.0 - MOVED,
            refused=refusals(metrics, self.rules.floors),
        )  # fmt: skip
        reasons = list(gate.reasons) if ran else [f"not one call of it in {phase.name}"]
        if fell:
            reasons.append(f"{fell} calls fell back to the host; a figure with fallbacks is none")
        timing = self._timed(phase, seats) if self.rules.min_speedup and not reasons else None
        if timing is not None:
            reasons += _slow(timing, self.rules.min_speedup)
        if gate.band == "low":
            warnings.warn(
                f"{seats[0].structure} in {phase.name}: {judged} {getattr(metrics, judged):.4f}, calibrated by "
                f"{self.build.calibration.notes.method}", RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        return PhaseResult(
            phase=phase.name, gate=gate, strict=_strict(metrics), ratio=None if timing is None else timing.ratio,
            lower=None if timing is None else timing.lower_ratio, ledger=joined_ledger(seats), reasons=tuple(reasons),
        )  # fmt: skip

    def _timed(self, phase: Phase, seats: Sequence[Seat]) -> PairedTiming:
        """Time a phase with the seats and without: captured on a GPU, as it is deployed there."""
        device = self.build.host.weight.device
        if device.type == "cuda" and phase.band == "decode":
            graphs = Graphs(device)
            own = graphs.capture(phase.action)
            with installed(self.build, seats):
                ours = graphs.capture(phase.action)
            return time_pairs(own, ours, device=str(device), config=self.rules.timing)
        sites: list[Site] = []

        def without() -> None:
            for site in sites:
                site.remove()
            phase.action()

        def with_seats() -> None:
            for site in sites:
                site.install()
            phase.action()

        with installed(self.build, seats), torch.no_grad():
            sites += [site for site in self.build.attachment.sites if site.wanted]
            return time_pairs(without, with_seats, device=str(device), config=self.rules.timing)


@contextmanager
def installed(build: Build, seats: Iterable[Seat]) -> Iterator[None]:
    """Have exactly these seats in place while the context is open."""
    build.attachment.install(seats)
    try:
        yield
    finally:
        build.attachment.remove()


def units_of(seats: Sequence[Seat]) -> dict[str, list[Seat]]:
    """Return the seats by gate unit."""
    is_fp8 = any("fp8" in seat.entry()["kernel"] or "scaled_mm" in seat.entry()["kernel"] for seat in seats)
    units: dict[str, list[Seat]] = {}
    for seat in seats:
        shared = is_fp8 and seat.structure in FP8_CHAIN
        units.setdefault("fp8: " + " -> ".join(FP8_CHAIN) if shared else seat.structure, []).append(seat)
    return units


def phases_of(build: Build, sample: Callable[[], Any], given: Mapping[str, Callable[[], Any]] | None) -> list[Phase]:
    """Return the deployed phases: those given, else those of a causal language model.

    Raises:
        StructureError: an output holds no tensor.
    """
    if given is not None:
        return [_given(name, call) for name, call in given.items()]
    ids_BT = build.token_ids
    found = logits_in(sample())
    shifted = ids_BT is not None and found.dim() == 3 and found.shape[:2] == ids_BT.shape and ids_BT.shape[1] > 1

    def prompt() -> Tensor:
        logits = logits_in(sample())
        return (logits[:, :-1] if shifted else logits).reshape(-1, logits.shape[-1])

    targets = ids_BT[:, 1:].flatten() if shifted and ids_BT is not None else None
    band: Band = "prefill" if prompt().shape[0] >= 8 else "decode"
    phases = [Phase(name="prefill", band=band, kind="distribution", outputs=prompt, action=sample, targets=targets)]
    if ids_BT is None or ids_BT.shape[1] < 4:
        return phases
    return phases + [_decode(build.host, ids_BT, rows) for rows in (1, 8)]


def _decode(host: Host, ids_BT: Tensor, num_rows: int) -> Phase:
    """Return the phase of decoding: given tokens forced one a step behind a prompt of half of them."""
    T = ids_BT.shape[1]
    ids = torch.stack([ids_BT[i % len(ids_BT)].roll(-(i // len(ids_BT)) * (T // 8)) for i in range(num_rows)])
    ids = ids[:, : T // 2 + NUM_FORCED + 1]
    num_prompt = T // 2
    cache = new_cache(host, num_rows, T)
    with torch.no_grad():
        run_prompt(host, ids[:, :num_prompt], cache)
    positions = torch.full((num_rows, 1), num_prompt, device=ids.device)
    token = ids[:, num_prompt : num_prompt + 1].contiguous()

    def step() -> Tensor:
        return logits_of(host, run_tokens(host, token, positions, cache))

    def outputs() -> Tensor:
        with torch.no_grad():
            return forced_logits(host, ids[:, :-1], num_prompt).flatten(0, 1)

    return Phase(
        name=f"decode_{num_rows}", band="decode", kind="distribution", outputs=outputs, action=step,
        targets=ids[:, num_prompt + 1 :].flatten(),
    )  # fmt: skip


def _given(name: str, call: Callable[[], Any]) -> Phase:
    found = logits_in(call())
    rows = found.numel() // found.shape[-1]
    kind: Kind = "distribution" if found.dim() > 1 and not isinstance(call(), Tensor) else "values"

    def outputs() -> Tensor:
        got = logits_in(call())
        return got.reshape(-1, got.shape[-1]) if kind == "distribution" else got

    return Phase(name=name, band="decode" if rows <= 8 else "prefill", kind=kind, outputs=outputs, action=call)


def logits_in(output: Any) -> Tensor:
    """Return the logits of an output: a tensor, a mapping or object with ``logits``, or the first of a tuple.

    Raises:
        StructureError: there is no tensor in it.
    """
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values()), None))
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", output)
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise StructureError(f"got a forward that returns {type(output).__name__}; need a tensor, or logits in it")
    return output


def narrowed(seats: Iterable[Seat], bands: Sequence[Band]) -> None:
    """Leave seats the bands that their unit keeps."""
    for seat in seats:
        seat.form = replace(seat.form, bands=seat.form.bands & set(bands))


def _strict(metrics: Any) -> tuple[str, ...]:
    """Return what of the strict gate is not met, in words."""
    values = {name: getattr(metrics, name) for name in STRICT}
    return refusals(metrics, {name: limit for name, limit in STRICT.items() if values[name] is not None})


def _slow(timing: PairedTiming, least: float) -> list[str]:
    """Return why a timing is not enough, in words."""
    found = []
    if not timing.ratio >= least:
        found.append(f"{timing.ratio:.3f} times the host's speed; need {least}")
    elif not timing.lower_ratio > 1:
        found.append(
            f"{timing.ratio:.3f} times the host's speed, lower bound {timing.lower_ratio:.3f}; need it above 1"
        )
    return found
