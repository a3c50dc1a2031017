"""A request on its way through the engine: its state, its pages, its counters.

Place: the scheduler moves it from state to state and the engine hands it tokens; its text, stops and sampling are its
``sequence``'s. One request is one choice of one prompt.

    waiting -> prefilling -> decoding -> finished
       ^_________|____________|  preempted: back to waiting, with its tokens and without its pages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from microllm.inference.completion import Completion, FinishReason
from microllm.inference.sequence import GeneratedSequence
from microllm.sampling.draft import Draft
from microllm.step.pages import first_digest, page_digests

if TYPE_CHECKING:
    from microllm.inference.verify import TokenOrigin

State = Literal["waiting", "prefilling", "decoding", "preempted", "finished"]


class Request:
    """One sequence and what the engine knows about it.

    Units:   ``submitted_s``, ``first_token_s`` and ``finished_s`` in seconds on ``time.perf_counter``, None for what
             has not happened yet; steps are the engine's, counted from 0; ``max_steps`` is the most steps that it may
             take from submission to its end
    """

    def __init__(
        self, number: int, sequence: GeneratedSequence, *, salt: bytes = b"", draft: Draft | None = None
    ) -> None:
        self.number, self.sequence, self.salt, self.draft = number, sequence, salt, draft
        self.state: State = "waiting"
        self.pages: list[int] = []
        self.slot: int | None = None
        self.num_computed = 0
        """How many of its tokens have their keys and values in its pages."""
        self.num_published = 0
        """How many of its pages others may find."""
        self.num_tabled = 0
        """How many of its pages the device's table has."""
        self.origins: list[TokenOrigin] = []
        """Where each of its tokens was made, where the engine diagnoses."""
        self.cold = False
        """Whether it was in a step whose shape had to be made first (``Engine.prewarm``)."""
        self.cached_prefix_tokens = 0
        self.preemptions = 0
        self.submitted_step = self.max_steps = 0
        self.finished_step: int | None = None
        self._digests = [first_digest(salt)]

    @property
    def prompt_length(self) -> int:
        """Return the number of the prompt's tokens."""
        return len(self.sequence.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens known: the prompt's and those chosen so far."""
        return self.prompt_length + len(self.sequence.token_ids)

    @property
    def max_stored_tokens(self) -> int:
        """Return the most tokens that its pages ever hold: the last one chosen is never stored."""
        return self.prompt_length + self.sequence.max_new_tokens - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return how it ended, once it has."""
        return self.sequence.finish_reason

    @property
    def submitted_s(self) -> float:
        """Return when it was asked for."""
        return self.sequence.submitted_s

    @property
    def first_token_s(self) -> float | None:
        """Return when its first token was chosen."""
        return self.sequence.first_token_s

    @property
    def finished_s(self) -> float | None:
        """Return when it ended."""
        return self.sequence.finished_s

    @property
    def completion(self) -> Completion:
        """Return the finished completion."""
        return self.sequence.completion()

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions ``start`` to ``end``, the latter left out."""
        split = self.prompt_length
        chosen = self.sequence.token_ids[max(start - split, 0) : max(end - split, 0)]
        return [*self.sequence.prompt_ids[start:end], *chosen]

    def digests(self, count: int, page_tokens: int) -> Sequence[bytes]:
        """Return the names of its first ``count`` pages, each full of known tokens."""
        have = len(self._digests) - 1
        if have < count:
            ids = self.tokens(have * page_tokens, count * page_tokens)
            self._digests += page_digests(ids, page_tokens, self._digests[-1])
        return self._digests[1 : count + 1]
