"""What the training benchmark measures: apart from it, so that no other benchmark waits for what training imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Form = Literal["eager", "compile", "reduce-overhead"]
Moments = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTrainConfig:
    """What is trained and beside what.

    Args:
        model: A preset; its weights are random.
        rows: Rows of a step, each one document.
        row_tokens: Tokens of a row.
        forms: How the peer runs.
        moments: Precision of the moments; fp32 takes autocast's masters as the peer, bf16 a peer all in bf16.
        capture: Whether our step is replayed as a CUDA graph, as train takes it.
        device: auto, cpu or cuda.
        round_s: Length of a timed round.
        rounds: Rounds of each arm.
        target: Name of the rows.
        out: Append the rows to this JSONL file.
    """

    model: str = "tiny"
    rows: int = 8
    row_tokens: int = 64
    forms: tuple[Form, ...] = ("eager", "compile", "reduce-overhead")
    moments: Moments = "fp32"
    capture: Literal["auto", "off", "on"] = "auto"
    device: str = "auto"
    round_s: float = 1.0
    rounds: int = 8
    target: str = "train"
    out: Path | None = None
