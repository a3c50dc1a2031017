"""Propose the next tokens of a text from the text itself: what followed the last tokens when they last stood there.

Place: the engine asks before each step, runs the proposal through the model with the row's own token, and keeps what
the model would have chosen. A proposal costs rows of a step and never changes a token.

Source:  prompt lookup decoding (Saxena, 2023)
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_NGRAM, MAX_NGRAM = 2, 4
MAX_PAUSE = 64


class NgramDraft:
    """One sequence's index of its own n-grams, and how well they have foretold it.

    After a proposal of which nothing was accepted it pauses, twice as long each time, up to ``MAX_PAUSE`` tokens; an
    accepted token ends the pauses.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_proposed = self.num_accepted = 0
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest successor stands
        self._pause = self._wait = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the text's next tokens, the prompt's first."""
        for token in token_ids:
            end = len(self._tokens)  # the n-grams that end before this token have a successor from now on
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self._after[tuple(self._tokens[end - size : end])] = end
            self._tokens.append(token)
        self._wait = max(self._wait - len(token_ids), 0)

    def propose(self, most: int) -> list[int]:
        """Return at most ``most`` tokens that may come next; the longest n-gram that was seen before decides."""
        most, end = min(most, self.max_tokens), len(self._tokens)
        if most < 1 or self._wait:
            return []
        for size in range(min(MAX_NGRAM, end), MIN_NGRAM - 1, -1):
            start = self._after.get(tuple(self._tokens[end - size :]))
            if start is not None:  # what follows may reach the end of the text: from there on it repeats itself
                return [self._tokens[start + i % (end - start)] for i in range(most)]
        return []

    def judge(self, num_proposed: int, num_accepted: int) -> None:
        """Count a proposal and how many of its tokens the model chose itself."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self._pause = 0 if num_accepted else min(2 * self._pause + 1, MAX_PAUSE)
        self._wait = self._pause + 1  # the token that the step itself brought is one of them
