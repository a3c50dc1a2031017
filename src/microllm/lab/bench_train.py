"""Training steps a second beside transformers with torch's fused AdamW, eager and compiled: targets T1 to T4.

Place: ``microllm bench train`` and ``tools/gpu_train.py``. Every arm has the same weights, the same tokens and a whole
step: forward, backward, clipping's norm, AdamW. Arms are measured in turns (A B B A); parity is the first loss, and
that ours, on the same rows again and again, has fallen at the end: a step that trains nothing is none.
Two precisions, each with its like: fp32 masters and moments (transformers under autocast), and bf16 moments beside
a peer whose parameters and moments are all bf16 (ours keeps fp32 masters there too).
Memory is what an arm adds at its most to what was allocated before it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from microllm.config import preset
from microllm.evidence.environment import capture_environment
from microllm.evidence.rows import Row, environment_fields, write_row
from microllm.lab.bench_train_config import BenchTrainConfig, Form
from microllm.lab.hf_twin import make_twin
from microllm.training import OptimizerConfig, TrainConfig
from microllm.training.build import Built, build
from microllm.training.dataset import Index, Rows
from microllm.training.metrics import MFU_FORMULA, flops_per_token, peak_tflops
from microllm.training.optimizer import make_optimizer
from microllm.training.passes import Passes
from microllm.training.ranks import Ranks, choose_device

LEAST_FALL = 1e-4
"""Least relative fall of our loss over all steps of the run."""
PARITY = 2e-2
"""Largest relative difference of the first losses: bf16's rounding in two implementations."""


@dataclass
class Arm:
    """One way to take a step. ``step`` returns the loss before it, on the device."""

    name: str
    step: Callable[[], Tensor]
    first_loss: float = 0.0
    last_loss: float = 0.0
    peak_bytes: int | None = None
    step_s: float = 0.0


