"""Plans: what a door made of a host, in place or not, with its ledger, its receipt and the way back.

Place: ``attach`` and ``auto_swaps`` return one. Weights are freed only by ``consume``; ``finalize`` gives up the way
back as well.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from microllm.errors import GuardRefused, StructureError
from microllm.evidence.receipt import Receipt, append_receipt
from microllm.structures.build import Build
from microllm.structures.calibration import PrecisionSpec
from microllm.structures.decisions import store_of
from microllm.structures.formats import hollow
from microllm.structures.guard import BANDS, PROMPT_ELEMENTS, OnFail, Seat, joined_ledger
from microllm.structures.host import Host, look_up
from microllm.structures.judge import UnitResult
from microllm.structures.walk import LayerSite


class Plan:
    """Seats of one host. ``seats`` are those that are, or would be, in place.

    ``notes``: scheme, calibration, region, assumptions, memory. ``units`` and ``union``: what a gate saw.
    """

    def __init__(self, build: Build, notes: dict[str, Any]) -> None:
        self.build, self.notes = build, notes
        self.seats: list[Seat] = build.seats
        self.units: dict[str, UnitResult] = {}
        self.union: UnitResult | None = None
        self.left: dict[str, str] = {}
        self.receipt: Receipt | None = None
        self.active = False
        self._final = False
        self._consumed: dict[nn.Parameter, _Emptied] = {}

    @property
    def host(self) -> Host:
        """Return the host."""
        return self.build.host

    @property
    def precision_spec(self) -> dict[str, PrecisionSpec]:
        """Return how each weight and input of the seats is held, by "structure|path|slot or point"."""
        mine = {f"{seat.structure}|{seat.path}" for seat in self.seats}
        return {key: spec for key, spec in self.build.precision_spec.items() if key.rpartition("|")[0] in mine}

    def activate(self, on_guard_fail: OnFail = "fallback") -> Plan:
        """Put the seats in place.

        Raises:
            StructureError: there is none, the plan is final, or the model has been attached to by another plan.
        """
        if on_guard_fail not in ("fallback", "raise"):
            raise StructureError(f"got on_guard_fail={on_guard_fail!r}; need fallback or raise")
        if self._final or not self.seats:
            raise StructureError(
                f"got a plan of {len(self.seats)} seats, final: {self._final}; need seats to put in place"
            )
        if not self.active:
            if "_apply" in vars(self.host.model):
                raise StructureError(
                    "got a model that is attached already; need it bare; detach() the other plan first"
                )
            self.build.attachment.install(self.seats, on_guard_fail)
            self.active = True
        return self

    def detach(self) -> None:
        """Give the host back, exactly; once more does nothing.

        Raises:
            GuardRefused: it is final, or weights were consumed that no checkpoint holds: reload the model.
        """
        if self._final:
            raise GuardRefused("got detach() of a final plan; its host's weights are gone; reload the model")
        lost = [emptied.path for emptied in self._consumed.values() if emptied.checkpoint is None]
        if lost:
            raise GuardRefused(f"got detach() after consume() without a checkpoint ({lost[0]}, ...); reload the model")
        self.build.attachment.remove()
        for parameter, emptied in self._consumed.items():
            parameter.data = emptied.restored()
        self._consumed = {}
        self.active = False

    def report(self) -> dict[str, dict[str, Any]]:
        """Return each seat's ledger, by "structure|path"."""
        return {f"{seat.structure}|{seat.path}": seat.entry() for seat in self.seats}

    def summary(self) -> dict[str, Any]:
        """Return what the seats did together; ``clean`` is no fallback at all, and something ran."""
        return joined_ledger(self.seats)

    def raise_on_fallback(self) -> None:
        """Raise GuardRefused if any call fell back, with the reasons."""
        fell = {f"{s.structure}|{s.path}": dict(s.ledger.reasons) for s in self.seats if s.ledger.fallbacks}
        if fell:
            where, reasons = next(iter(fell.items()))
            raise GuardRefused(f"got {len(fell)} seats that fell back, {where} for {reasons}; need none; see report()")

    def manifest(self) -> dict[str, Any]:
        """Return the plan as JSON data: binding and structures with digests, seats, ledger, notes."""
        return {
            "binding": self.host.binding.manifest(), "notes": self.notes, "summary": self.summary(),
            "seats": self.report(), "receipt": None if self.receipt is None else self.receipt.digest,
        }  # fmt: skip

    def save_receipt(self, store: Path | None = None) -> Path:
        """Append the receipt to the store's chain; return the file.

        Raises:
            StructureError: the plan was not judged.
        """
        if self.receipt is None:
            raise StructureError("got a plan without a receipt; need one that attach() judged")
        path = store_of(store) / "receipts.jsonl"
        self.receipt = append_receipt(path, "attach", self.receipt.body, self.receipt.environment)
        return path

    def bound_bytes(self) -> int:
        """Return the bytes of the seats' own weights: what they hold besides the host's, each once."""
        host = {_place_of(p) for p in self.host.model.parameters()}
        matrices = [matrix for seat in self.seats for matrix in getattr(seat.bound, "matrices", ())]
        parts = [part for m in matrices for part in (*m.parts, m.bias) if part is not None]
        return _stored_bytes(part for part in parts if _place_of(part) not in host)

    def held_bytes(self) -> int:
        """Return the bytes of weights that host and seats hold together now."""
        return _stored_bytes(self.host.model.parameters()) + self.bound_bytes()

    def consume(self, checkpoint: Path | None = None) -> dict[str, int]:
        """Free the host's weights that seats hold in a format of their own; those run for any number of rows from then.

        With a safetensors file, or a directory of them, that holds the same bytes, ``detach`` reads them back; else it
        refuses. A weight that something else in the host shares (a tied head) is kept.

        Raises:
            StructureError: the plan is not in place, or the checkpoint does not hold the same bytes.
        """
        if not self.active:
            raise StructureError("got consume() of a plan that is not in place; need activate() first")
        claims: dict[nn.Parameter, str] = {}
        for seat in self.seats:
            if _is_quantised(seat):
                claims |= {p: path for path, p in self._weights_of(seat)}
        shared = Counter(id(p) for m in self.host.model.modules() for p in m.parameters(recurse=False))
        kept = [p for p in claims if shared[id(p)] > 1]
        freed = {p: path for p, path in claims.items() if shared[id(p)] == 1 and p not in self._consumed}
        emptied = {p: _Emptied(path, p, checkpoint) for p, path in freed.items()}
        for each in emptied.values():
            each.check()
        freed_bytes = sum(p.numel() * p.element_size() for p in freed)
        for parameter in emptied:
            parameter.data = hollow(parameter.data)
        self._consumed |= emptied
        for seat in self.seats:
            if _is_quantised(seat) and any(p in self._consumed for _, p in self._weights_of(seat)):
                seat.can_fall_back, seat.form = False, replace(seat.form, bands=frozenset(BANDS))
        self.build.attachment.refuse_state_dict()
        kept_bytes = sum(p.numel() * p.element_size() for p in kept)
        return {"freed_bytes": freed_bytes, "kept_bytes": kept_bytes, "held_bytes": self.held_bytes()}

    def finalize(self) -> dict[str, int]:
        """Consume, and give up the way back: fallbacks refuse and ``detach`` raises from now on."""
        freed = self.consume()
        for seat in self.seats:
            seat.can_fall_back = False
        self._final = True
        return freed

    def _weights_of(self, seat: Seat) -> list[tuple[str, nn.Parameter]]:
        regions = [r for r in self.host.binding.regions if r.structure.name == seat.structure]
        module = self.host.model.get_submodule(seat.path)
        found = []
        for place in {place for region in regions for place in region.weights.values()}:
            parameter = look_up(module, place)
            if isinstance(parameter, nn.Parameter) and parameter.dim() == 2:
                found.append((f"{seat.path}.{place}", parameter))
        return found


