"""Measure and check training on one GPU with random weights: rows T1 to T3, a captured step, exact resumption.

    PYTHONPATH=src python tools/gpu_train.py --output out            all of it: about ten minutes on an H200
    PYTHONPATH=src python tools/gpu_train.py --output out --quick    short rounds and small models: a minute
    PYTHONPATH=src python tools/gpu_train.py --output out --only rows --targets T1     one row: a few minutes, compiling

Writes rows.jsonl (T1, T2, T3 beside transformers) and checks.json. Needs transformers for the rows; no network, and
none of the command line's packages.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from microllm.lab.bench_train import build_random, measure_train, random_rows, step_of
from microllm.lab.bench_train_config import BenchTrainConfig
from microllm.training import OptimizerConfig, PackConfig, TrainConfig, pack_data
from microllm.training.passes import Passes
from microllm.training.ranks import Ranks
from microllm.training.vocabulary import train_tokenizer

RUN = """
import sys, json
from pathlib import Path
from microllm.training import TrainConfig, train
data, output, model, stop, device = sys.argv[1:]
train(TrainConfig(
    data=Path(data), output=Path(output), model=model, num_steps=4, stop_at=int(stop), row_tokens=512, batch_rows=4,
    micro_rows=2, deterministic=True, device=device, checkpoint_every=100, keep_checkpoints=1,
))
"""


def measure_rows(
    output: Path, device: str, targets: list[str], *, capture: Literal["auto", "off", "on"], quick: bool
) -> list[str]:
    """Measure T1 to T3 with fp32 moments, T1 with bf16 ones too, and return what could not be measured."""
    shapes = {"T1": ("qwen2.5-0.5b", 8, 1024), "T2": ("qwen2.5-0.5b", 1, 512), "T3": ("model_s", 32, 512)}
    if quick:
        shapes = {"T3": ("model_s", 8, 512)}
    failed = []
    for target, (model, rows, row_tokens) in shapes.items():
        for moments in ("fp32", "bf16") if target == "T1" else ("fp32",):
            if target not in targets:
                continue
            config = BenchTrainConfig(
                model=model, rows=rows, row_tokens=row_tokens, moments=moments, device=device, target=target,
                capture=capture,
                rounds=2 if quick else 6, round_s=0.3 if quick else 1.0, out=output / "rows.jsonl",
                forms=("compile",) if quick else ("compile", "reduce-overhead"),
            )  # fmt: skip
            try:
                for row in measure_train(config):
                    print(f"{row.target} {row.workload.split(';')[0]} {row.dtype}: {row.ours} tok/s; {row.peer_name}: "
                          f"{row.peer} tok/s; ratio {row.ratio_peer}; of peak {row.ratio_limit}; bytes "
                          f"{row.peak_bytes} and {row.peer_peak_bytes}; {row.status}", flush=True)  # fmt: skip
            except Exception:  # noqa: BLE001  one row that fails must not cost the others
                failed.append(f"{target} {moments}: {traceback.format_exc()}")
                print(failed[-1], flush=True)
            torch.cuda.empty_cache()
    return failed


def check_capture() -> dict[str, Any]:
    """Compare gradients and losses of a captured step with those of an eager one, one and three micro-batches."""
    found: dict[str, Any] = {}
    device = torch.device("cuda")
    for name, num_batches in (("one", 1), ("three", 3)):
        ids = torch.randint(8192, (num_batches, 4, 256), generator=torch.Generator().manual_seed(1))
        batches = [random_rows(part).to(device) for part in ids]
        gradients = {}
        for capture in ("off", "on"):
            settings = TrainConfig(
                data=Path(), output=Path(), model="model_s", row_tokens=256, device="cuda", capture=capture
            )
            built = build_random(settings, Ranks(0, 1, device))
            passes = Passes(settings, built, Ranks(0, 1, device))
            for _ in range(2):  # a second replay starts from nothing again
                loss, norm = passes.run(batches)
                gradients[capture] = {n: p.grad.clone() for n, p in built.parameters.items() if p.grad is not None}
                passes.forget_gradients()
            found[f"{name} {capture}"] = [loss, norm]
        pairs = [(gradients["on"][n], g) for n, g in gradients["off"].items()]
        found[f"{name} worst gradient"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return found


def check_overfit(name: str) -> dict[str, Any]:
    """Take sixty steps on one batch: the loss must fall to nothing."""
    device = torch.device(name)
    settings = TrainConfig(
        data=Path(), output=Path(), model="model_s", row_tokens=128, device=name,
        optimizer=OptimizerConfig(clip_norm=1.0),
    )  # fmt: skip
    built = build_random(settings, Ranks(0, 1, device))
    rows = random_rows(torch.randint(8192, (4, 128), generator=torch.Generator().manual_seed(1))).to(device)
    step = step_of(settings, built, Ranks(0, 1, device), rows, rate=1e-3)
    losses = [float(step()) for _ in range(80)]
    return {"first": losses[0], "last": losses[-1]}


def check_resume(models: tuple[str, ...], device: str) -> dict[str, Any]:
    """Take 4 steps, and 2 + a new process + 2, and compare every tensor of the last checkpoints bit for bit."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = _packed(Path(scratch))
        for model in models:
            runs = {name: Path(scratch) / f"{model}-{name}" for name in ("whole", "parts")}
            for name, stop in (("whole", 4), ("parts", 2), ("parts", 4)):
                command = [sys.executable, "-c", RUN, str(data), str(runs[name]), model, str(stop), device]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    return {**found, model: done.stderr[-3000:]}
            found[model] = _differing(*(run / "checkpoints/step-00000004" for run in runs.values()))
            found[f"{model} losses"] = [_losses(run) for run in runs.values()]
    return found


