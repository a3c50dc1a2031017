"""What a training run is: one frozen config, composed, and how two of them differ.

Place: read by every file here; the command's flags are its fields. Holds no state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from microllm.config import PRESETS, ModelConfig
from microllm.errors import ConfigError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How parameters move.

    Args:
        optimizer: adamw, or sgd (no momentum) for tests.
        learning_rate: At the schedule's height.
        beta1: Weight of the past in the gradient's mean.
        beta2: Weight of the past in the square's mean.
        eps: Added to the root of the square's mean.
        weight_decay: On matrices; norms and biases have none.
        moments: Precision of AdamW's state; bf16 halves its bytes.
        stochastic_rounding: Round bf16 moments up or down at random (by seed and step) instead of to nearest.
        clip_norm: The gradient's norm is cut to this; 0 never cuts.
    """

    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    moments: Literal["fp32", "bf16"] = "fp32"
    stochastic_rounding: bool = False
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0 and self.weight_decay >= 0 and self.clip_norm >= 0 and self.eps >= 0,
                 f"got learning_rate={self.learning_rate}, weight_decay={self.weight_decay}, clip_norm={self.clip_norm}"
                 f", eps={self.eps}; need a rate above 0 and none of the others below 0")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate goes over the run.

    Args:
        schedule: cosine and linear fall from the end of the warm-up on; wsd stays high and falls at the end.
        warmup_steps: Steps of a linear rise from 0.
        decay_fraction: Share of the run that wsd falls over.
        final_ratio: The last rate as a share of the highest.
    """

    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        _require(self.warmup_steps >= 0 and 0 <= self.decay_fraction <= 1 and 0 <= self.final_ratio <= 1,
                 f"got warmup_steps={self.warmup_steps}, decay_fraction={self.decay_fraction}, final_ratio="
                 f"{self.final_ratio}; need 0 or more steps, and shares from 0 to 1")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters instead of whole matrices; the file format is PEFT's.

    Args:
        lora_rank: Rank of the adapters; 0 trains the whole model.
        lora_alpha: The adapter's output is multiplied by alpha / rank.
        lora_targets: Which matrices of every layer get one.
    """

    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        _require(self.lora_rank >= 0 and self.lora_alpha > 0 and set(self.lora_targets) <= set(TARGETS) != set(),
                 f"got lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha}, lora_targets={self.lora_targets}; "
                 f"need a rank from 0, an alpha above 0, and targets of {', '.join(TARGETS)}")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run: model, data, steps, precision, what is kept and shown.

    Args:
        data: A directory that microllm data pack made, or a text or JSONL file (packed under the output first).
        output: Directory of the run: checkpoints, metrics, the loss curve.
        model: A preset (trained from scratch), or any model that can be loaded.
        num_steps: Optimizer steps of the whole run.
        stop_at: Stop with a checkpoint after this step; the schedule stays that of num_steps.
        row_tokens: Tokens of a row: documents laid end to end, kept apart.
        batch_rows: Rows of an optimizer step, over all micro-batches and ranks.
        micro_rows: Rows of a forward pass of one rank; 0: all of the rank's share at once.
        whole_documents: Begin a row early rather than cut a document that would fit in one.
        optimizer: How parameters move.
        schedule: How the learning rate goes.
        lora: Adapters instead of whole matrices.
        precision: bf16 computes in bf16 from fp32 master weights; auto: bf16 on a GPU, fp32 on a CPU.
        device: auto, cpu or cuda; of several GPUs each rank takes its own.
        seed: Of the weights, the order of the data and random rounding.
        deterministic: Take no kernel whose bits change from run to run.
        recompute: Compute each block's activations again in the backward pass: less memory, more time.
        compile: Compile each block with torch.compile.
        capture: Replay forward and backward as one CUDA graph; auto: in bf16 on one GPU, without compile.
        shard: Shard parameters, gradients and moments over the ranks (FSDP2) instead of copying them (DDP).
        level: reference runs every operator in plain torch; auto takes the best level.
        checkpoint_every: Steps between checkpoints; there is always one at the end.
        keep_checkpoints: How many are kept.
        validate_every: Steps between validations; 0: never.
        validate_rows: Rows of the validation split that are looked at.
        sample_every: Steps between samples of text; 0: never.
        sample_prompts: What the samples begin with.
        sample_tokens: Length of a sample.
        check_ranks_every: Steps between checks that all ranks hold the same parameters; 0: never.
        tensorboard: Write TensorBoard files too.
    """

    data: Path
    output: Path
    model: str = "model_s"
    num_steps: int = 100
    stop_at: int | None = None
    row_tokens: int = 512
    batch_rows: int = 32
    micro_rows: int = 0
    whole_documents: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: str = "auto"
    seed: int = 0
    deterministic: bool = False
    recompute: bool = False
    compile: bool = False
    capture: Literal["auto", "off", "on"] = "auto"
    shard: bool = False
    level: Literal["auto", "reference"] = "auto"
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    validate_every: int = 0
    validate_rows: int = 64
    sample_every: int = 0
    sample_prompts: tuple[str, ...] = ("The",)
    sample_tokens: int = 48
    check_ranks_every: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("num_steps", "row_tokens", "batch_rows", "checkpoint_every", "keep_checkpoints", "validate_rows"):
            _require(getattr(self, name) >= 1, f"got {name}={getattr(self, name)}; need at least 1")
        for name in ("micro_rows", "validate_every", "sample_every", "sample_tokens", "check_ranks_every", "seed"):
            _require(getattr(self, name) >= 0, f"got {name}={getattr(self, name)}; need 0 or more")
        _require(self.stop_at is None or self.stop_at >= 1, f"got stop_at={self.stop_at}; need at least 1")
        _require(not self.lora.lora_rank or self.preset is None,
                 f"got lora_rank={self.lora.lora_rank} for the preset {self.model}; need a trained model")  # fmt: skip
        _require(not (self.capture == "on" and (self.shard or self.compile)),
                 "got capture=on with shard or compile; need one of them")  # fmt: skip

    @property
    def preset(self) -> ModelConfig | None:
        """Return the shape that is trained from scratch, or None where a model is loaded."""
        return PRESETS.get(self.model) if not Path(self.model).exists() else None

    @property
    def last_step(self) -> int:
        """Return the step after which this process stops."""
        return min(self.num_steps, self.stop_at or self.num_steps)


MAY_DIFFER = frozenset({
    "data", "output", "stop_at", "device", "checkpoint_every", "keep_checkpoints", "validate_every", "validate_rows",
    "sample_every", "sample_prompts", "sample_tokens", "check_ranks_every", "tensorboard",
})  # fmt: skip
"""Fields that change nothing of what is learnt; the data is compared by its content instead."""


def as_json(config: Any) -> Any:  # noqa: ANN401  any dataclass, or what its fields hold
    """Return a config as JSON data."""
    if is_dataclass(config):
        return {f.name: as_json(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, tuple):
        return [as_json(item) for item in config]
    return str(config) if isinstance(config, Path) else config


def differences(recorded: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return one text for each field that is not as recorded, but for those that may differ."""
    found = []
    for name in sorted((recorded.keys() | now.keys()) - (set() if prefix else MAY_DIFFER)):
        then, today = recorded.get(name), now.get(name)
        if isinstance(then, dict) and isinstance(today, dict):
            found += differences(then, today, f"{prefix}{name}.")
        elif then != today:
            found.append(f"{prefix}{name}: recorded {then!r}, now {today!r}")
    return found


def _require(holds: bool, text: str) -> None:  # noqa: FBT001
    if not holds:
        raise ConfigError(text)
