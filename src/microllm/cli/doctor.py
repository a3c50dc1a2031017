"""``microllm doctor``: what this machine can run, and why not; and what every kernel compiles to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from microllm.lab.aot import Compilation


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show what this machine can run, what it cannot, and the command that changes that."""

    kernels: bool = False
    """Compile every Triton kernel for every target instead, with no GPU: resources, and what must not be in it."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def run(self) -> int:
        """Print the findings; an absent extra is no failure, a fault of a kernel is."""
        from rich.console import Console
        from rich.table import Column, Table

        from microllm.lab.doctor import examine_machine

        if self.kernels:
            return self._kernels()
        findings = examine_machine()
        if self.as_json:
            print(json.dumps({"findings": [asdict(f) for f in findings]}))
            return 0
        table = Table("", "what", Column("state", overflow="fold"), Column("remedy", overflow="fold"), box=None)
        for f in findings:
            table.add_row("✓" if f.usable else "-", f.what, f.state, f.remedy, style="" if f.usable else "yellow")
        Console(markup=False).print(table)
        return 0

    def _kernels(self) -> int:
        from rich.console import Console

        from microllm.lab.aot import compile_all

        found: list[Compilation] = []
        with Console(stderr=True, markup=False).status("compiling") as status:
            for one in compile_all():
                found.append(one)
                status.update(f"compiled {len(found)}: {one.kernel} {one.case} for {one.target}")
        if self.as_json:
            print(json.dumps({"kernels": [asdict(one) for one in found]}))
        else:
            _print_kernels(found)
        return int(any(one.faults for one in found))


def _print_kernels(found: Sequence[Compilation]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    rows: dict[tuple[str, str, int], dict[str, Compilation]] = {}
    for one in found:
        rows.setdefault((one.file, one.kernel, one.case), {})[one.target] = one
    targets = list(dict.fromkeys(one.target for one in found))
    table = Table("kernel", "case", *(Column(target, justify="right") for target in targets), box=None)
    for (_, kernel, case), by_target in rows.items():
        table.add_row(kernel, str(case), *(_cell(by_target[target]) for target in targets))
    console = Console(markup=False)
    console.print(table)
    faults = [f"{one.kernel} {one.case} on {one.target}: {text}" for one in found for text in one.faults]
    for text in faults:
        console.print(text, style="red")
    done = sum(not one.skipped for one in found)
    console.print(f"{done} compiled (registers a thread, shared KiB a program); {len(faults) or 'no'} faults")


def _cell(one: Compilation) -> str:
    if one.skipped:
        return "-"
    return f"{one.registers} {one.shared_bytes / 1024:.1f}{' !' if one.faults else ''}"
