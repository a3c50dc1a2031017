"""``microllm bench``: measurements that end as rows, each with the conditions it was taken under."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class BenchStartup:
    """Time from process start to the first token, and the peak memory of the process."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    repeats: int = 3
    """How many fresh processes are timed, after one that warms the disk cache."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of text."""

    def run(self) -> int:
        """Print the medians."""
        from microllm.lab.startup import StartupConfig, measure_startup

        found = measure_startup(StartupConfig(model=self.model, device=self.device, repeats=self.repeats))
        if self.as_json:
            print(json.dumps(asdict(found) | {"median_first_token_s": found.median_first_token_s}))
            return 0
        times = ", ".join(f"{s:.2f}" for s in found.first_token_s)
        print(f"first token after {found.median_first_token_s:.2f} s (median of {times}; warm disk cache)")
        print(f"of which import torch alone takes {found.import_torch_s:.2f} s")
        print(f"peak memory {found.peak_bytes / 2**20:,.0f} MiB")
        return 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure, and say under which conditions."""

    benchmark: Annotated[BenchStartup, tyro.conf.subcommand("startup")]

    def run(self) -> int:
        """Run the chosen benchmark."""
        return self.benchmark.run()
