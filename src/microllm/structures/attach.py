"""The doors: attach judged regions to a model, build them for a caller to judge, or bind one.

Place: what a user calls. ``attach`` discovers, calibrates, binds, judges unit by unit, judges their union again and
commits, or leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from microllm.errors import GateRefused, StructureError
from microllm.evidence.environment import capture_environment
from microllm.evidence.receipt import make_receipt
from microllm.evidence.tensor_statistics import error_statistics
from microllm.structures.binding import load_bindings
from microllm.structures.build import AttachConfig, build
from microllm.structures.calibration import samples_of
from microllm.structures.decisions import Resolution, resolve, resolve_auto, signature
from microllm.structures.formats import FormatName
from microllm.structures.guard import check_untouched
from microllm.structures.host import find_host, look_up
from microllm.structures.impls import Region, bind_region, cosine, load_impls
from microllm.structures.judge import Judge, Rules, UnitResult, logits_in, narrowed, phases_of, units_of
from microllm.structures.plan import Plan
from microllm.structures.schemes import Scheme, find_scheme
from microllm.structures.structure import Structure

MIN_SPEEDUP = 1.02


def auto_swaps(
    model: nn.Module, forward: Any, *, scheme: str | Scheme = "auto", observations: Sequence[Any] | None = None,
    config: AttachConfig | None = None,
) -> Plan:  # fmt: skip
    """Return a plan that ``activate`` puts in place; nothing is judged, and the model is as it was.

    ``forward``: a callable that runs the model once, a list of them, or with ``observations`` a callable of one sample.

    Raises:
        StructureError: the model may not be attached to, no binding fits it, or calibration fails.
    """
    return _planned(model, forward, scheme, config or AttachConfig(), observations, judged_on_others=False)


def attach(
    model: nn.Module, forward: Any, *, scheme: str | Scheme = "auto", observations: Sequence[Any] | None = None,
    heldout: Sequence[Any] | None = None, floors: Mapping[str, float] | None = None,
    min_speedup: float = MIN_SPEEDUP, config: AttachConfig | None = None,
) -> Plan:  # fmt: skip
    """Attach what passes its gate, and return the plan; if nothing does, the model is as it was and a warning says so.

    ``heldout``: samples (for ``forward`` with observations, else callables) that judge and never calibrate. ``floors``
    refuse. ``min_speedup``: 0 does not time.

    Raises:
        StructureError: as ``auto_swaps``.
    """
    config = config or AttachConfig()
    plan = _planned(model, forward, scheme, config, observations, judged_on_others=bool(heldout))
    judging = samples_of(forward, observations, config.max_samples)
    if heldout:
        judging = samples_of(forward, heldout, None) if observations is not None else samples_of(heldout, None, None)
        plan.build.token_ids = _ids_of(model, judging[0])
    with torch.no_grad():
        _judge_and_commit(
            plan, judging[0], Rules(floors=dict(floors or {}), min_speedup=min_speedup, timing=config.timing), config
        )
    return plan


def _bind(
    structure: Structure, module: nn.Module, calibration: Sequence[Any], floor: float,
    quantised: tuple[FormatName, int], config: AttachConfig,
) -> Bound:  # fmt: skip
    if not calibration:
        raise StructureError("got no calibration input; need at least one")
    samples = [each if isinstance(each, Mapping) else {structure.inputs[0].name: each} for each in calibration]
    weights, constants = _slots(structure, module, config)
    sizes = structure.check_weights(weights, structure.name)
    for sample in samples:
        structure.check_inputs(sample, sizes, structure.name)
    amax = {name: float(samples[0][structure.inputs[0].name].abs().amax()) for name in structure.points[:1]}
    format, group = quantised
    if format == "fp8" and "act_after_mul" in structure.points:
        amax["act_after_mul"] = float(_active(samples, weights).abs().amax())
    region = Region(
        structure=structure, path=structure.name, weights=weights, constants=constants, format=format, group=group,
        amax=amax,
    )  # fmt: skip
    with torch.no_grad():
        impls = load_impls(config.impls)
        bound, worst = bind_region(region, impls, {name: t.clone() for name, t in samples[0].items()})
        max_abs = 0.0
        for sample in samples:
            reference = structure.reference({n: t.clone() for n, t in sample.items()}, weights, constants)
            outputs = bound(*(t.clone() for t in sample.values()))
            for port, output in zip(
                structure.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=False
            ):
                worst = min(worst, cosine(output, reference[port.name]))
                max_abs = max(max_abs, error_statistics(output, reference[port.name]).max_abs)
    if not worst >= floor:
        raise GateRefused(
            f"{structure.id}: got cosine {worst:.5f} on {len(samples)} samples; need {floor}; use another format"
        )
    certification = {
        "structure": structure.id, "digest": structure.digest, "sizes": dict(sizes), "worst_cosine": worst,
        "max_abs": max_abs, "samples": len(samples), "floor": floor, "kernel": getattr(bound, "kernel", ""),
    }  # fmt: skip
    return Bound(bound, certification)


@dataclass(frozen=True, slots=True)
class Door:
    """One structure, ready to be bound to a region of any module."""

    structure: Structure

    def bind(
        self, module: nn.Module, calibration: Sequence[Any], *, floor: float = 0.999, format: FormatName = "float",
        group: int = 0, config: AttachConfig | None = None,
    ) -> Bound:  # fmt: skip
        """Return the region bound, judged against its reference on the calibration inputs.

        ``calibration``: tensors where the structure has one input, else mappings by input; several of them.

        Raises:
            GateRefused: the worst cosine with the reference is below ``floor``.
            StructureError: the module does not hold the structure's slots, or has no implementation.
        """
        return _bind(self.structure, module, calibration, floor, (format, group), config or AttachConfig())


def get(name: str, config: AttachConfig | None = None) -> Door:
    """Return the door of a structure, by name or name@version.

    Raises:
        StructureError: there is none of that name or version, or it is a pipeline.
    """
    structure = (config or AttachConfig()).load_catalog().get(name)
    if structure.kind == "pipeline":
        raise StructureError(f"got {structure.id}, a pipeline; need a region; decode_loop() runs it")
    return Door(structure)


class Bound(nn.Module):
    """A region bound by hand: called with the boundary's inputs by position; ``certification`` tells its judgement."""

    def __init__(self, bound: Any, certification: dict[str, Any]) -> None:
        super().__init__()
        self._bound, self.certification = bound, certification

    def forward(self, *inputs: Tensor) -> Any:
        """Return the boundary's outputs."""
        return self._bound(*inputs)


