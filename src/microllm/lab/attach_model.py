"""A model attached from the command line: its ``transformers`` twin, real text, a gate, and what became of it.

Place: ``microllm attach`` and ``microllm bench attach``. Calibrates on parts of the shipped texts, judges on another.
Needs the extra [hf].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from microllm.io.resolve import resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.lab.bench_attach import AttachBench, AttachFigures, measure_attach
from microllm.lab.hf_twin import cast_twin, load_twin
from microllm.lab.quality import read_texts
from microllm.structures import AttachConfig, Plan, attach
from microllm.structures.calibration import stratified_indices

WINDOW = 96
"""Tokens of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """What is attached to what."""

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    scheme: str = "auto"
    """none, bf16_structural, w8a16_decode, w4a16_decode, fp8_static(_keep_outliers), or auto (by receipts)."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    precision: str = "bf16"
    """The host's own: bf16 or fp32."""
    min_speedup: float = 1.02
    """Least speed-up over the host, timed in pairs; 0 does not time."""
    region: str = ""
    """Pin decoder_layer_decode to seats or chain (default: what was recorded for this device, else seats)."""
    samples: int = 8
    """Samples to calibrate on."""
    store: Path | None = None
    """Where receipts and decisions lie (default: the project's cache)."""
    report: bool = False
    """Append the receipt to the store, so that auto can take it."""


def attach_model(options: AttachOptions) -> Plan:
    """Return the plan of a model that was attached to."""
    source = resolve_model(options.model)
    dtype = torch.float32 if options.precision == "fp32" else torch.bfloat16
    twin = cast_twin(load_twin(source), dtype).to(options.device).requires_grad_(False)
    windows, documents = text_windows(load_tokenizer(source).encode, WINDOW)
    chosen = stratified_indices(documents, min(options.samples, len(windows) - 1))
    heldout = next(i for i in range(len(windows)) if i not in chosen)
    config = AttachConfig(
        store=options.store, pins={"decoder_layer_decode": options.region} if options.region else {},
    )  # fmt: skip
    plan = attach(
        twin, lambda ids: twin(ids.to(options.device)), scheme=options.scheme, min_speedup=options.min_speedup,
        observations=[windows[i] for i in chosen], heldout=[windows[heldout]], config=config,
    )  # fmt: skip
    if options.report:
        plan.save_receipt(options.store)
    return plan


def text_windows(encode: Callable[[str], Sequence[int]], size: int) -> tuple[list[Tensor], list[str]]:
    """Return the shipped texts in windows of ids [1, T], and which text each is of."""
    windows, documents = [], []
    for text in read_texts():
        ids = encode(text.text)
        for start in range(0, len(ids) - size, size):
            windows.append(torch.tensor([ids[start : start + size]]))
            documents.append(text.name)
    return windows, documents


def bench_model(
    model: str, config: AttachBench, *, device: str, precision: str, progress: Callable[[str], None]
) -> AttachFigures:  # fmt: skip
    """Return the figures of a model's ``transformers`` twin, on the beginning of the shipped texts."""
    source = resolve_model(model)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    twin = cast_twin(load_twin(source), dtype).to(device).requires_grad_(False)
    encode = load_tokenizer(source).encode
    ids = [token for text in read_texts() for token in encode(text.text)]
    return measure_attach(twin, torch.tensor(ids[: config.prompt_tokens], device=device), config, progress)
