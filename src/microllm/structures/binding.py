"""Bindings: where a family of hosts keeps what a structure names, and how its decode pipeline is covered.

Place: ``bindings/NAME.yaml`` says which path holds which slot and which module's input is which calibration point;
``host.py`` finds the binding that fits a module tree. Validated against the catalog when it is read, against the host
when it is attached. Knows no tensor.

A pipeline's hot segments are each one of ``CLASSES``; one that none of its segments names fails when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from microllm.errors import StructureError
from microllm.structures.structure import Catalog, Structure

Scope = Literal["layer", "stack", "head"]
BINDINGS = Path(__file__).with_name("bindings")
CLASSES = ("structure", "state_region", "host_stage", "control")
PROTOCOLS = ("transformers", "microllm")
_KEYS = {"binding", "host", "stack", "head", "has", "constants", "regions", "pipeline"}
_SEGMENT_KEYS = {"name", "stage", "classification", "seam", "structures"}


@dataclass(frozen=True, slots=True)
class RegionBinding:
    """One structure on a host: the modules it stands for; slots, points and constants by paths from each.

    ``scope``: what ``sites`` are relative to. ``without``: paths that must hold nothing.
    """

    structure: Structure
    scope: Scope
    sites: tuple[str, ...]
    weights: Mapping[str, str]
    points: Mapping[str, str]
    constants: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of the hot path, and who owns it."""

    name: str
    stage: str
    classification: str
    seam: str
    structures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One family of hosts."""

    name: str
    package: str
    tested: tuple[str, ...]
    protocol: str
    stack: Mapping[str, str]
    head: str
    has: Mapping[str, bool]
    constants: Mapping[str, str]
    regions: tuple[RegionBinding, ...]
    pipeline: Structure | None = None
    hot_path: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()

    def manifest(self) -> dict[str, Any]:
        """Return the binding as JSON data: its structures with their digests, and the coverage of its pipeline."""
        regions = {r.structure.id: r.structure.digest for r in self.regions}
        found: dict[str, Any] = {
            "binding": self.name, "host": {"package": self.package, "tested": list(self.tested)}, "structures": regions,
        }  # fmt: skip
        if self.pipeline is not None:
            segments = [
                {"name": s.name, "stage": s.stage, "classification": s.classification, "seam": s.seam}
                | ({"structures": list(s.structures)} if s.structures else {})
                for s in self.segments
            ]
            found["pipeline"] = {
                "structure": self.pipeline.id, "digest": self.pipeline.digest, "hot_path": list(self.hot_path),
                "segments": segments,
            }  # fmt: skip
        return found


def load_bindings(catalog: Catalog, folders: Iterable[Path] = ()) -> list[Binding]:
    """Return the bindings of ``folders`` and then the package's, in the order in which hosts are tried.

    Raises:
        StructureError: one does not fit the catalog.
    """
    paths = [path for root in (*folders, BINDINGS) for path in sorted(root.glob("*.yaml"))]
    return [read_binding(path, catalog) for path in paths]


def read_binding(path: Path, catalog: Catalog) -> Binding:
    """Read one binding and validate it against the catalog.

    Raises:
        StructureError: it is malformed, names what the catalog lacks, or leaves a hot segment unclassified.
    """
    try:
        document = yaml.safe_load(path.read_bytes())
        binding = _parsed(document, path, catalog)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StructureError):
            raise
        raise StructureError(f"got {path}, which is no binding: {error!r}; correct it") from error
    return binding


def _parsed(document: dict[str, Any], path: Path, catalog: Catalog) -> Binding:
    name, host = document["binding"], document["host"]
    if name != path.stem or set(document) - _KEYS:
        raise StructureError(f"{path}: got binding {name!r} with {sorted(set(document) - _KEYS)}; need the file's name")
    if host["protocol"] not in PROTOCOLS:
        raise StructureError(f"{name}: got protocol {host['protocol']!r}; need one of {', '.join(PROTOCOLS)}")
    regions = tuple(_region(entry, name, catalog) for entry in document["regions"])
    binding = Binding(
        name=name, package=host["package"], tested=tuple(str(v) for v in host["tested"]), protocol=host["protocol"],
        stack=document["stack"], head=document["head"], has=document.get("has", {}),
        constants=document.get("constants", {}), regions=regions,
    )  # fmt: skip
    return _with_pipeline(binding, document["pipeline"], catalog) if "pipeline" in document else binding


def _region(entry: dict[str, Any], name: str, catalog: Catalog) -> RegionBinding:
    structure = catalog.get(entry["structure"])
    if structure.kind != "region":
        raise StructureError(f"{name}: got {structure.id} as a region; need its coverage under 'pipeline'")
    slots = {port.name: port.optional for port in structure.weights}
    missing = [slot for slot, optional in slots.items() if not optional and slot not in entry["weights"]]
    unknown = sorted(set(entry["weights"]) - set(slots))
    points = set(entry["points"]) ^ set(structure.points) | set(entry.get("constants", {})) ^ set(structure.constants)
    if missing or unknown or points or entry["scope"] not in ("layer", "stack", "head"):
        raise StructureError(
            f"{name}: got {structure.id} without {missing}, with {unknown}, points or constants that differ "
            f"{sorted(points)}, scope {entry['scope']!r}; need all of its yaml's, and a scope layer, stack or head"
        )
    return RegionBinding(
        structure, entry["scope"], tuple(entry["sites"]), entry["weights"], entry["points"],
        entry.get("constants", {}), tuple(entry.get("without", ())),
    )  # fmt: skip


def _with_pipeline(binding: Binding, document: dict[str, Any], catalog: Catalog) -> Binding:
    name, pipeline, coverage = binding.name, catalog.get(document["structure"]), document["coverage"]
    required = {stage for stage, body in pipeline.stages.items() if not body.get("optional")}
    stages = set(document["stages"])
    if pipeline.kind != "pipeline" or stages - set(pipeline.stages) or required - stages:
        raise StructureError(f"{name}: got stages {sorted(stages)}; need {sorted(required)} of {pipeline.id}")
    if coverage["contract"] != "complete_hot_path" or not coverage["hot_path"] or not coverage["segments"]:
        raise StructureError(f"{name}: got contract {coverage['contract']!r}; need complete_hot_path, with segments")
    segments = tuple(_segment(entry, name, pipeline, stages, catalog) for entry in coverage["segments"])
    named, hot = [s.name for s in segments], tuple(coverage["hot_path"])
    twice = {each for each in (*named, *hot) if named.count(each) > 1 or hot.count(each) > 1}
    unclassified = [each for each in hot if each not in named]
    if twice or unclassified:
        raise StructureError(f"{name}: got unclassified {unclassified}, twice {sorted(twice)}; need one segment each")
    values = {field: getattr(binding, field) for field in binding.__dataclass_fields__}
    return Binding(**{**values, "pipeline": pipeline, "hot_path": hot, "segments": segments})


def _segment(
    entry: dict[str, Any], name: str, pipeline: Structure, stages: set[str], catalog: Catalog
) -> Segment:  # fmt: skip
    where, structures = f"{name}: segment {entry['name']!r}", entry.get("structures", [])
    if set(entry) - _SEGMENT_KEYS or entry["stage"] not in stages or entry["classification"] not in CLASSES:
        raise StructureError(f"{where}: got {entry}; need stage of {sorted(stages)}, classification of {CLASSES}")
    needs, owns = entry["classification"] == "structure", bool(structures)
    if (needs and not owns) or (owns and entry["classification"] in ("host_stage", "control")):
        raise StructureError(f"{where}: got structures {structures}; need them of a structure, and of nothing else")
    for each in structures:
        if catalog.get(each).kind == "pipeline" or each not in pipeline.embeds or structures.count(each) > 1:
            raise StructureError(f"{where}: got {each!r}; need one that {pipeline.id} embeds, once")
    return Segment(entry["name"], entry["stage"], entry["classification"], entry["seam"], tuple(structures))
