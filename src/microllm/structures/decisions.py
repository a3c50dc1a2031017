"""Decisions: where hardware disagrees about the form of a span of blocks, what was measured to be best on this device.

Place: a door asks ``resolve`` which candidate of a family to bind, and for "auto" which scheme; ``record`` writes what
a production-form run found. A bind reads receipts and never experiments: pin > decision > seats. A name that is
unknown or lacks something falls through, with the reason on the trail. Entries of other devices are carried, inert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from microllm.errors import StructureError
from microllm.evidence.environment import read_device_name
from microllm.evidence.gates import BANDS
from microllm.evidence.journal import append_line, canonical_json, read_lines, sha256_hex
from microllm.evidence.receipt import now_utc, read_receipts, verify_chain
from microllm.evidence.tensor_statistics import Record
from microllm.structures.host import Host
from microllm.structures.schemes import SCHEMES

SEATS = "seats"


@dataclass(frozen=True, slots=True)
class RegionCandidate:
    """One form of a span; ``missing`` says what a host or device lacks for it, in words."""

    name: str
    missing: Callable[[Host], Sequence[str]]


@dataclass(frozen=True, slots=True)
class RegionFamily:
    """A span that has several forms; "seats", each region on its own, is always one."""

    name: str
    candidates: tuple[RegionCandidate, ...]

    def names(self) -> list[str]:
        """Return the candidates' names."""
        return [candidate.name for candidate in self.candidates]


def _missing_for_chain(host: Host) -> list[str]:
    ids = {region.structure.name for region in host.binding.regions}
    return [] if "decoder_block" in ids else [f"binding {host.binding.name} has no decoder_block"]


FAMILIES: dict[str, RegionFamily] = {
    "decoder_layer_decode": RegionFamily(
        "decoder_layer_decode",
        (RegionCandidate(SEATS, lambda host: ()), RegionCandidate("chain", _missing_for_chain)),
    )
}
"""The region families by name."""


class DecisionEntry(Record):
    """One decision: on a device, for a host's signature ("" for any), with what was measured.

    Units:   times in milliseconds
    """

    device: str
    family: str
    signature: str
    winner: str
    times_ms: dict[str, float]
    date: str
    digest: str = ""

    def compute_digest(self) -> str:
        """Return the sha256 of everything but the digest."""
        content = self.model_dump(mode="json")
        del content["digest"]
        return sha256_hex(canonical_json(content))


@dataclass(frozen=True, slots=True)
class Resolution:
    """What is bound, on whose word, and what fell through before it."""

    winner: str
    source: str
    fell_through: tuple[str, ...] = ()


def signature(host: Host) -> str:
    """Return what a decision holds for: the host's shapes, not its name."""
    shapes = [f"{name}{tuple(p.shape)}{p.dtype}" for name, p in host.layers[0].named_parameters()]
    return sha256_hex(canonical_json([host.binding.protocol, len(host.layers), list(host.weight.shape), shapes]))[:16]


def store_of(store: Path | None) -> Path:
    """Return the folder of receipts and decisions."""
    if store is not None:
        return store
    from microllm.io.demo import cache_dir  # noqa: PLC0415  brings what only a default folder needs

    return cache_dir() / "structures"


def record(
    family: str, winner: str, times_ms: Mapping[str, float], *, device: str, signature: str = "",
    store: Path | None = None,
) -> DecisionEntry:  # fmt: skip
    """Write a decision and return it.

    Raises:
        StructureError: an undeclared family, winner, or name among the times.
    """
    if family not in FAMILIES:
        raise StructureError(f"got family {family!r}; need one of {', '.join(FAMILIES)}")
    names = FAMILIES[family].names()
    unknown = sorted({winner, *times_ms} - set(names))
    if unknown:
        raise StructureError(f"got {unknown} for {family}; need declared candidates: {', '.join(names)}")
    entry = DecisionEntry(
        device=read_device_name(device), family=family, signature=signature, winner=winner, times_ms=dict(times_ms),
        date=now_utc(),
    )  # fmt: skip
    entry = entry.model_copy(update={"digest": entry.compute_digest()})
    _append(entry, store)
    return entry


def read_decisions(store: Path | None = None) -> list[DecisionEntry]:
    """Return every decision of a store, other devices' too.

    Raises:
        StructureError: an entry is damaged.
    """
    return [_entry(line) for line in read_lines(_file(store))]