def _slots(structure: Structure, module: nn.Module, config: AttachConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a module's slots and constants, by the first binding whose paths it has."""
    for binding in load_bindings(config.load_catalog(), config.bindings):
        for region in binding.regions:
            if region.structure.name != structure.name:
                continue
            optional = {slot.name for slot in structure.weights if slot.optional}
            weights = {slot: look_up(module, place) for slot, place in region.weights.items()}
            extra = [place for place in region.without if look_up(module, place) is not None]
            missing = [slot for slot, t in weights.items() if t is None and slot not in optional]
            constants = {name: look_up(module, place) for name, place in region.constants.items()}
            if not missing and not extra and None not in constants.values():
                return {slot: t for slot, t in weights.items() if t is not None}, constants
    raise StructureError(
        f"got a {type(module).__name__} in which no binding finds {structure.id} (a slot is missing, or there is a "
        "bias without one); need its slots by the paths of a binding"
    )


def _active(samples: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor]) -> Tensor:
    x = samples[0]["x"]
    gate, up = (nn.functional.linear(x, weights[name]) for name in ("w_gate", "w_up"))
    return nn.functional.silu(gate) * up


def _planned(
    model: nn.Module, forward: Any, scheme: str | Scheme, config: AttachConfig, observations: Sequence[Any] | None, *,
    judged_on_others: bool,
) -> Plan:  # fmt: skip
    check_untouched(model)
    host = find_host(model, load_bindings(config.load_catalog(), config.bindings))
    chosen = Resolution(getattr(scheme, "name", str(scheme)), "caller")
    if scheme == "auto":
        chosen = resolve_auto(host, config.store)
        scheme = chosen.winner
    region = resolve("decoder_layer_decode", host, pin=config.pins.get("decoder_layer_decode"), store=config.store)
    made = build(
        model, forward, find_scheme(scheme), config, observations=observations, heldout=judged_on_others,
        chain=region.winner == "chain",
    )  # fmt: skip
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    notes: dict[str, Any] = {
        "scheme": {"name": chosen.winner, "source": chosen.source, "fell_through": list(chosen.fell_through)},
        "region": {"winner": region.winner, "source": region.source, "fell_through": list(region.fell_through)},
        "calibration": made.calibration.notes.model_dump(mode="json"), "assumed": list(made.assumptions),
        "signature": signature(host),
    }  # fmt: skip
    plan = Plan(made, notes)
    notes["memory"] = {"host_bytes": weights, "bound_bytes": plan.bound_bytes()}
    return plan


