"""One decoding step of a host for a fixed number of rows and tokens: captured on a GPU, run as it is elsewhere.

Place: the loop and speculation drive it. Token ids and positions lie in buffers that the step reads, and a greedy step
of one token writes its choice back into them, so that steps follow each other without the host's word.

Axes:    B = rows, T = tokens, V = vocabulary, D = model dim
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from microllm import ops
from microllm.errors import CaptureRefused
from microllm.sampling.sampler import Sampler, choose_tokens
from microllm.step import Graphs
from microllm.structures.guard import Seat
from microllm.structures.host import Host
from microllm.structures.sites import attachment_of
from microllm.structures.stack import logits_of, new_cache, run_prompt, run_tokens


class Step:
    """A cache of ``num_rows`` and the step of ``width`` tokens a row over it.

    A captured pass launches nothing by itself, so the calls that it counted are taken back and counted a replay each.
    """

    def __init__(
        self, host: Host, num_rows: int, width: int, capacity: int, *, capture: bool = True
    ) -> None:  # fmt: skip
        device = host.weight.device
        self.host, self.width = host, width
        self.cache = new_cache(host, num_rows, capacity)
        self.token_ids = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        self.positions = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        self.hidden = self.logits = torch.empty(0)
        self._chosen = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        self._replay: Callable[[], object] | None = None
        self._capture = capture and device.type == "cuda"
        self._counted: list[tuple[Seat, int]] = []
        self._num_replays = 0

    @property
    def captured(self) -> bool:
        """Return whether a run replays a graph."""
        return self._replay is not None

    @torch.inference_mode()
    def prompt(self, rows: Sequence[Sequence[int]], samplers: Sequence[Sampler] | None) -> list[int]:
        """Fill the cache from prompts, and return (and set) the first token of each; greedy without samplers."""
        self._make_graph()
        device, lengths = self.token_ids.device, [len(row) for row in rows]
        padded = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = torch.tensor(row)
        num_tokens = torch.tensor(lengths, device=device)
        x = run_prompt(self.host, padded.to(device), self.cache, num_tokens)
        self.last_hidden = x
        logits = logits_of(self.host, x)[:, 0]
        chosen = ops.argmax(logits.contiguous()) if samplers is None else choose_tokens(logits.contiguous(), samplers)
        self.token_ids.copy_(chosen[:, None].clamp(min=0).expand(-1, self.width))
        self.positions.copy_(num_tokens[:, None] + torch.arange(self.width, device=device))
        return chosen.tolist()

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Run the step on what the buffers hold; return its choices [B, T], which the next run overwrites."""
        if self._replay is not None:
            self._replay()
            self._num_replays += 1
        else:
            seen = min(int(self.positions.max()) + 1, self.cache.capacity)
            self._pass(seen)
        return self._chosen

    def greedy(self) -> Iterator[list[int]]:
        """Yield the tokens of one step after the other; on a GPU the next step is launched before they are read."""
        if self._replay is None:
            while True:
                yield self.run()[:, 0].tolist()
        host = [torch.empty(len(self._chosen), dtype=torch.int64, pin_memory=True) for _ in range(2)]
        done = [torch.cuda.Event() for _ in range(2)]
        number = 0
        self._launch(host[0], done[0])
        while True:
            ahead = (number + 1) % 2
            self._launch(host[ahead], done[ahead])
            done[number % 2].synchronize()
            yield host[number % 2].tolist()
            number += 1

    @torch.inference_mode()
    def sampled(self, samplers: Sequence[Sampler]) -> Iterator[list[int]]:
        """Yield the tokens of one step after the other, chosen as the samplers say."""
        while True:
            self.run()
            chosen = choose_tokens(self.logits[:, 0].contiguous(), samplers)
            self.token_ids.copy_(chosen[:, None].clamp(min=0))
            yield chosen.tolist()

    def settle(self) -> None:
        """Write the replays since the last time into the ledgers of what ran."""
        for seat, calls in self._counted:
            seat.ledger.replays += calls * self._num_replays
        self._num_replays = 0

    def _launch(self, host: Tensor, done: torch.cuda.Event) -> None:
        self.run()
        host.copy_(self._chosen[:, 0], non_blocking=True)
        done.record()

    def _pass(self, seen: int | None) -> None:
        x = run_tokens(self.host, self.token_ids, self.positions, self.cache, seen)
        logits = logits_of(self.host, x)
        self.hidden, self.logits = x, logits
        self._chosen.copy_(ops.argmax(logits.flatten(0, 1)).view_as(self._chosen))
        if self.width == 1:
            self.token_ids.copy_(self._chosen.clamp(min=0))
            self.positions.add_(1).clamp_(max=self.cache.capacity - 1)

    def _make_graph(self) -> None:
        """Capture the step, before the cache holds anything: its first run writes into it.

        Raises:
            CaptureRefused: the host does what a graph does not take; the next eager call works.
        """
        if not self._capture or self._replay is not None:
            return
        self.positions.zero_()
        attachment, current = attachment_of(self.host.model), torch.cuda.current_stream()
        seats = [] if attachment is None else attachment.seats
        calls: list[int] = []

        def counted() -> None:
            calls[:] = [seat.ledger.calls for seat in seats]
            with ops.overlapped():
                self._pass(None)

        try:
            self._replay = Graphs(self.token_ids.device).capture(counted)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that failed leaves its own behind
            raise CaptureRefused(f"got a host whose step a graph does not take: {error}; generate with it") from error
        for seat, before in zip(seats, calls, strict=True):
            if seat.ledger.calls > before:
                self._counted.append((seat, seat.ledger.calls - before))
                seat.ledger.calls = before