def export_decisions(path: Path, store: Path | None = None) -> int:
    """Append the store's decisions to a file; return how many."""
    entries = read_decisions(store)
    for entry in entries:
        append_line(path, lambda _, entry=entry: canonical_json(entry.model_dump(mode="json")))
    return len(entries)


def import_decisions(path: Path, store: Path | None = None) -> dict[str, int]:
    """Take a file's decisions where the store has none for the same device, family and signature.

    Raises:
        StructureError: an entry is damaged; nothing is taken then.
    """
    entries = [_entry(line) for line in read_lines(path)]
    known = {(e.device, e.family, e.signature) for e in read_decisions(store)}
    fresh = [e for e in entries if (e.device, e.family, e.signature) not in known]
    for entry in fresh:
        _append(entry, store)
    return {"imported": len(fresh), "kept_local": len(entries) - len(fresh), "entries": len(entries)}


def resolve(family: str, host: Host, *, pin: str | None = None, store: Path | None = None) -> Resolution:
    """Return the candidate of a family that is bound on this host and device."""
    device, own = read_device_name(str(host.weight.device)), signature(host)
    entries = [e for e in read_decisions(store) if e.device == device and e.family == family]
    asked = [("pin", pin)] if pin is not None else []
    asked += [("decision", e.winner) for wanted in (own, "") for e in reversed(entries) if e.signature == wanted]
    fell = []
    for source, name in asked:
        candidate = next((c for c in FAMILIES[family].candidates if c.name == name), None)
        lacks = [f"{name!r} is no candidate"] if candidate is None else list(candidate.missing(host))
        if not lacks:
            return Resolution(str(name), source, tuple(fell))
        fell.append(f"{source} {name}: {'; '.join(lacks)}")
    return Resolution(SEATS, "default", tuple(fell))


def resolve_auto(host: Host, store: Path | None = None) -> Resolution:
    """Return the scheme whose receipt on this device, for a host of these shapes, is the fastest that passed its gate.

    A receipt counts if its chain verifies, its union passed in every phase, and its judged metric reached "pass".
    """
    path = store_of(store) / "receipts.jsonl"
    lines = read_lines(path)
    problems = verify_chain(lines)
    if problems:
        return Resolution("bf16_structural", "default", tuple(problems))
    device, own = read_device_name(str(host.weight.device)), signature(host)
    fastest, fell = ("bf16_structural", 0.0), []
    for receipt in read_receipts(path) if lines else []:
        body = receipt.body
        if receipt.kind != "attach" or receipt.environment.device_name != device or body.get("signature") != own:
            continue
        name, ratio = body["scheme"], _decode_ratio(body)
        if name not in SCHEMES or ratio is None:
            fell.append(f"{name}: no timed union that passed every gate")
        elif ratio > fastest[1]:
            fastest = (name, ratio)
    return Resolution(fastest[0], "receipt" if fastest[1] else "default", tuple(fell))


def _decode_ratio(body: Mapping[str, Any]) -> float | None:
    """Return the least ratio over decode phases of a receipt's union, or None where a phase does not pass."""
    phases = (body.get("union") or {}).get("phases") or []
    least, ratios = BANDS["top1_agreement"][0], []
    for phase in phases:
        agreement = phase["gate"]["metrics"].get("top1_agreement")
        if phase["reasons"] or phase["ratio"] is None or not isinstance(agreement, float) or agreement < least:
            return None
        if phase["phase"].startswith("decode"):
            ratios.append(float(phase["ratio"]))
    return min(ratios) if ratios else None


def _file(store: Path | None) -> Path:
    return store_of(store) / "decisions.jsonl"


def _append(entry: DecisionEntry, store: Path | None) -> None:
    append_line(_file(store), lambda _: canonical_json(entry.model_dump(mode="json")))


def _entry(line: str) -> DecisionEntry:
    try:
        entry = DecisionEntry.model_validate_json(line)
    except ValidationError as error:
        raise StructureError(f"got a line that is no decision: {error}; remove it") from error
    if entry.digest != entry.compute_digest():
        raise StructureError(f"got a decision on {entry.device} that is not as its digest says; record it again")
    return entry
