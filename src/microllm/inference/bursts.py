"""Bursts: steps that a GPU takes on its own while the host still reads the tokens of those before.

Place: the engine begins one where a planned step is of decoding rows alone whose next tokens need nothing from the
host, and goes on from burst to burst until somebody waits, a row runs out of pages, or all have ended. A row that ends
within a burst runs on in it, and in the one behind it, over pages that it still has; its tokens there are dropped, its
pages stay its own until all is over, and in later bursts, for which it has none, it idles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from microllm.inference.graph_runner import BURST_STEPS, CapturedBurst, GraphRunner
from microllm.inference.request import Request
from microllm.inference.scheduler import Chunk, Scheduler
from microllm.inference.sequence import GeneratedSequence
from microllm.ops.advance import IDLE
from microllm.step import DecodeRow, TokenReader, bucket


@dataclass(slots=True, kw_only=True)
class Flight:
    """A series of bursts over the same rows: how many steps are launched, and what is still to be read.

    ``num_waiting``: how many requests could not be let in when it began.
    """

    requests: list[Request]
    first_positions: list[int]
    burst: CapturedBurst
    num_waiting: int
    num_launched: int = 0
    readers: list[TokenReader] = field(default_factory=list)


class Bursts:
    """The bursts of one engine, at most two under way; they choose among the vocabulary's first ``num_tokens``."""

    def __init__(self, runner: GraphRunner, scheduler: Scheduler, num_tokens: int) -> None:
        self._runner, self._scheduler, self.num_tokens = runner, scheduler, num_tokens
        self._flight: Flight | None = None

    @property
    def under_way(self) -> bool:
        """Return whether tokens are still to be read."""
        return self._flight is not None

    def num_ahead(self) -> dict[Request, int]:
        """Return how many tokens, beyond those handed out, the bursts under way store for each of their requests."""
        flight = self._flight
        if flight is None:
            return {}
        return {
            request: min(position + flight.num_launched, request.max_stored_tokens) - request.num_computed
            for request, position in zip(flight.requests, flight.first_positions, strict=True)
        }

    def begin(self, chunks: Sequence[Chunk]) -> bool:
        """Launch a burst in place of a planned step, where all of its rows can take one."""
        if not all(_by_itself(chunk) for chunk in chunks):
            return False
        if not self._reserve([(chunk.request, chunk.start) for chunk in chunks]):
            return False
        self._flight = Flight(
            requests=[chunk.request for chunk in chunks], first_positions=[chunk.start for chunk in chunks],
            burst=self._runner.begin([_row(chunk) for chunk in chunks], self.num_tokens),
            num_waiting=len(self._scheduler.waiting),
        )  # fmt: skip
        self._launch(self._flight)
        return True

    def land(self) -> list[Request]:
        """Launch the next burst if there is to be one, then hand out the tokens of the one before; return whose."""
        flight = self._flight
        assert flight is not None, "nothing is under way"
        if self._goes_on(flight):
            self._launch(flight)
        touched = self._hand_out(flight)
        if not flight.readers:
            self._end(flight)
        return touched

    def drain(self) -> list[Request]:
        """Hand out all that is under way and launch no more; return whose tokens they were."""
        flight, touched = self._flight, []
        while flight is not None and flight.readers:
            touched += self._hand_out(flight)
        if flight is not None:
            self._end(flight)
        return touched

    def _launch(self, flight: Flight) -> None:
        ended = [row for row, request in enumerate(flight.requests) if request.finish_reason is not None]
        flight.readers.append(self._runner.go_on(flight.burst, flight.requests, ended))
        flight.num_launched += BURST_STEPS

    def _goes_on(self, flight: Flight) -> bool:
        """Say whether another burst helps somebody, and keeps nobody waiting who could be let in."""
        running = [
            (request, position + flight.num_launched)
            for request, position in zip(flight.requests, flight.first_positions, strict=True)
            if request.finish_reason is None and position + flight.num_launched < request.max_stored_tokens
        ]
        has_left = any(request.finish_reason is not None for request in flight.requests)
        num_waiting = len(self._scheduler.waiting)
        if not running or num_waiting > flight.num_waiting or (num_waiting and has_left):
            return False
        if bucket(len(running)) < flight.burst.rows.num_rows:
            return False
        return self._reserve(running)

    def _reserve(self, running: Sequence[tuple[Request, int]]) -> bool:
        """Take pages for a burst of each request from its next position on; False where they are short."""
        return all(
            self._scheduler.reserve(request, min(position + BURST_STEPS, request.max_stored_tokens))
            for request, position in running
        )

    def _hand_out(self, flight: Flight) -> list[Request]:
        touched = []
        tokens = flight.readers.pop(0).tokens()
        for row, request in enumerate(flight.requests):
            if request.finish_reason is not None:
                continue
            sequence, num_kept = request.sequence, 0
            for line in tokens:
                if line[row] == IDLE:
                    break
                _accept(sequence, line[row])
                num_kept += 1
                if sequence.finish_reason is not None:
                    break
            self._scheduler.keep(request, num_kept)
            touched.append(request)
        return touched

    def _end(self, flight: Flight) -> None:
        self._flight = None
        for request in flight.requests:
            if request.finish_reason is None:
                self._scheduler.settle(request)


def _accept(sequence: GeneratedSequence, token_id: int) -> None:
    """Hand a sequence its token; what fails there ends it alone: the tokens of the others are on their way too."""
    try:
        sequence.accept(token_id)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
        sequence.fail(f"got {type(error).__name__} while its token was taken: {error}; need none; report it")


def count_tokens(vocab_size: int, banned_ids: Tensor | None) -> int | None:
    """Return how many rows of the vocabulary are tokens, where those that are none lie behind all others; else None."""
    if banned_ids is None:
        return vocab_size
    count = vocab_size - len(banned_ids)
    return count if int(banned_ids[0]) == count else None


def _by_itself(chunk: Chunk) -> bool:
    """Say whether a row's next tokens can be chosen with nothing from the host."""
    sampler = chunk.request.sequence.sampler
    plain = chunk.kind == "decode" and chunk.reaches_end and len(chunk.token_ids) == 1
    return plain and chunk.request.draft is None and not sampler.edits_by_request and sampler.params.logprobs is None


def _row(chunk: Chunk) -> DecodeRow:
    request, sampler = chunk.request, chunk.request.sequence.sampler
    assert request.slot is not None, "a request that runs has a slot"
    params = sampler.params
    return DecodeRow(
        slot=request.slot, position=chunk.start, token_id=chunk.token_ids[0], last=request.max_stored_tokens - 1,
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=sampler.seed,
        choice=sampler.choice,
    )  # fmt: skip
