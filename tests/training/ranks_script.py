"""What two ranks do in one launch: started by test_ranks.py under torchrun, with the data, a place, and a scenario."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from microllm.errors import MicroLLMError
from microllm.io import safetensors_files
from microllm.training import OptimizerConfig, TrainConfig, train
from microllm.training.dataset import Dataset
from microllm.training.network import TrainBlock
from microllm.training.trainer import Trainer

SGD = OptimizerConfig(optimizer="sgd", learning_rate=0.1, clip_norm=0)


def config(data: Path, output: Path, **changes: object) -> TrainConfig:
    settings = {
        "data": data, "output": output, "model": "tiny", "num_steps": 10, "row_tokens": 32, "batch_rows": 5,
        "device": "cpu", "checkpoint_every": 4, "check_ranks_every": 2,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
    } | changes  # fmt: skip
    return TrainConfig(**settings)


def refused(run: TrainConfig) -> str:
    """Train, and return the error that this rank ends with."""
    try:
        train(run)
    except MicroLLMError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def say(output: Path, name: str, text: object) -> None:
    (output / f"{name}.rank{os.environ['RANK']}").write_text(str(text))


def together(data: Path, output: Path) -> None:
    """Everything that needs no process to end."""
    first = os.environ["RANK"] == "0"
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(config(data, output / "whole"))
    train(config(data, output / "parts", stop_at=5))
    train(config(data, output / "parts"))
    for name, more in (("sgd", {}), ("micro", {"micro_rows": 1})):
        train(config(data, output / name, num_steps=2, optimizer=SGD, **more))
    train(config(data, output / "shard", num_steps=2, optimizer=SGD, shard=True, check_ranks_every=0, micro_rows=2))
    train(config(data, output / "shard-parts", num_steps=4, shard=True, check_ranks_every=0, stop_at=2))
    train(config(data, output / "shard-parts", num_steps=4, shard=True, check_ranks_every=0))
    train(config(data, output / "shard-whole", num_steps=4, shard=True, check_ranks_every=0))

    real_batch = Dataset.batch
    if not first:  # one rank's data goes wrong at step 6: no rank may take that step
        calls = []

        def poisoned(self, rows, num_rows):
            calls.append(1)
            found = real_batch(self, rows, num_rows)
            return found._replace(weights_N=found.weights_N * float("nan")) if len(calls) == 6 else found

        Dataset.batch = poisoned
    say(output, "nan", refused(config(data, output / "nan")))
    Dataset.batch = real_batch

    if first:
        real_save = safetensors_files.save_file

        def full(contents, path, metadata):
            if "step-00000008" in str(path):
                raise OSError(28, "No space left on device")
            real_save(contents, path, metadata=metadata)

        safetensors_files.save_file = full
    say(output, "full", refused(config(data, output / "full")))

    real_step = Trainer._train_step

    def drifting(self):
        if not first and self.step == 5:
            self.built.parameters["norm.weight"].data[0] += 1e-3
        return real_step(self)

    Trainer._train_step = drifting
    say(output, "drift", refused(config(data, output / "drift")))

    def told(self):
        if not first and self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank alone is told
        return real_step(self)

    Trainer._train_step = told
    say(output, "term", train(config(data, output / "term")))
    dist.destroy_process_group()
    os._exit(0)  # one process in ten aborts when gloo's threads meet the interpreter's end


def killed(data: Path, output: Path) -> None:
    """Rank 1 is killed in the middle of a backward pass of step 7."""
    real = TrainBlock.forward
    calls = []

    def dies(self, *args):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args)

    TrainBlock.forward = dies
    from microllm.cli import main

    sys.exit(main(arguments(data, output)))


def resumed(data: Path, output: Path) -> None:
    """The same command as that of ``killed``, with nobody killed."""
    from microllm.cli import main

    sys.exit(main(arguments(data, output)))


def arguments(data: Path, output: Path) -> list[str]:
    words = f"train --data {data} --output {output / 'killed'} --model tiny --num-steps 10 --row-tokens 32"
    words += " --batch-rows 5 --device cpu --checkpoint-every 4 --learning-rate 3e-3"
    return words.split()


if __name__ == "__main__":
    {"together": together, "killed": killed, "resumed": resumed}[sys.argv[3]](Path(sys.argv[1]), Path(sys.argv[2]))
