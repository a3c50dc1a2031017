"""Which tokens of which requests the next step runs: decoding rows first, then chunks of prompts, by a token budget.

Place: the engine asks for a plan, runs it, and says what came of it. Moves pages and states; knows no tensors.

Requests run in order of arrival, and those that run are always older than those that wait. Who decodes and finds no
page takes one from the youngest that runs, which goes back to the head of the queue (itself, if it is the youngest). A
prompt is let in when the pool has pages for all of it; they stay reserved for it and are taken chunk by chunk. So the
oldest request advances in every step, by a token or by ``min_chunk`` tokens of its prompt, and a request ends within
the sum of what those ahead of it and itself take alone: ``Request.max_steps``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from microllm.errors import RequestError
from microllm.inference.engine_config import EngineConfig
from microllm.inference.request import Request
from microllm.sampling.draft import Draft
from microllm.step.pages import PageAllocator

LOGPROB_CHUNK = 64
"""Most tokens of a chunk whose logits are all wanted: they take a vocabulary's width each."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step runs of one request: tokens from position ``start`` on; the last ``num_logits`` need logits.

    ``num_drafts`` of them are guesses, at the end. ``reaches_end``: their logits choose the request's next token.
    """

    request: Request
    kind: Literal["prefill", "decode"]
    token_ids: list[int]
    start: int
    num_logits: int
    num_drafts: int = 0
    reaches_end: bool = False


class Scheduler:
    """The queue, the running requests and their pages.

    ``same_bits``: prefill and decoding write equal bytes. Then a preempted request is prefilled with its answer so far,
    and pages written while decoding are shared. Else only prefilled prompts are, and the answer so far is replayed a
    token a step.
    """

    def __init__(self, allocator: PageAllocator, config: EngineConfig, *, same_bits: bool) -> None:
        self.allocator, self._config, self._same_bits = allocator, config, same_bits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(config.num_rows - 1, -1, -1))
        self._steps_ahead = 0
        self.num_preemptions = self.num_prefix_tokens = 0
        self.num_drafts_proposed = self.num_drafts_accepted = self.num_drafts_failed = 0

    def check(self, request: Request) -> None:
        """Refuse a request that the pool could never hold.

        Raises:
            RequestError: it may grow larger than the pool.
        """
        need, size = self._pages(request.max_stored_tokens), self._config.page_tokens
        if need > self.allocator.num_pages:
            raise RequestError(
                f"got a request of up to {request.max_stored_tokens + 1} tokens ({request.prompt_length} of them its "
                f"prompt's); need at most {self.allocator.num_pages * size + 1}, which the KV cache holds; "
                "lower max_tokens or raise kv_bytes"
            )

    def submit(self, request: Request) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)
        self._steps_ahead += self._steps_alone(request)
        request.max_steps = self._steps_ahead

    def plan(self) -> list[Chunk]:
        """Return what the next step runs; empty when nothing is left to do."""
        chunks: list[Chunk] = []
        for request in list(self.running):
            if request.state == "decoding" and self._make_room(request):
                chunks.append(self._decode(request))
        budget = self._config.step_tokens - sum(len(chunk.token_ids) for chunk in chunks)
        for request in self.running:
            if request.state == "prefilling" and budget > 0:
                chunks.append(self._prefill(request, budget))
                budget -= len(chunks[-1].token_ids)
        while budget > 0 and self.waiting and self._admit(self.waiting[0]):
            chunks.append(self._prefill(self.running[-1], budget))
            budget -= len(chunks[-1].token_ids)
        return chunks

    def advance(self, chunk: Chunk, num_kept: int) -> None:
        """Note that a chunk ran and that its first ``num_kept`` tokens are the request's own."""
        request = chunk.request
        if request.draft is not None and chunk.num_drafts:
            request.draft.judge(chunk.num_drafts, num_kept - 1)
            self.num_drafts_proposed += chunk.num_drafts
            self.num_drafts_accepted += num_kept - 1
        if request.finish_reason == "error":
            return self.remove(request)
        request.num_computed = chunk.start + num_kept
        if chunk.reaches_end:  # the token just chosen proves finite what was written so far, and nothing earlier does
            self._publish(request)
        if request.finish_reason is not None:
            return self.remove(request)
        self.settle(request)
        answered = request.num_computed + 1 == request.num_tokens or not self._same_bits
        if request.num_computed >= request.prompt_length and answered:
            request.state = "decoding"
        return None

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Give a decoding request pages for its first ``num_tokens`` tokens; False, and none, where they are short."""
        need = self._pages(num_tokens) - len(request.pages)
        if need > self._unreserved():
            return False
        self._take(request, num_tokens)
        return True

    def keep(self, request: Request, num_kept: int) -> None:
        """Note that a burst ran and that ``num_kept`` more of its tokens are the request's own."""
        request.num_computed += num_kept
        if request.finish_reason != "error":
            self._publish(request)

    def settle(self, request: Request) -> None:
        """Give back the pages that a request took ahead of its tokens."""
        kept = self._pages(request.num_computed)
        self.allocator.release(request.pages[kept:])
        del request.pages[kept:]
        request.num_tabled = min(request.num_tabled, kept)

    def remove(self, request: Request) -> None:
        """Take a finished request out, wherever it is; its pages are free at once."""
        if request.state == "finished":
            return
        self._steps_ahead -= self._steps_alone(request)
        (self.waiting if request.state in ("waiting", "preempted") else self.running).remove(request)
        self._free(request)
        request.state = "finished"

    def _decode(self, request: Request) -> Chunk:
        start, known = request.num_computed, request.num_tokens
        if start + 1 < known:  # a preempted request's answer, replayed
            return Chunk(request, "decode", request.tokens(start, start + 1), start, 0)
        drafts: list[int] = []
        if request.draft is not None:
            request.draft.extend(request.tokens(len(request.draft), known))
            room = len(request.pages) * self._config.page_tokens - known
            if self._unreserved() > len(self.running):  # a page for guesses is taken from nobody
                room += self._config.page_tokens
            drafts = self._guess(request.draft, min(room, request.max_stored_tokens - known))
            self._take(request, known + len(drafts))
        tokens = [*request.tokens(start, known), *drafts]
        return Chunk(request, "decode", tokens, start, 1 + len(drafts), num_drafts=len(drafts), reaches_end=True)

    def _guess(self, draft: Draft, most: int) -> list[int]:
        try:
            return draft.propose(most)
        except Exception:  # noqa: BLE001 - whatever a proposer raises costs a guess, not a step
            self.num_drafts_failed += 1
            draft.drop()
            draft.judge(0, 0)
            return []

    def _prefill(self, request: Request, budget: int) -> Chunk:
        start, wants_all = request.num_computed, request.sequence.params.prompt_logprobs is not None
        end = request.num_tokens if self._same_bits else request.prompt_length
        end = min(end, start + min(budget, LOGPROB_CHUNK if wants_all else budget))
        self._take(request, end)
        reaches_end = end == request.num_tokens
        num_logits = end - start if wants_all else int(reaches_end)
        return Chunk(request, "prefill", request.tokens(start, end), start, num_logits, reaches_end=reaches_end)

    def _admit(self, request: Request) -> bool:
        """Move the head of the queue among those that run, if there are a row and pages for it."""
        if not self._slots or self._comes_with_another(request):
            return False
        found = self.allocator.find(request.digests(self._num_shareable(request), self._config.page_tokens))
        need = self._pages_reserved(request) - len(found)
        if need > self._unreserved() - self.allocator.count_free(found):
            return False
        self.allocator.hold(found)
        request.pages, request.num_published = found, len(found)
        request.num_computed = len(found) * self._config.page_tokens
        self.num_prefix_tokens += request.num_computed
        if not request.preemptions:
            request.cached_prefix_tokens = request.num_computed
        request.slot, request.state = self._slots.pop(), "prefilling"
        self.running.append(self.waiting.popleft())
        return True

    def _comes_with_another(self, request: Request) -> bool:
        """Say whether an equal prompt is on its way: when it is through, this one finds its pages."""
        prompt = request.sequence.prompt_ids
        return self._num_shareable(request) > 0 and any(
            other.state == "prefilling" and other.sequence.prompt_ids == prompt and other.salt == request.salt
            for other in self.running
        )

    def _num_shareable(self, request: Request) -> int:
        """Return how many of its pages may be another's: full ones, and never the last token, whose logits it needs."""
        if not self._config.shares_prefixes or request.sequence.params.prompt_logprobs is not None:
            return 0
        last = request.num_tokens if self._same_bits else request.prompt_length
        return (last - 1) // self._config.page_tokens

    def _publish(self, request: Request) -> None:
        size = self._config.page_tokens
        last = request.num_computed if self._same_bits else min(request.num_computed, request.prompt_length)
        if not self._config.shares_prefixes or last // size <= request.num_published:
            return
        digests = request.digests(last // size, size)
        for index in range(request.num_published, last // size):
            self.allocator.publish(request.pages[index], digests[index])
        request.num_published = last // size

    def _make_room(self, request: Request) -> bool:
        """Give a decoding row a place for its next token; False when it had to go itself."""
        num_tokens = request.num_computed + 1
        need = self._pages(num_tokens) - len(request.pages)
        while need > 0 and need > self._unreserved():
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        self._take(request, num_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.state = "preempted"
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        self.allocator.release(request.pages)
        request.pages = []
        request.num_computed = request.num_tabled = 0
        if request.draft is not None:
            request.draft.drop()
        if request.slot is not None:
            self._slots.append(request.slot)
            request.slot = None

    def _take(self, request: Request, num_tokens: int) -> None:
        request.pages += self.allocator.take(max(self._pages(num_tokens) - len(request.pages), 0))

    def _unreserved(self) -> int:
        """Return how many free pages no prompt on its way is waiting for."""
        waited_for = (self._pages_reserved(r) - len(r.pages) for r in self.running if r.state == "prefilling")
        return self.allocator.num_free - sum(waited_for)

    def _pages_reserved(self, request: Request) -> int:
        """Return the pages of its known tokens and the next one, if that is ever stored."""
        return self._pages(min(request.num_tokens + 1, request.max_stored_tokens))

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.page_tokens)

    def _steps_alone(self, request: Request) -> int:
        """Return the most steps that a request takes while none is ahead of it, from the start."""
        chunk = min(self._config.min_chunk, LOGPROB_CHUNK)
        return -(-request.prompt_length // chunk) + request.sequence.max_new_tokens + 2
