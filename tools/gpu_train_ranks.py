"""Measure and check training on two GPUs: row T4, equality of ranks, uneven rows, exact resumption.

    PYTHONPATH=src torchrun --nproc-per-node 2 tools/gpu_train_ranks.py --output out [--quick]

Every rank first takes steps alone, then all take them together (weak scaling: the same rows a rank). The rate of an
all-reduce is measured before. Writes ranks.json. Random weights; no network.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gpu_train import _differing, _packed
from microllm.evidence.environment import capture_environment
from microllm.lab.bench_train import build_random, random_rows, step_of, wait_for
from microllm.training import OptimizerConfig, TrainConfig, Trainer, train
from microllm.training.ranks import Ranks, joined


def measure_bus(ranks: Ranks) -> dict[str, float]:
    """Return the bus rate of an all-reduce by size, in GB/s: 2 (n - 1) / n times the bytes, over the time."""
    found = {}
    for mib in (1, 16, 256, 1024) if ranks.device.type == "cuda" else (1,):
        data = torch.ones(mib << 18, device=ranks.device)
        for _ in range(3):
            dist.all_reduce(data)
        seconds = timed(lambda data=data: dist.all_reduce(data), 10, ranks)
        found[f"{mib} MiB"] = 2 * (ranks.world - 1) / ranks.world * (mib << 20) / seconds / 1e9
        data.fill_(1)
    return found


def timed(call: Callable[[], object], count: int, ranks: Ranks) -> float:
    """Return the seconds of a call: of the slowest rank, the mean over ``count``."""
    wait_for(ranks.device)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        call()
    wait_for(ranks.device)
    return max(ranks.gather((time.perf_counter() - started) / count))


def weak_scaling(model: str, rows: int, row_tokens: int, ranks: Ranks, *, quick: bool) -> dict[str, Any]:
    """Return tokens a second alone and together, and whether all parameters are equal after."""
    draw = torch.Generator().manual_seed(ranks.rank)
    batch = random_rows(torch.randint(8192, (rows, row_tokens), generator=draw)).to(ranks.device)
    found: dict[str, Any] = {"model": model, "rows": rows, "row_tokens": row_tokens}
    count, rounds = (5, 2) if quick else (20, 5)
    for name, who in (("alone", Ranks(0, 1, ranks.device)), ("together", ranks)):
        for capture in ("off", "on") if ranks.device.type == "cuda" else ("off",):
            settings = TrainConfig(
                data=Path(), output=Path(), model=model, row_tokens=row_tokens, batch_rows=rows * who.world,
                device=str(ranks.device), capture=capture,
            )  # fmt: skip
            try:
                built = build_random(settings, who)
                step = step_of(settings, built, who, batch)
                for _ in range(5):
                    step()
                seconds = median(timed(step, count, ranks) for _ in range(rounds))
                found[f"{name}, capture {capture}"] = rows * row_tokens * ranks.world / seconds
                if who.world > 1:
                    found[f"differing parameter, capture {capture}"] = ranks.different(dict(built.parameters))
            except RuntimeError as error:
                found[f"{name}, capture {capture}"] = str(error)[:500]
            torch.cuda.empty_cache()
    best = {name: max((v for k, v in found.items() if k.startswith(name) and isinstance(v, float)), default=0.0)
            for name in ("alone", "together")}  # fmt: skip
    found["scaling"] = 2 * best["together"] / best["alone"] if best["alone"] else None
    return found


def check_runs(output: Path, device: str, ranks: Ranks) -> dict[str, Any]:
    """Compare whole runs: 4 steps with 2 + 2, and two ranks with uneven rows with one process, in fp32."""
    place = output / "runs"
    if ranks.is_first:
        place.mkdir(parents=True)
        _packed(place)
    dist.barrier()
    settings = {"data": place / "data", "num_steps": 4, "row_tokens": 512, "deterministic": True, "device": device,
                "checkpoint_every": 100, "check_ranks_every": 1}  # fmt: skip
    for model in ("model_s",):
        train(TrainConfig(output=place / "whole", model=model, batch_rows=6, **settings))
        train(TrainConfig(output=place / "parts", model=model, batch_rows=6, stop_at=2, **settings))
        train(TrainConfig(output=place / "parts", model=model, batch_rows=6, **settings))
    sgd = OptimizerConfig(optimizer="sgd", learning_rate=0.1, clip_norm=0)
    uneven = {**settings, "precision": "fp32", "optimizer": sgd, "num_steps": 2, "batch_rows": 3, "model": "model_s"}
    train(TrainConfig(output=place / "two", **uneven))
    train(TrainConfig(output=place / "shard", **{**uneven, "shard": True, "check_ranks_every": 0}))
    return {"2 + 2 steps": _differing(*(place / run / "checkpoints/step-00000004" for run in ("whole", "parts")))}


def compare_with_one(output: Path, device: str) -> dict[str, float]:
    """Repeat the uneven run in one process, and return the largest relative difference of a tensor."""
    place, found = output / "runs", {}
    sgd = OptimizerConfig(optimizer="sgd", learning_rate=0.1, clip_norm=0)
    settings = TrainConfig(
        data=place / "data", output=place / "one", model="model_s", num_steps=2, batch_rows=3, row_tokens=512,
        precision="fp32", device=device, deterministic=True, optimizer=sgd, checkpoint_every=100,
    )  # fmt: skip
    Trainer(settings, Ranks(0, 1, torch.device(device)), lambda row: None).run()
    one = load_file(place / "one/checkpoints/step-00000002/model.safetensors")
    for name in ("two", "shard"):
        other = load_file(place / name / "checkpoints/step-00000002/model.safetensors")
        found[name] = max(float((other[k] - t).norm() / t.norm()) for k, t in one.items())
    return found


def main() -> None:
    """Measure, check, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself, with --quick")
    given = parser.parse_args()
    shapes = [
        ("model_m", 8, 1024) if given.device == "cuda" else ("model_s", 1, 64),
        *([] if given.quick else [("qwen2.5-0.5b", 8, 1024)]),
    ]
    with joined(given.device) as ranks:
        found: dict[str, Any] = {
            "environment": capture_environment(str(ranks.device)).device_name,
            "ranks": ranks.world,
        }
        work: list[tuple[str, Callable[[], Any]]] = [("bus GB/s", lambda: measure_bus(ranks))]
        work += [("runs", lambda: check_runs(given.output, given.device, ranks))]
        work += [(f"T4 {s[0]}", lambda s=s: weak_scaling(*s, ranks, quick=given.quick)) for s in shapes]
        for name, run in work:
            try:
                found[name] = run()
            except Exception:  # noqa: BLE001  what was measured before is kept
                found[name] = traceback.format_exc()
            if ranks.is_first:
                print(name, json.dumps(found[name], indent=1), flush=True)
                given.output.mkdir(parents=True, exist_ok=True)
                (given.output / "ranks.json").write_text(json.dumps(found, indent=1) + "\n")
        first = ranks.is_first
    if first:
        found["uneven rows beside one process, relative L2"] = compare_with_one(
            given.output, "cpu" if given.device == "cpu" else "cuda:0"
        )
        (given.output / "ranks.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
