"""Find stop texts in a growing text, wherever the pieces are cut, and let none of a stop's text out.

Place: between a token stream's text and whoever prints it. Knows no tokens: stop token ids are the sequence's matter.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Cuts a text before the stop text that is complete first; of those complete at once, the longest.

    What ``push`` returns is final: only a tail that could still grow into a stop text is held back, and no more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None
        """The stop text that ended the text, once one has."""

    def push(self, text: str) -> str:
        """Take the next piece; return the text that is certain not to belong to a stop text."""
        assert self.stopped is None, "a stopped text does not go on"
        seen = self._held + text
        found = [(seen.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in seen]
        if found:
            end, _, self.stopped = min(found)
            self._held = ""
            return seen[: end - len(self.stopped)]
        certain = len(seen) - self._held_length(seen)
        self._held = seen[certain:]
        return seen[:certain]

    def flush(self) -> str:
        """Return what was held back: the text has ended, so that it cannot become a stop text any more."""
        rest, self._held = self._held, ""
        return rest

    def _held_length(self, text: str) -> int:
        """Return the length of the longest tail that begins some stop text."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
