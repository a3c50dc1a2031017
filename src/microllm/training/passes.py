"""Forward and backward over a step's micro-batches, and the passes that need no gradient.

Place: the trainer gives it rows on the device, with weights that make the loss a mean over the whole step. Gradients
of all but the last micro-batch stay on the rank. Does not decide anything.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from microllm.training.build import Built, whole
from microllm.training.capture import Captured
from microllm.training.config import TrainConfig
from microllm.training.dataset import Dataset, Rows
from microllm.training.optimizer import local
from microllm.training.ranks import Ranks

TEMPERATURE = 0.8
"""Of the samples of text that a run shows."""
ROWS_PER_PASS = 8
"""Of a validation."""


class Passes:
    """The passes of one rank over its network."""

    def __init__(self, config: TrainConfig, built: Built, ranks: Ranks) -> None:
        self._built, self._ranks = built, ranks
        self._parameters = list(built.parameters.values())
        suits = ranks.device.type == "cuda" and built.precision == "bf16" and ranks.world == 1
        suits = suits and not (config.compile or config.shard)
        self.captures = config.capture == "on" or (config.capture == "auto" and suits)
        self.fixed_shape = self.captures or config.compile
        self._captured = Captured(built, ranks) if self.captures else None

    def run(self, batches: list[Rows]) -> tuple[float, float]:
        """Leave the step's gradients in the parameters; return this rank's weighted loss and the gradients' norm."""
        self._built.network.train()
        if self._captured is not None:
            total = self._captured.run(batches)
        else:
            total = torch.zeros((), device=self._ranks.device)
            for number, rows in enumerate(batches):
                total += forward_backward(self._built, rows, last=number == len(batches) - 1)
        norm = whole(torch.nn.utils.get_total_norm(self._gradients()))
        loss, norm = torch.stack((total, norm.to(total.dtype))).tolist()  # the one synchronisation of a step
        return loss, norm

    def clip(self, norm: float, most: float) -> None:
        """Scale the gradients so that their norm is at most ``most``."""
        if most and norm > most:
            torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
                [local(g) for g in self._gradients()], most / (norm + 1e-6)
            )

    def forget_gradients(self) -> None:
        """Make room for the next step's."""
        if self._captured is None:
            for parameter in self._parameters:
                parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    @torch.no_grad()
    def validate(self, data: Dataset, rows: list[int], num_rows: int) -> tuple[float, float]:
        """Return the summed loss of this rank's share of ``num_rows`` rows, and how many tokens it is of."""
        network, total, counted = self._built.network.eval(), 0.0, 0.0
        for i in range(0, -(-num_rows // self._ranks.world), ROWS_PER_PASS):  # as many on every rank: they may meet
            part = rows[i : i + ROWS_PER_PASS]
            batch = data.batch(part, max(1, len(part)))
            total += float(network(batch.to(self._ranks.device)))
            counted += float(batch.weights_N.sum())
        return total, counted

    @torch.no_grad()
    def sample(self, ids: list[int], num_tokens: int, seed: int, stop_ids: Collection[int]) -> list[int]:
        """Return a prompt's ids and what the model says to them, drawn from ``seed``."""
        network, made = self._built.network.eval(), list(ids)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(min(num_tokens, self._built.config.max_position_embeddings - len(ids))):
            length = len(made)
            rows = Rows(
                torch.tensor(made), torch.full((length,), -100), torch.arange(length),
                torch.tensor([0, length], dtype=torch.int32), torch.zeros(length), length,
            )  # fmt: skip
            logits = network(rows.to(self._ranks.device), last_logits=True)[0].float().cpu()
            made.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
            if made[-1] in stop_ids:
                break
        return made


def forward_backward(built: Built, rows: Rows, *, last: bool) -> Tensor:
    """Add the gradients of one micro-batch, reduce them over the ranks if it is the last, and return its loss."""
    run = built.run
    if isinstance(run, FSDPModule):
        run.set_requires_gradient_sync(last)
    with run.no_sync() if isinstance(run, DistributedDataParallel) and not last else nullcontext():
        loss = run(rows)
        loss.backward()
    return loss.detach()
