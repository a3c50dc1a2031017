"""Build: discover, calibrate, decide and bind, without judging: what both doors begin with.

Place: ``attach`` judges what this makes, ``auto_swaps`` hands it to a caller who does. The host is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from microllm.errors import StructureError
from microllm.evidence.timing import QUICK, TimingConfig
from microllm.structures.binding import load_bindings
from microllm.structures.block import PAGE_TOKENS
from microllm.structures.calibration import (
    PERCENTILE,
    Calibration,
    PrecisionSpec,
    calibrate,
    samples_of,
)
from microllm.structures.discovery import Candidate, Refusal, discover
from microllm.structures.guard import BANDS, Form, Ledger, OnFail, Seat, Turn
from microllm.structures.host import Host
from microllm.structures.impls import SMOKE_COSINE, Impl, Region, bind_region, cosine, load_impls, prompt_form
from microllm.structures.schemes import Decision, Point, Report, Scheme, region_key
from microllm.structures.sites import Attachment, AttentionSite, BlockSite, ModuleSite, PackSite, Scratch, Site
from microllm.structures.stack import new_cache
from microllm.structures.structure import Catalog, load_catalog
from microllm.structures.walk import LayerSite

MIN_FREE_BYTES = 512 * 1024 * 1024
"""Free memory of a GPU under which no more regions are bound."""
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True)
class AttachConfig:
    """How a door looks for regions, calibrates and judges.

    ``phases``: deployed phases by name, callables that give outputs, in place of those of a causal language model.
    ``catalog``, ``bindings``, ``impls``: folders whose files come beside the package's own. ``pins``: a candidate by
    region family. ``store``: where receipts and decisions are read and written (default: the project's cache).
    ``fp32``: the first sample's logits from the model in fp32, for the strict gate.
    """

    on_guard_fail: OnFail = "fallback"
    percentile: float = PERCENTILE
    max_samples: int | None = None
    timing: TimingConfig = QUICK
    phases: Mapping[str, Callable[[], Any]] | None = None
    catalog: Sequence[Path] = ()
    bindings: Sequence[Path] = ()
    impls: Sequence[Path] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    store: Path | None = None
    fp32: Callable[[], Any] | None = None

    def load_catalog(self) -> Catalog:
        """Return the structures."""
        return load_catalog(self.catalog)


@dataclass
class Build:
    """A host with seats made for it, none of them in place."""

    host: Host
    scheme: Scheme
    attachment: Attachment
    calibration: Calibration
    kept: dict[str, str]
    refused: list[Refusal]
    assumptions: list[str]
    precision_spec: dict[str, PrecisionSpec]
    token_ids: Tensor | None = None
    smoke: dict[str, float] = field(default_factory=dict)

    @property
    def seats(self) -> list[Seat]:
        """Return every seat, in the order of the host."""
        return self.attachment.seats


@torch.no_grad()
def build(
    model: nn.Module, forward: Any, scheme: Scheme, config: AttachConfig, *, observations: Sequence[Any] | None = None,
    heldout: bool = False, chain: bool = False,
) -> Build:  # fmt: skip
    """Make seats for what can be bound under ``scheme``; ``chain``: whole blocks too, as one chain of launches.

    Raises:
        StructureError: the host may not be attached to, no binding fits, or calibration fails.
    """
    samples = samples_of(forward, observations, config.max_samples)
    bindings, impls = load_bindings(config.load_catalog(), config.bindings), load_impls(config.impls)
    ids: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: ids.append(_ids(args, kwargs)), with_kwargs=True)  # pyright: ignore
    try:
        found = discover(model, bindings, samples[0])
    finally:
        hook.remove()
    points = [Point(c.structure.name, c.path, n, m) for c in found.candidates for n, m in c.points.items()]
    calibration = calibrate(
        model, points, scheme.statistics(points), samples, percentile=config.percentile, heldout=heldout
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    report = Report(candidates=found.candidates, values=calibration.values, num_parameters=num_parameters)
    decisions = scheme.decide(report)
    known = {region_key(c) for c in found.candidates}
    unknown = sorted(set(decisions) - known)
    if unknown:
        raise StructureError(f"got decisions for {unknown[:3]}; need of the regions that were found")
    maker = _Maker(found.host, impls, calibration, found.refused)
    kept = {}
    for candidate in found.candidates:
        decision = decisions.get(region_key(candidate), Decision(False, f"{scheme.name} says nothing of it"))
        if candidate.structure.name == "decoder_block" and not chain:
            decision = Decision(False, "decided by the region family decoder_layer_decode: seats")
        if decision.bind:
            maker.make(candidate, decision)
        else:
            kept[f"{candidate.structure.name}|{candidate.path}"] = decision.reason
    sites = maker.sites(c.path for c in found.candidates if c.structure.name == "decoder_block")
    return Build(
        host=found.host, scheme=scheme, attachment=Attachment(model, sites, maker.turn), calibration=calibration,
        kept=kept, refused=found.refused, assumptions=found.assumptions, precision_spec=maker.specs,
        token_ids=next((t for t in ids if t is not None), None), smoke=maker.smoke,
    )  # fmt: skip


class _Maker:
    """Makes seats from candidates and decisions, and sites from seats."""

    def __init__(self, host: Host, impls: Sequence[Impl], calibration: Calibration, refused: list[Refusal]) -> None:
        self._host, self._impls, self._calibration, self._refused = host, impls, calibration, refused
        self.turn, self._scratch = Turn(), Scratch()
        self.specs: dict[str, PrecisionSpec] = {}
        self.smoke: dict[str, float] = {}
        self._sites: list[Site] = []
        self._modules: dict[str, Seat] = {}
        self._blocks: dict[str, BlockSite] = {}
        self._attention: dict[str, dict[str, Seat]] = {}
        self._made: dict[Any, Any] = {}

    def make(self, candidate: Candidate, decision: Decision) -> None:
        """Bind one region; what stands against it is noted as a refusal."""
        c, like = candidate, self._host.weight
        region = Region(
            structure=c.structure, path=c.path, weights=c.weights, constants=c.constants, format=decision.format,
            group=decision.group, amax=decision.amax, grams=decision.grams, made=self._made,
        )  # fmt: skip
        try:
            if like.is_cuda and torch.cuda.mem_get_info(like.device)[0] < MIN_FREE_BYTES:
                raise StructureError(
                    f"got under {MIN_FREE_BYTES} free bytes on {like.device}; need more to pack weights"
                )
            example = {name: t.clone() for name, t in c.example.items()}
            bound, self.smoke[region_key(c)] = bind_region(region, self._impls, example)
            width = self._width(c)
            form = Form(dtype=like.dtype, device=like.device, width=width, bands=decision.bands)
            if c.structure.name == "decoder_block":
                form = replace(form, bands=frozenset(BANDS))
            seat = Seat(c.structure.name, c.path, bound, form, prompt_form(bound))
            self._place(c, seat, SMOKE_COSINE[decision.format])
        except StructureError as error:
            self._refused.append(Refusal(c.structure.name, c.path, str(error).removeprefix(f"{c.path}: ")))
            return
        self.specs |= precision_specs(c, decision, like.dtype, self._calibration)

    def _width(self, c: Candidate) -> int:
        x = c.example.get("x")
        return self._host.weight.shape[1] if x is None else x.shape[-1]

    def _place(self, c: Candidate, seat: Seat, floor: float) -> None:
        host, module = self._host, self._host.model.get_submodule(c.path)
        match c.structure.name:
            case "qkv_pack":
                siblings = [module.get_submodule(f"{part}_proj") for part in ("q", "k", "v")]
                self._modules[c.path] = seat
                self._sites.append(PackSite(siblings, seat, self.turn))
            case "qkv_rope" | "qk_norm_rope" | "attention_core":
                kind = "core" if c.structure.name == "attention_core" else "rope"
                alone = (seat, None) if kind == "rope" else (None, seat)
                check_attention(host, AttentionSite(host, c.path, alone, self.turn, Scratch()), floor)
                self._attention.setdefault(c.path, {})[kind] = seat
            case "decoder_block":
                assert c.layer is not None, "a block is one of the layers"
                site = BlockSite(host, c.path, c.layer, seat, self.turn)
                check_block(host, site, c.layer, floor)
                self._sites.append(site)
                self._blocks[c.path] = site
            case _:
                self._modules[c.path] = seat
                self._sites.append(ModuleSite(module, seat, self.turn))

    def sites(self, whole: Iterable[str]) -> list[Site]:
        """Return the sites of what was made; ``whole``: blocks whose parts flow as a walk runs them."""
        attention = {
            path: AttentionSite(self._host, path, (seats.get("rope"), seats.get("core")), self.turn, self._scratch)
            for path, seats in self._attention.items()
        }
        walks = [self._walk(path, attention[f"{path}.self_attn"]) for path in whole if f"{path}.self_attn" in attention]
        return [*self._sites, *attention.values(), *(walk for walk in walks if walk is not None)]

    def _walk(self, path: str, attention: AttentionSite) -> LayerSite | None:
        """Return the walk of a block; None where its norms or its rope are the host's, or it gives something else."""
        walk = LayerSite(self._host, path, self._modules, attention, self.turn)
        if not gives_same(self._host, walk):
            return None
        if path in self._blocks:
            self._blocks[path].own, walk.places = walk.forward, ()
        return walk


def check_attention(host: Host, site: AttentionSite, floor: float) -> None:
    """Raise unless an attention module gives what its class gives, on a few tokens without a cache.

    Raises:
        StructureError: it does not, or its class does not take such a call.
    """
    module, seat = site.places[0][0], site.seats[0]
    like = host.weight
    x = _drawn(1, 4, like.shape[1], like=like)
    angles = host.calls.angles(x, torch.arange(4, device=like.device)[None])
    call: dict[str, Any] = {"hidden_states": x, "position_embeddings": angles, "attention_mask": None}
    _check(seat, lambda: site.places[0][1](**call)[0], lambda: type(module).forward(module, **call)[0], floor)


def check_block(host: Host, site: BlockSite, index: int, floor: float) -> None:
    """Raise unless a block gives what its class gives, two tokens behind three in a cache.

    Raises:
        StructureError: it does not.
    """
    module, like = site.places[0][0], host.weight
    x = _drawn(1, 2, like.shape[1], like=like)
    positions = torch.tensor([[3, 4]], device=like.device)

    def through(forward: Callable[..., Any] | None) -> Tensor:
        cache = new_cache(host, 1, PAGE_TOKENS)
        for number, part in enumerate((cache.keys, cache.values)):
            part[index].copy_(_drawn(*part[index].shape, like=like, seed=number))
        cache.begin_tokens(positions)
        if forward is not None:
            vars(module)["forward"] = forward
        try:
            return host.calls.layer(module, x, host.calls.angles(x, positions), positions, cache)
        finally:
            vars(module).pop("forward", None)

    _check(site.seats[0], lambda: through(site.places[0][1]), lambda: through(None), floor)


def gives_same(host: Host, walk: LayerSite) -> bool:
    """Say whether a walk takes a plain call and gives what the host's block does: a few tokens without a cache."""
    module, like = walk.places[0][0], host.weight
    x = _drawn(1, 4, like.shape[1], like=like)
    positions = torch.arange(4, device=like.device)[None]
    call: dict[str, Any] = {
        "attention_mask": None, "position_ids": positions, "position_embeddings": host.calls.angles(x, positions)
    }  # fmt: skip
    wanted = type(module).forward(module, x, **call)
    for seat in walk.walked:
        seat.active = True
    try:
        if not (walk.wanted and isinstance(wanted, Tensor)):
            return False
        agreement = cosine(walk.forward(x, **call), wanted)
        counts = {seat.ledger.calls + seat.ledger.by_band for seat in walk.walked}
        return agreement >= min(SMOKE_COSINE.values()) and counts == {1}
    finally:
        for seat in walk.walked:
            seat.active, seat.ledger = False, Ledger()


def _check(seat: Seat, ours: Callable[[], Tensor], own: Callable[[], Tensor], floor: float) -> None:
    wanted = own()
    seat.active = True
    try:
        agreement = cosine(ours(), wanted)
        if seat.ledger.calls != 1:
            raise StructureError(
                f"got a call that the seat did not take ({seat.ledger.last_reason}); need one it takes"
            )
    finally:
        seat.active, seat.ledger = False, Ledger()
    if not agreement >= floor:
        raise StructureError(f"got cosine {agreement:.5f} with the host's own module; need {floor}: it does more")


def precision_specs(
    c: Candidate, decision: Decision, dtype: torch.dtype, calibration: Calibration
) -> dict[str, PrecisionSpec]:  # fmt: skip
    """Return the receipt of each weight and each input of a region, by "structure|path|slot or point"."""
    key, notes = region_key(c), calibration.notes
    float_spec = PrecisionSpec(dtype=_DTYPES[dtype])  # pyright: ignore[reportArgumentType]
    if decision.format == "float":
        return {f"{key}|{slot}": float_spec for slot in c.weights}
    quantised = {
        "int8": ("int8", "per_group" if decision.group else "per_channel", "symmetric"),
        "int4": ("int4", "per_group", "asymmetric"), "fp8": ("fp8_e4m3", "per_channel", "symmetric"),
    }[decision.format]  # fmt: skip
    method = "gptq" if decision.grams else "round to nearest, ranges searched" if decision.format == "int4" else "amax"
    found: dict[str, PrecisionSpec] = {}
    for slot, weight in c.weights.items():
        if weight.dim() != 2:
            found[f"{key}|{slot}"] = float_spec
            continue
        amax = weight.detach().float().abs().amax(1)
        found[f"{key}|{slot}"] = PrecisionSpec(
            dtype=quantised[0], granularity=quantised[1], scheme=quantised[2], group_size=decision.group or None,  # pyright: ignore
            scale=(float(amax.min()), float(amax.max())), source="weights", method=method,
        )  # fmt: skip
    for name in c.points:
        value = decision.amax.get(name)
        found[f"{key}|{name}"] = float_spec if value is None else PrecisionSpec(
            dtype="fp8_e4m3", granularity="per_tensor", scheme="symmetric", scale=value / 448.0, source="calibration",
            method=notes.method, samples=notes.samples, percentile=notes.percentile,
        )  # fmt: skip
    return found


def _ids(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    given = (kwargs.get("input_ids"), *args, *kwargs.values())
    return next((t for t in given if isinstance(t, Tensor) and t.dtype == torch.int64 and t.dim() == 2), None)


def _drawn(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
