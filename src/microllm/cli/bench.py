"""``microllm bench``: measurements that end as rows, each with the conditions it was taken under."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from microllm.lab.roofline import RooflineConfig
from microllm.lab.startup import StartupConfig

if TYPE_CHECKING:
    from microllm.evidence.rows import Row


@dataclass(frozen=True, kw_only=True)
class BenchStartup:
    """Time from process start to the first token, and the peak memory of the process."""

    config: StartupConfig = field(default_factory=StartupConfig)
    out: Path | None = None
    """Append the row to this JSONL file."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the row as one JSON line instead of text."""

    def run(self) -> int:
        """Print the medians."""
        from microllm.evidence.rows import write_row
        from microllm.lab.startup import measure_startup

        found = measure_startup(self.config)
        if self.out is not None:
            write_row(self.out, found.row)
        if self.as_json:
            print(found.row.model_dump_json())
            return 0
        times = ", ".join(f"{s:.2f}" for s in found.first_token_s)
        print(f"first token after {found.median_first_token_s:.2f} s (median of {times}; warm disk cache)")
        print(f"of which import torch alone takes {found.import_torch_s:.2f} s")
        print(f"peak memory {found.peak_bytes / 2**20:,.0f} MiB")
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchRoofline:
    """Measure what the device can do: matrix products by dtype and size, copy and read rates. Limits come from here."""

    config: RooflineConfig = field(default_factory=RooflineConfig)
    quick: bool = False
    """A few sizes and short rounds, for a first look: printed, not recorded."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print each row as one JSON line instead of a table."""

    def run(self) -> int:
        """Print the rows."""
        from microllm.lab.roofline import measure_roofline, short

        _show(measure_roofline(short(self.config) if self.quick else self.config), as_json=self.as_json)
        return 0


def _show(rows: list[Row], *, as_json: bool) -> None:
    from microllm.evidence.rows import rows_table

    if as_json:
        for row in rows:
            print(row.model_dump_json())
    else:
        print(rows_table(rows))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure, and say under which conditions."""

    benchmark: (
        Annotated[BenchStartup, tyro.conf.subcommand("startup")]
        | Annotated[BenchRoofline, tyro.conf.subcommand("roofline")]
    )

    def run(self) -> int:
        """Run the chosen benchmark."""
        return self.benchmark.run()
