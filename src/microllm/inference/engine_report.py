"""What an engine says of itself: counters, and where its memory is."""

from __future__ import annotations

from dataclasses import dataclass

from microllm.step import PoolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What an engine is doing and has done since it was made.

    Units:   ``draft_bytes`` are a draft model's caches, beside ``kv``: a dense row for each request that guesses
    Numbers: prefix tokens were found in the pool and not computed; accepted drafts are those that the model chose too;
             failed ones are calls that raised, whose step went on without a guess
    """

    num_steps: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_prefix_tokens: int
    num_drafts_proposed: int
    num_drafts_accepted: int
    num_drafts_failed: int
    num_cached_pages: int
    kv: PoolUse
    draft_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Where an engine's memory is; on a GPU beside the most that this process has held there.

    Units:   bytes; ``weight_bytes`` are all of the weights': where matrices are quantised, ``code_bytes`` of them are
             codes, ``scale_bytes`` scales and minima, and the token table stays in floats beside a head of codes;
             ``arena_bytes`` are the buffers of all shapes of steps, of the largest prompt that ran uncaptured,
             and tables; ``peak_bytes`` is None on a CPU
    """

    weight_bytes: int
    code_bytes: int
    scale_bytes: int
    pool_bytes: int
    arena_bytes: int
    peak_bytes: int | None

    @property
    def accounted_bytes(self) -> int:
        """Return weights, pool and arena together: what the peak should be, nearly."""
        return self.weight_bytes + self.pool_bytes + self.arena_bytes