class _Emptied:
    """A parameter whose bytes were let go, and where the same bytes are."""

    def __init__(self, path: str, parameter: nn.Parameter, checkpoint: Path | None) -> None:
        self.path, self.checkpoint = path, checkpoint
        self._like, self._parameter = parameter.data.new_empty(0), parameter
        self._digest = _digest(parameter.data)

    def check(self) -> None:
        """Raise StructureError unless the checkpoint, if there is one, holds the same bytes."""
        if self.checkpoint is not None and _digest(self._read()) != self._digest:
            raise StructureError(
                f"got {self.checkpoint}, whose {self.path} is not the model's; need the file it came from"
            )

    def restored(self) -> Tensor:
        """Return the bytes, read back."""
        data = self._read()
        if _digest(data) != self._digest:
            raise StructureError(
                f"got {self.checkpoint}, whose {self.path} has changed since consume(); reload the model"
            )
        return data

    def _read(self) -> Tensor:
        assert self.checkpoint is not None, "only asked where there is one"
        files = [self.checkpoint] if self.checkpoint.is_file() else sorted(self.checkpoint.glob("*.safetensors"))
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in (self.path, self.path.removeprefix("model."), f"model.{self.path}"):
                    if name in tensors.keys():
                        return tensors.get_tensor(name).to(self._like.device, self._like.dtype)
        raise StructureError(f"got {self.checkpoint}, which holds no {self.path}; need the file the model came from")


