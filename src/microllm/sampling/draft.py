"""Guess the next tokens of a text: from the text itself, or by whatever else can propose some.

Place: the engine asks before each step, runs the guess through the model with the row's own token, and keeps what the
model would have chosen. A guess costs rows of a step and never changes a token.

Source:  prompt lookup decoding (Saxena, 2023)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

MIN_NGRAM, MAX_NGRAM = 2, 4
MAX_PAUSE = 64


class Proposer(Protocol):
    """Guesses what follows one text, which grows from call to call."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of key-value cache that it holds."""
        ...

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` tokens that may follow; the next call's text begins with this one's."""
        ...


class Draft:
    """One sequence's guesses, and how well they went.

    ``new_proposer`` is called at the first proposal, and at the first one after a ``drop``.
    After a proposal of which nothing was accepted it pauses, twice as long each time, up to ``MAX_PAUSE`` tokens; an
    accepted token ends the pauses.
    """

    def __init__(self, new_proposer: Callable[[], Proposer], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_proposed = self.num_accepted = 0
        self._new_proposer = new_proposer
        self._proposer: Proposer | None = None
        self._tokens: list[int] = []
        self._pause = self._wait = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the text's next tokens, the prompt's first."""
        self._tokens += token_ids
        self._wait = max(self._wait - len(token_ids), 0)

    def propose(self, most: int) -> list[int]:
        """Return at most ``most`` tokens that may come next."""
        most = min(most, self.max_tokens)
        if most < 1 or self._wait:
            return []
        if self._proposer is None:
            self._proposer = self._new_proposer()
        return self._proposer(self._tokens, most)

    def drop(self) -> None:
        """Let go of the proposer and what it holds."""
        self._proposer = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of key-value cache that the proposer holds now."""
        return 0 if self._proposer is None else self._proposer.num_bytes

    def judge(self, num_proposed: int, num_accepted: int) -> None:
        """Count a proposal and how many of its tokens the model chose itself."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self._pause = 0 if num_accepted else min(2 * self._pause + 1, MAX_PAUSE)
        self._wait = self._pause + 1  # the token that the step itself brought is one of them


class NgramProposer:
    """Proposes what followed when the text's last tokens last stood in it; the longest n-gram decides."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest successor stands
        self._num_indexed = 0

    @property
    def num_bytes(self) -> int:
        """Return 0: it holds no keys or values."""
        return 0

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return ``most`` tokens, or none."""
        end = len(tokens)
        for place in range(self._num_indexed, end):
            for size in range(MIN_NGRAM, min(MAX_NGRAM, place) + 1):
                self._after[tuple(tokens[place - size : place])] = place
        self._num_indexed = end
        for size in range(min(MAX_NGRAM, end), MIN_NGRAM - 1, -1):
            start = self._after.get(tuple(tokens[end - size :]))
            if start is not None:  # what follows may reach the end of the text: from there on it repeats itself
                return [tokens[start + i % (end - start)] for i in range(most)]
        return []
