"""``microllm doctor``: what this machine can run, and why not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what this machine can run, what it cannot, and the command that changes that."""

    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def run(self) -> int:
        """Print the findings; an absent extra is no failure."""
        from rich.console import Console
        from rich.table import Column, Table

        from microllm.lab.doctor import examine_machine

        findings = examine_machine()
        if self.as_json:
            print(json.dumps({"findings": [asdict(f) for f in findings]}))
            return 0
        table = Table("", "what", Column("state", overflow="fold"), Column("remedy", overflow="fold"), box=None)
        for f in findings:
            table.add_row("✓" if f.usable else "-", f.what, f.state, f.remedy, style="" if f.usable else "yellow")
        Console(markup=False).print(table)
        return 0