def measure_train(config: BenchTrainConfig, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Measure ours and every form of the peer, and return a row a form.

    Raises:
        MissingExtraError: transformers is not installed.
        UnavailableError: the machine has no such device.
    """
    device = choose_device(config.device)
    ids_BT = torch.randint(
        preset(config.model).vocab_size, (config.rows, config.row_tokens), generator=torch.Generator().manual_seed(0)
    )
    weights: dict[str, Tensor] = {}
    arms = [_started(device, lambda: ours(config, ids_BT, device, weights), progress)]
    for form in config.forms:
        arms.append(_started(device, lambda form=form: _peer(config, form, ids_BT.to(device), weights), progress))
    per_round = [max(1, round(config.round_s / max(arm.step_s, 1e-6))) for arm in arms]
    times: list[list[float]] = [[] for _ in arms]
    for turn in range(config.rounds):
        order = range(len(arms)) if turn % 2 == 0 else reversed(range(len(arms)))
        for i in order:
            progress(f"{arms[i].name}: round {turn + 1} of {config.rounds}")
            times[i].append(_round(arms[i], per_round[i], device))
    arms[0].last_loss = float(arms[0].step())
    found = _rows(config, arms, [median(taken) for taken in times], device)
    torch.compiler.reset()  # what was compiled holds its model
    return found


def _started(device: torch.device, make: Callable[[], Arm], progress: Callable[[str], None]) -> Arm:
    """Make an arm, warm it up, and note its first loss, its peak memory and about how long a step takes."""
    gc.collect()
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
    arm = make()
    progress(f"{arm.name}: warming up")
    arm.first_loss = float(arm.step())
    for _ in range(3):
        arm.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    arm.step_s = _round(arm, 2, device)
    if device.type == "cuda":
        arm.peak_bytes = torch.cuda.max_memory_allocated(device) - before
    return arm


def _round(arm: Arm, num_steps: int, device: torch.device) -> float:
    """Return the seconds of a step, from several."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(num_steps):
        arm.step()
    wait_for(device)
    return (time.perf_counter() - started) / num_steps


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_rows(ids_BT: Tensor) -> Rows:
    """Return rows of one document each, every token but the last a target, weighted to a mean."""
    B, T = ids_BT.shape
    targets = torch.cat((ids_BT[:, 1:], torch.full((B, 1), -100)), dim=1)
    return Rows(
        ids_BT.reshape(-1), targets.reshape(-1), torch.arange(T).repeat(B),
        torch.arange(0, B * T + 1, T, dtype=torch.int32), (targets != -100).float().reshape(-1) / (B * (T - 1)), T,
    )  # fmt: skip


def train_config(config: BenchTrainConfig) -> TrainConfig:
    """Return the run whose step is measured."""
    return TrainConfig(
        data=Path(), output=Path(), model=config.model, row_tokens=config.row_tokens, batch_rows=config.rows,
        precision="bf16", device=config.device, capture=config.capture,
        optimizer=OptimizerConfig(moments=config.moments),
    )  # fmt: skip


def build_random(settings: TrainConfig, ranks: Ranks, on_bucket: Callable[[], None] = lambda: None) -> Built:
    """Return a preset with random weights, without any data."""
    no_data = Index(Path(), {"vocab_size": 1, "eos_ids": [], "bos_id": None}, "")
    return build(settings, no_data, ranks, on_bucket)


def step_of(
    settings: TrainConfig, built: Built, ranks: Ranks, rows: Rows, *, rate: float = 1e-5
) -> Callable[[], Tensor]:
    """Return the trainer's own step on the same rows again and again, the loss and its synchronisation included."""
    optimizer, passes, done = (
        make_optimizer(built.parameters, settings.optimizer, 0),
        Passes(settings, built, ranks),
        [0],
    )

    def step() -> Tensor:
        done[0] += 1
        loss, norm = passes.run([rows])
        passes.clip(norm, settings.optimizer.clip_norm)
        optimizer.step(rate, done[0])
        built.copies.refresh()
        passes.forget_gradients()
        return torch.tensor(loss)

    return step


def ours(config: BenchTrainConfig, ids_BT: Tensor, device: torch.device, weights: dict[str, Tensor]) -> Arm:
    """Return our arm, and fill ``weights`` for the peers."""
    settings, ranks = train_config(config), Ranks(0, 1, device)
    built = build_random(settings, ranks)
    weights.update({name: p.detach().cpu() for name, p in built.parameters.items()})
    return Arm("microllm", step_of(settings, built, ranks, random_rows(ids_BT).to(device)))


def _peer(config: BenchTrainConfig, form: Form, ids_BT: Tensor, weights: dict[str, Tensor]) -> Arm:
    dtype = torch.float32 if config.moments == "fp32" else torch.bfloat16
    twin: Any = make_twin(preset(config.model), weights, dtype=dtype, device=str(ids_BT.device)).train()
    twin.config.use_cache = False
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model = twin
    if form != "eager":
        model = torch.compile(twin, mode=None if form == "compile" else form)
    cast = torch.autocast(ids_BT.device.type, torch.bfloat16) if config.moments == "fp32" else nullcontext()

    def step() -> Tensor:
        if form == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with cast:
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Arm(f"transformers {form}, {'autocast' if config.moments == 'fp32' else 'bf16'}, fused AdamW", step)


def _rows(config: BenchTrainConfig, arms: list[Arm], step_s: list[float], device: torch.device) -> list[Row]:
    environment = environment_fields(capture_environment(str(device)))
    num_tokens, mine = config.rows * config.row_tokens, arms[0]
    shape = preset(config.model)
    peak = peak_tflops(device, "bf16")
    limit = None if peak is None else peak * 1e12 / flops_per_token(shape, (config.row_tokens + 1) / 2)
    found = []
    for arm, seconds in list(zip(arms, step_s, strict=True))[1:] or [(None, 0.0)]:
        far = 0.0 if arm is None else abs(arm.first_loss - mine.first_loss) / mine.first_loss
        parity = "pass" if far <= PARITY else f"first loss {mine.first_loss:.4f}, peer's {arm and arm.first_loss}"
        if not mine.last_loss < mine.first_loss * (1 - LEAST_FALL):
            parity = f"loss {mine.first_loss:.6f} at first, {mine.last_loss:.6f} at last: the step trains nothing"
        row = Row.model_validate({
            **environment, "target": config.target, "dtype": f"bf16, {config.moments} moments",
            "workload": f"train {config.model} B{config.rows} T{config.row_tokens}; limit: {MFU_FORMULA}",
            "ours": num_tokens / step_s[0] if parity == "pass" else None, "unit": "tok/s", "limit": limit,
            "peer_name": arm and arm.name, "peer": None if arm is None else num_tokens / seconds,
            "peak_bytes": mine.peak_bytes, "peer_peak_bytes": arm and arm.peak_bytes, "parity": parity,
        })  # fmt: skip
        found.append(write_row(config.out, row) if config.out else row)
    return found
