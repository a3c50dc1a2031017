"""The ranks of a run: who this process is, and the few numbers that all of them agree on.

Place: ``torchrun`` starts the ranks, ``torch.distributed`` joins them; here is the glue. Small agreements go over gloo
on the CPU, so that they cost no GPU synchronisation and a peer that died is noticed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from microllm.errors import TrainingError, UnavailableError

TIMEOUT = timedelta(minutes=10)
"""A collective that takes longer has failed: of a peer that hangs; one that died is noticed at once."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who a process is, among how many."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes and speaks."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over all ranks.

        Numbers: fp64, in the order of the ranks' ring: the same bits on every rank
        """
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with _named(self):
            dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Return every rank's value, in their order, on every rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with _named(self):
            dist.all_gather_object(found, value)
        return found

    def share(self, value: Any) -> Any:  # noqa: ANN401
        """Return the first rank's value on every rank."""
        if self.world == 1:
            return value
        box = [value]
        with _named(self):
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def different(self, tensors: dict[str, Tensor]) -> str | None:
        """Return the name of the first tensor whose bits are not the same on all ranks, or None."""
        for name, tensor in tensors.items() if self.world > 1 else ():
            mine = tensor.detach()
            first = mine.clone()
            with _named(self):
                dist.broadcast(first, src=0)
            if self.sum([float(not torch.equal(first, mine))])[0]:
                return name
        return None


@contextmanager
def _named(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"got a failed collective on rank {ranks.rank} of {ranks.world} ({reason}); need every rank alive; "
            "torchrun's table names the one that ended first; start again: the last checkpoint is whole"
        ) from error


def choose_device(name: str) -> torch.device:
    """Return the device that ``name`` stands for on this rank.

    Raises:
        UnavailableError: the machine has no such device.
    """
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise UnavailableError(f"got device {name!r}; need auto, cpu, cuda or cuda:N")
    has_gpu = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise UnavailableError(f"got device {name!r} and no GPU that torch sees; need one, or --device cpu")
    number = dist.get_node_local_rank(0)  # pyright: ignore[reportPrivateImportUsage]
    device = torch.device(name if ":" in name else f"cuda:{number}")
    if (device.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(f"got {device} of {torch.cuda.device_count()} GPUs; need fewer ranks, or another device")
    return device


@contextmanager
def joined(device_name: str) -> Iterator[Ranks]:
    """Join the ranks that ``torchrun`` started, or be the only one; leave them at the end.

    After an exception the group is not left in order: peers may be gone, and leaving would wait for them.
    """
    device = choose_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():  # the caller's group, which stays the caller's
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
        return
    if not dist.is_torchelastic_launched():
        yield Ranks(0, 1, device)
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device if device.type == "cuda" else None)
    yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()
