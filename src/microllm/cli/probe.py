"""``microllm probe``: what an engine promises, put to the test on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import tyro

from microllm.lab.probe import ProbeConfig


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Put what the engine promises to the test: one request, the same bits in every surrounding."""

    what: tyro.conf.Positional[Literal["batch-invariance"]]
    """batch-invariance: alone, among strangers, after a prefix hit, after a preemption, in chunks, with guesses."""
    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: str = "auto"
    """auto (the checkpoint's own on a GPU, fp32 on a CPU), fp32, bf16 or fp16."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""
    config: ProbeConfig = field(default_factory=ProbeConfig)

    def run(self) -> int:
        """Print each case's verdict; 1 when any differs."""
        from rich.console import Console
        from rich.table import Column, Table

        from microllm.inference import load
        from microllm.inference.placement import engine_precision
        from microllm.lab.probe import probe_batch_invariance

        llm = load(self.model, device=self.device, precision=engine_precision(self.precision, self.device))
        results = probe_batch_invariance(llm, self.config)
        passed = all(result.passed for result in results)
        if self.as_json:
            print(json.dumps({"passed": passed, "results": [asdict(result) for result in results]}))
            return 0 if passed else 1
        table = Table("", "case", "s", Column("what differs", overflow="fold"), box=None)
        for r in results:
            style = "" if r.passed else "red"
            table.add_row("same" if r.passed else "DIFFERS", r.case, f"{r.seconds:.1f}", r.detail, style=style)
        Console(markup=False).print(table)
        same = sum(result.passed for result in results)
        model = f"{llm.name} in {llm.precision} on {llm.device}"
        print(f"{same} of {len(results)} surroundings give the bits of the request alone ({model})")
        return 0 if passed else 1
