"""Forward and backward as one CUDA graph: a small model's step is launches, and a replay has one.

Place: ``passes`` replays it in place of calling the network. Inputs are copied into the graph's own; gradients lie
where the capture put them. One graph for the first micro-batch of a step, which makes the gradients, one for others,
which add to them; under DDP those of the last reduce them too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from microllm.training.build import Built
from microllm.training.dataset import Rows
from microllm.training.ranks import Ranks

WARM_UP, WARM_UP_DDP = 3, 11
"""Passes before a capture: allocators and libraries settle; DDP makes its buckets anew in the first ten."""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    loss: Tensor


class Captured:
    """The graphs of one network, by whether a micro-batch is the first and the last of its step."""

    def __init__(self, built: Built, ranks: Ranks) -> None:
        self._built, self._ranks = built, ranks
        self._rows: Rows | None = None
        self._graphs: dict[tuple[bool, bool], _Graph] = {}
        self._parameters = list(built.parameters.values())
        self._gradients: list[Tensor | None] = []
        self._replicated = isinstance(built.run, DistributedDataParallel)

    def run(self, batches: list[Rows]) -> Tensor:
        """Return the loss of all micro-batches; the gradients are in the parameters, until the next run."""
        total: Tensor | None = None
        if self._rows is None:
            self._rows = Rows(*(t.clone() for t in batches[0][:-1]), batches[0].max_length)  # type: ignore[arg-type]
            self._warm_up(len(batches))
        for number, rows in enumerate(batches):
            for mine, theirs in zip(self._rows[:-1], rows[:-1], strict=True):
                mine.copy_(theirs)
            key = (number == 0, number == len(batches) - 1)
            if key not in self._graphs:
                self._graphs[key] = self._capture(*key)  # runs nothing yet
            graph = self._graphs[key]
            graph.graph.replay()
            total = graph.loss.clone() if total is None else total + graph.loss
        assert total is not None
        return total

    def _pass(self, *, last: bool) -> Tensor:
        from_here = self._built.run
        if self._replicated and not last:
            assert isinstance(from_here, DistributedDataParallel)
            with from_here.no_sync():
                loss = from_here(self._rows)
                loss.backward()
        else:
            loss = from_here(self._rows)
            loss.backward()
        return loss.detach()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _warm_up(self, num_batches: int) -> None:
        stream = torch.cuda.Stream(self._ranks.device)
        stream.wait_stream(torch.cuda.current_stream(self._ranks.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_DDP if self._replicated else WARM_UP):
                self._clear_or_zero()
                self._pass(last=True)
        torch.cuda.current_stream(self._ranks.device).wait_stream(stream)
        self._clear_or_zero()

    def _clear_or_zero(self) -> None:
        """DDP's gradients are views of its buckets, which stay; others go."""
        if self._replicated:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_zero_(gradients)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._clear()

    def _capture(self, first: bool, last: bool) -> _Graph:  # noqa: FBT001
        if first and not self._replicated:
            self._clear()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            if first and self._replicated:
                self._clear_or_zero()
            loss = self._pass(last=last)
        return _Graph(graph, loss)