def _judge_and_commit(plan: Plan, sample: Callable[[], Any], rules: Rules, config: AttachConfig) -> None:
    made = plan.build
    judge = Judge(made, phases_of(made, sample, config.phases), rules)
    winners = []
    for name, seats in units_of(made.seats).items():
        result = judge.judge(name, seats)
        plan.units[name] = result
        reasons = [f"{phase.phase}: {'; '.join(phase.reasons)}" for phase in result.phases if phase.reasons]
        if reasons or not result.phases:
            plan.left[name] = "; ".join(reasons) or "no phase of its band"
        if result.bands:
            narrowed(seats, result.bands)
            winners += seats
    plan.seats = winners
    if winners:
        plan.union = judge.judge("union", winners)
        reasons = [f"{phase.phase}: {'; '.join(phase.reasons)}" for phase in plan.union.phases if phase.reasons]
        if reasons:
            plan.left["union"] = "; ".join(reasons)
            plan.seats = []
    plan.receipt = _receipt(plan, judge, rules, _strict_fp32(plan, sample, config))
    for seat in plan.seats:
        seat.ledger = type(seat.ledger)()
    if plan.seats:
        plan.activate(config.on_guard_fail)
    else:
        warnings.warn(
            "nothing was attached: no region passed its gate; explain(plan) says why", RuntimeWarning, stacklevel=3
        )


def _strict_fp32(plan: Plan, sample: Callable[[], Any], config: AttachConfig) -> dict[str, float] | None:
    """Return the union's largest and RMS error of logits against the model in fp32, where that is given."""
    if config.fp32 is None or not plan.seats:
        return None
    wanted = logits_in(config.fp32()).float()
    plan.build.attachment.install(plan.seats)
    try:
        error = error_statistics(logits_in(sample()).float(), wanted)
    finally:
        plan.build.attachment.remove()
    return {"max_abs": error.max_abs, "rms": error.rms}


def _receipt(plan: Plan, judge: Judge, rules: Rules, fp32: dict[str, float] | None) -> Any:
    device = str(plan.host.weight.device)
    structures = {r.structure.id: r.structure.digest for r in plan.host.binding.regions}
    union: UnitResult | None = plan.union
    body = {
        "scheme": plan.notes["scheme"]["name"], "signature": plan.notes["signature"], "notes": plan.notes,
        "binding": plan.host.binding.name, "structures": structures, "floors": dict(rules.floors),
        "min_speedup": rules.min_speedup, "null_identical": judge.null_identical, "fp32": fp32,
        "units": {name: unit.model_dump(mode="json") for name, unit in plan.units.items()},
        "union": None if union is None else union.model_dump(mode="json"), "left": plan.left,
        "kept": plan.build.kept, "refused": [[r.structure, r.path, r.reason] for r in plan.build.refused],
        "seats": [f"{seat.structure}|{seat.path}" for seat in plan.seats],
        "precision": {key: spec.model_dump(mode="json") for key, spec in plan.precision_spec.items()},
    }  # fmt: skip
    return make_receipt("attach", body, capture_environment(device))


def _ids_of(model: nn.Module, sample: Callable[[], object]) -> Tensor | None:
    """Return the token ids that a sample runs."""
    found: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = (kwargs.get("input_ids"), *args, *kwargs.values())
        found.extend(t for t in given if isinstance(t, Tensor) and t.dtype == torch.int64 and t.dim() == 2)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            sample()
    finally:
        handle.remove()
    return found[0] if found else None
