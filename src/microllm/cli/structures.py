"""``microllm structures``: the catalog, and decisions about forms of a region on this device."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

Store = Annotated[Path | None, tyro.conf.arg(help="Where decisions lie (default: the project's cache).")]


@dataclass(frozen=True, kw_only=True)
class StructuresList:
    """List the structures with their versions, digests and calibration points."""

    def run(self) -> int:
        """Print one line a structure."""
        from microllm.structures.structure import load_catalog

        for each in load_catalog().all():
            points = f"; points {', '.join(each.points)}" if each.points else ""
            print(f"{each.id:<34} {each.digest[:12]}  {each.kind}{points}\n    {' '.join(each.description.split())}")
        return 0


@dataclass(frozen=True, kw_only=True)
class StructuresRecord:
    """Record which candidate of a region family was the fastest in production form on a device."""

    family: tyro.conf.Positional[str]
    """The family, as decoder_layer_decode."""
    winner: tyro.conf.Positional[str]
    """The candidate that is bound from now on."""
    times_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by candidate: --times-ms seats 0.61 chain 0.48."""
    device: str = "cpu"
    """The device they were measured on."""
    signature: str = ""
    """The host's signature, from its receipt (default: any host)."""
    store: Store = None

    def run(self) -> int:
        """Print the entry."""
        from microllm.structures.decisions import record

        entry = record(
            self.family, self.winner, self.times_ms, device=self.device, signature=self.signature, store=self.store
        )
        print(entry.model_dump_json())
        return 0


@dataclass(frozen=True, kw_only=True)
class StructuresDecisions:
    """Print the decisions of a store, or move them: export to a file, import from one."""

    to: Path | None = None
    """Append all of them to this file."""
    take: Path | None = None
    """Take those of this file that the store has none for."""
    store: Store = None

    def run(self) -> int:
        """Print one JSON object a line."""
        from microllm.structures.decisions import export_decisions, import_decisions, read_decisions

        if self.take is not None:
            print(json.dumps(import_decisions(self.take, self.store)))
        if self.to is not None:
            print(json.dumps({"exported": export_decisions(self.to, self.store)}))
        if self.take is None and self.to is None:
            for entry in read_decisions(self.store):
                print(entry.model_dump_json())
        return 0


@dataclass(frozen=True, kw_only=True)
class Structures:
    """Show the catalog of structures; record, show and move decisions about them."""

    command: (
        Annotated[StructuresList, tyro.conf.subcommand("list")]
        | Annotated[StructuresRecord, tyro.conf.subcommand("record")]
        | Annotated[StructuresDecisions, tyro.conf.subcommand("decisions")]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.command.run()