def explain(plan: Plan) -> str:
    """Return what is bound, what a gate left out, what is kept, and what was refused, each with its reason."""
    lines = [f"{plan.host.binding.name}: scheme {plan.notes['scheme']['name']} ({plan.notes['scheme']['source']})"]
    lines.append(f"{'in place' if plan.active else 'not in place'}: {len(plan.seats)} seats")
    by_kind: dict[str, list[Seat]] = defaultdict(list)
    for seat in plan.seats:
        by_kind[seat.structure].append(seat)
    for name, seats in by_kind.items():
        kernels = Counter(str(seat.entry()["kernel"]) for seat in seats)
        bands = sorted({band for seat in seats for band in seat.form.bands})
        lines.append(f"  bound    {name} x {len(seats)} [{', '.join(bands)}]: {', '.join(kernels)}")
    region = plan.notes["region"]
    lines.append(f"  routed   decoder_layer_decode: {region['winner']} ({region['source']})")
    lines += [f"           fell through: {text}" for text in region["fell_through"]]
    walks = sum(isinstance(site, LayerSite) and site.covers(plan.seats) for site in plan.build.attachment.sites)
    if any(seat.prompt is not seat.bound and "prefill" in seat.form.bands for seat in plan.seats):
        lines.append(
            f"  prompts  of up to {PROMPT_ELEMENTS} elements: by torch's own calls, packed; a launch costs more"
        )
    if walks:
        lines.append(f"  walked   {walks} blocks: one look at a call for all seats of a block, its modules not called")
    lines += [f"  left out {name}: {reason}" for name, reason in plan.left.items()]
    kept: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, reason in plan.build.kept.items():
        name, _, path = key.partition("|")
        kept[name, reason].append(path)
    lines += [f"  kept     {name} x {len(paths)}: {reason}" for (name, reason), paths in kept.items()]
    refused: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in plan.build.refused:
        refused[each.structure, each.reason].append(each.path)
    lines += [
        f"  refused  {name} x {len(paths)} ({paths[0]}): {reason}" for (name, reason), paths in refused.items()
    ]  # fmt: skip
    lines += [f"  assumed  {text}" for text in plan.build.assumptions]
    return "\n".join(lines)


def _stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors' storages, each counted once."""
    return sum({_place_of(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _place_of(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _is_quantised(seat: Seat) -> bool:
    return any(matrix.format.name != "float" for matrix in getattr(seat.bound, "matrices", ()))


def _digest(data: Tensor) -> str:
    return hashlib.sha256(data.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
