"""Which page of the key-value pool holds whose tokens: bookkeeping alone, without tensors.

Place: the scheduler takes, shares and gives back pages here; ``page_pool.py`` is their memory. Page numbers are those
of the page tables that a step reads.

A page is *held* while a sequence refers to it, else *free*. A free page may still be *cached*: it keeps the tokens that
its digest names, until the page is needed; the one that was let go longest ago goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

_DIGEST_BYTES = 16


def first_digest(salt: bytes = b"") -> bytes:
    """Return what a chain of page digests starts from; sequences of different salts share nothing."""
    return hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"microllm pages").digest()


def page_digests(token_ids: Sequence[int], page_tokens: int, parent: bytes) -> Iterator[bytes]:
    """Yield a name for each whole page of tokens, which says what it holds and all that lies before it."""
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        words = array("q", token_ids[start : start + page_tokens]).tobytes()
        parent = hashlib.blake2b(parent + words, digest_size=_DIGEST_BYTES).digest()
        yield parent


class PageAllocator:
    """Gives out the pages of one pool, counts who holds them, and finds those that hold a known prefix.

    Nothing is copied: a shared page is full and is never written again.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free pages with a digest, the oldest first
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Return how many pages nobody holds, cached ones among them."""
        return len(self._empty) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Return how many pages some sequence holds."""
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        """Return how many free pages still hold tokens that a prompt may begin with."""
        return len(self._cached)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest run of digests, from the first one on, that are here; nothing is held yet."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_free(self, pages: Sequence[int]) -> int:
        """Return how many of ``pages`` nobody holds."""
        return sum(self._holders[page] == 0 for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each of ``pages``, as ``find`` gave them."""
        for page in pages:
            self._holders[page] += 1
            self._cached.pop(page, None)

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages for one holder to write; what was cached in them is forgotten."""
        assert count <= self.num_free, "more pages than there are free"
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Let later prompts find a full page; where another page has the digest already, that one stays."""
        assert self._holders[page], "a page is published by who holds it"
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest

    def release(self, pages: Sequence[int]) -> None:
        """Take one holder off each of a sequence's pages; the last of them is the first to be forgotten."""
        for page in reversed(pages):
            assert self._holders[page] > 0, "a page is released once by each holder"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._digest_of:
                    self._cached[page] = None
                else:
                    self._empty.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page
