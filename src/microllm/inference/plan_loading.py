"""How a checkpoint becomes a plan on this CPU: which precision, which product for many rows, which threads.

Place: between ``llm.load``, which imports it with the first model, and the plan. What is measured is measured once and
kept beside the packed weights.
"""

from __future__ import annotations

import statistics
import time

import torch

from microllm.config import ModelConfig
from microllm.inference.packed_file import PackedFile
from microllm.inference.plan import Plan
from microllm.inference.plan_weights import PlanPrecision, PlanWeights, pack_weights
from microllm.io.checkpoint import Checkpoint, open_weights
from microllm.io.demo import cache_dir
from microllm.ops.packed import DenseWeight, has_bf16

_PROBE_ROWS = 128
_FOUR_BIT = {"q4_0", "q4_1"}


def load_plan(checkpoint: Checkpoint, precision: PlanPrecision) -> Plan:
    """Return a checkpoint's plan, packed for this CPU or read from an earlier packing.

    Beside four- or eight-bit codes lie the same weights widened for prompts: 2 bytes a weight where the CPU has bf16
    products, else 4.

    Raises:
        LoadError: tensors are missing, unexpected or of another shape; all of them are named.
        CheckpointError: a file is damaged.
    """
    if precision in ("fp32", "bf16"):
        wide = torch.float32 if precision == "fp32" else torch.bfloat16
        return Plan(pack_checkpoint(checkpoint, precision, wide_dtype=wide), wide_dtype=wide)
    packed_file, wide = None, torch.bfloat16 if has_bf16() else torch.float32
    if checkpoint.source.kind == "gguf":
        packed_file = PackedFile(cache_dir() / "packed", checkpoint.source.path, precision)
        if "wide_dtype" not in packed_file.facts:
            packed_file.facts |= probe_wide_dtype(checkpoint.config)
        wide = torch.bfloat16 if packed_file.facts["wide_dtype"] == "bfloat16" else torch.float32
    weights = pack_checkpoint(checkpoint, precision, wide_dtype=wide, packed_file=packed_file)
    return Plan(weights, wide_dtype=wide)


def pack_checkpoint(
    checkpoint: Checkpoint, precision: PlanPrecision, *, wide_dtype: torch.dtype, packed_file: PackedFile | None = None
) -> PlanWeights:
    """Return a checkpoint's weights packed for this CPU; with ``packed_file`` their packed form is kept on the disk.

    Raises:
        LoadError: tensors are missing, unexpected or of another shape; all of them are named.
        CheckpointError: a file is damaged.
    """
    config = checkpoint.config
    weights = pack_weights(
        open_weights(checkpoint, config.parameter_shapes()), config, precision, wide_dtype=wide_dtype,
        packed_file=packed_file,
    )  # fmt: skip
    if packed_file is not None:
        packed_file.save()
    return weights


def is_four_bit(checkpoint: Checkpoint) -> bool:
    """Return whether the file keeps every matrix in blocks that the int4 product takes as they are.

    Four bits in the layers, four or eight in table and head: the form of the demo, which the quality gate has judged.
    """
    matrices = {name: info.dtype for name, info in checkpoint.tensors.infos.items() if len(info.shape) == 2}
    layers = {dtype for name, dtype in matrices.items() if ".layers." in name}
    return checkpoint.source.kind == "gguf" and layers <= _FOUR_BIT and set(matrices.values()) <= {*_FOUR_BIT, "q8_0"}


def probe_wide_dtype(config: ModelConfig) -> dict[str, str | float]:
    """Return which dtype multiplies many rows faster on this CPU, bf16 or fp32, and both times in milliseconds."""
    times: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and not has_bf16():
            continue
        weight = DenseWeight(torch.randn(2 * config.intermediate_size, config.hidden_size).to(dtype))
        x = torch.randn(_PROBE_ROWS, config.hidden_size, dtype=dtype)
        weight(x)
        rounds = []
        for _ in range(5):
            started = time.perf_counter()
            weight(x)
            rounds.append(1e3 * (time.perf_counter() - started))
        times[dtype] = statistics.median(rounds)
    fastest = min(times, key=lambda dtype: times[dtype])
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in times}
    return {"wide_dtype": names[fastest]} | {f"{names[dtype]}_ms": took for dtype, took in times.items()}