def _losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step"]


def _packed(scratch: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(400)]
    text = scratch / "text.txt"
    text.write_text("\n\n".join(" ".join(draw.choices(words, k=draw.randint(20, 400))) for _ in range(300)))
    tokenizer = train_tokenizer([text], 2048, scratch / "tokenizer")
    pack_data(PackConfig(input=(text,), output=scratch / "data", tokenizer=str(tokenizer), documents="paragraph"))
    return scratch / "data"


def _differing(one: Path, other: Path) -> str:
    """Return which tensors differ in any bit, or how many are equal."""
    differ, count = [], 0
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        with safe_open(one / name, "pt") as a, safe_open(other / name, "pt") as b:
            for key in a.keys():
                count += 1
                if not torch.equal(a.get_tensor(key), b.get_tensor(key)):
                    differ.append(f"{name}:{key}")
    return f"{len(differ)} of {count} tensors differ, first {differ[0]}" if differ else f"{count} tensors bit-equal"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself, with --quick")
    parser.add_argument("--capture", default="auto", choices=["auto", "off", "on"])
    parser.add_argument("--targets", nargs="*", default=["T1", "T2", "T3"], choices=["T1", "T2", "T3"])
    parser.add_argument("--only", nargs="*", default=["check", "rows", "resume"], choices=["check", "rows", "resume"])
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    checks: dict[str, Any] = {}
    work = {
        "check": [("overfit", lambda: check_overfit(given.device))],
        "rows": [
            (
                "rows that failed",
                lambda: measure_rows(
                    given.output, given.device, given.targets, capture=given.capture, quick=given.quick
                ),
            )
        ],
        "resume": [
            ("resume", lambda: check_resume(("model_s",) if given.quick else ("model_s", "qwen3-0.6b"), given.device))
        ],
    }
    if given.device != "cpu":
        work["check"].insert(0, ("capture", check_capture))
    for group in given.only:
        for name, run in work[group]:
            try:
                checks[name] = run()
            except Exception:  # noqa: BLE001  as above
                checks[name] = traceback.format_exc()
            print(name, json.dumps(checks[name], indent=1), flush=True)
            (given.output / "checks.json").write_text(json.dumps(checks, indent=1) + "\n")


if __name__ == "__main__":
    main()
