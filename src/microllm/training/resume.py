"""What a run keeps and goes on from.

Place: between the trainer and the files of ``checkpoints``. All ranks gather what one checkpoint holds; the first one
writes, and tells the others how it went, so that none waits for a writer that has failed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from microllm.errors import CheckpointError, ConfigError, MicroLLMError, TrainingError
from microllm.evidence.environment import capture_environment
from microllm.io.safetensors_files import SafetensorsSource
from microllm.training.build import Built, fill, whole
from microllm.training.checkpoints import (
    MARKER,
    OPTIMIZER_FILE,
    RANDOM_FILE,
    Complete,
    Snapshot,
    generator_states,
    latest_checkpoint,
    set_generator_states,
    write_checkpoint,
)
from microllm.training.config import TrainConfig, as_json, differences
from microllm.training.dataset import Index
from microllm.training.lora import WEIGHTS_FILE, peft_names, write_adapters
from microllm.training.optimizer import Optimizer
from microllm.training.ranks import Ranks


class Keeper:
    """The checkpoints of one run. ``refused`` says why newer ones than the one taken were not."""

    def __init__(
        self, config: TrainConfig, output: Path, index: Index, ranks: Ranks, built: Built, optimizer: Optimizer
    ) -> None:
        self.config, self.index, self.ranks, self.built, self.optimizer = config, index, ranks, built, optimizer
        self.directory = output / "checkpoints"
        self.refused: list[str] = []

    def resume(self) -> int:
        """Go back to the newest whole checkpoint, if there is one, and return its step; 0 begins anew.

        Raises:
            ConfigError: it is of another config or other data; the text names each field.
            CheckpointError: a newer version wrote it, or all that there is is damaged.
        """
        found: Any = None
        if self.ranks.is_first:
            try:
                found = latest_checkpoint(self.directory)
            except MicroLLMError as error:
                found = error
        found = self.ranks.share(found)
        if isinstance(found, MicroLLMError):
            raise found
        complete, self.refused = found
        if complete is None:
            if any((path / MARKER).is_file() for path in self.directory.glob("step-*")):  # else no write ever ended
                raise CheckpointError(
                    f"got no whole checkpoint in {self.directory}: {'; '.join(self.refused)}; need one; remove them "
                    "to begin anew"
                )
            return 0
        self._check(complete)
        self._fill(complete)
        return complete.step

    def _check(self, complete: Complete) -> None:
        problems = differences(complete.record["config"], as_json(self.config))
        if complete.record["data"] != self.index.digest:
            problems.append("the data's content")
        if complete.record["precision"] != self.built.precision:
            problems.append(f"precision: recorded {complete.record['precision']}, now {self.built.precision}")
        if problems:
            raise ConfigError(
                f"got a run in {self.directory.parent} of another config: {'; '.join(problems)}; need the same; "
                "take them back, or name another output"
            )

    def _fill(self, complete: Complete) -> None:
        """Copy everything into place, after every name has been looked at."""
        if self.built.adapters:
            weights = complete.tensors(WEIGHTS_FILE)
            targets: dict[str, Tensor] = dict(peft_names(self.built.adapters))
        else:
            weights = _weights(complete.path)
            targets = dict(self.built.parameters)
        states = complete.tensors(OPTIMIZER_FILE)
        for have, need, what in ((weights, targets, "weights"), (states, self.optimizer.state, "optimizer states")):
            differ = sorted(have.keys() ^ need.keys()) or [
                name for name, tensor in need.items() if tensor.shape != have[name].shape
            ]
            if differ:
                raise CheckpointError(f"got {complete.path} with other {what}, first {differ[0]}; need the run's own")
            for name, tensor in need.items():
                fill(tensor, have[name])
        mine = f"rank{self.ranks.rank}."
        states = complete.tensors(RANDOM_FILE)
        own = {key.removeprefix(mine): value for key, value in states.items() if key.startswith(mine)}
        set_generator_states(own, self.ranks.device)

    def keep(self, step: int) -> Path:
        """Write the checkpoint of ``step``; every rank calls this.

        Raises:
            CheckpointError: on the first rank, the disk refuses.
            TrainingError: on the others, then.
        """
        snapshot = self._snapshot(step)
        path, problem = None, None
        if self.ranks.is_first:
            try:
                path = self._write(snapshot)
            except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must not wait for it
                problem = error
        path, text = self.ranks.share((path, None if problem is None else str(problem)))
        if problem is not None:
            raise problem
        if text is not None:
            raise TrainingError(
                f"got a first rank that could not write: {text}; need its checkpoint; free room and go on"
            )
        return path

    def _snapshot(self, step: int) -> Snapshot:
        built = self.built
        if built.adapters:
            weights: dict[str, Tensor] = {n: p.detach() for n, p in peft_names(built.adapters).items()}
        else:
            weights = {name: self._gathered(p) for name, p in built.parameters.items()}
        optimizer = {name: self._gathered(tensor) for name, tensor in self.optimizer.state.items()}
        gathered = self.ranks.gather(generator_states(self.ranks.device))
        environment = capture_environment(str(self.ranks.device), seed=self.config.seed, command=())
        record = {
            "step": step, "config": as_json(self.config), "precision": built.precision, "data": self.index.digest,
            "num_ranks": self.ranks.world, "versions": environment.versions, "device": environment.device_name,
            "position": {"next_row": step * self.config.batch_rows},
        }  # fmt: skip
        states = {f"rank{r}.{name}": state for r, own in enumerate(gathered) for name, state in own.items()}
        return Snapshot(
            config=built.config, weights=weights, optimizer=optimizer, generators=states, record=record,
            text_files=self.index.text_files(),
        )  # fmt: skip

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor; of a sharded one the copy leaves the device before the next comes."""
        value = whole(tensor.detach())
        return value if value is tensor or not self.config.shard else value.cpu()

    def _write(self, snapshot: Snapshot) -> Path:
        adapter = None
        if self.built.adapters:
            adapter = partial(
                write_adapters, config=self.config.lora, tensors=snapshot.weights, model_name=self.config.model
            )
        return write_checkpoint(self.directory, snapshot, keep=self.config.keep_checkpoints, adapter=adapter)


def _weights(path: Path) -> dict[str, Tensor]:
    source = SafetensorsSource(path / "model.safetensors")
    return {(name if name == "lm_head.weight" else name.removeprefix("model.")): source.read(name)
            for name in source.infos}  # fmt: skip
