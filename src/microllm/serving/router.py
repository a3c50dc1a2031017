"""Which engine a request goes to: the one that saw its beginning last, unless others are much less busy.

A prompt is known by the digests of its pages, the same chain by which an engine finds shared pages, so that a match
here is a prefix that the engine can have in its pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from microllm.errors import UnavailableError
from microllm.step.pages import first_digest, page_digests

MAX_KNOWN_PAGES = 1 << 17
"""Pages of prompts that are remembered; the one that was seen longest ago goes first."""


class PrefixRouter:
    """Remembers which of several engines saw which beginnings.

    ``slack``: choices that an engine may have more than the least busy one and still get a prompt for its beginning.
    """

    def __init__(self, page_tokens: int, slack: int) -> None:
        self._page_tokens, self._slack = page_tokens, slack
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt_ids: Sequence[int], salt: bytes, loads: dict[int, int]) -> int:
        """Return the engine for a prompt, of those in ``loads`` (engine to choices there), and remember it.

        Raises:
            UnavailableError: ``loads`` is empty.
        """
        if not loads:
            raise UnavailableError("got no engine that runs; need one; wait until one has started anew")
        least = min(loads.values())
        chosen = min(loads, key=lambda engine: (loads[engine], engine))
        digests = list(page_digests(prompt_ids, self._page_tokens, first_digest(salt)))
        for digest in reversed(digests):
            engine = self._seen.get(digest)
            if engine in loads and loads[engine] <= least + self._slack:
                chosen = engine
                break
        for digest in digests:
            self._seen[digest] = chosen
            self._seen.move_to_end(digest)
        while len(self._seen) > MAX_KNOWN_PAGES:
            self._seen.popitem(last=False)
        return chosen
