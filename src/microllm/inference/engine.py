"""The engine: requests come and go, one step at a time runs what the scheduler picks.

Place: what serves many requests at once; ``LLM`` makes its sequences, ``scheduler.py`` decides, ``runner.py`` computes.
A life of a request, in order: ``Engine.add``, ``Scheduler.submit``, ``Scheduler.plan``, ``ModelRunner.run``,
``accept_tokens``, ``Scheduler.advance``, ``Scheduler.remove``, ``Request.completion``. Knows no HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, overload

import torch

from microllm.errors import ConfigError, RequestError
from microllm.inference.bursts import Bursts, count_tokens
from microllm.inference.completion import Completion, StreamPiece
from microllm.inference.draft_model import ModelProposer
from microllm.inference.engine_config import EngineConfig
from microllm.inference.engine_report import EngineMemory, EngineReport
from microllm.inference.graph_runner import BURST_STEPS, GraphRunner, padded_width
from microllm.inference.placement import PACKED_PRECISIONS
from microllm.inference.plan import Plan
from microllm.inference.prewarm import PrewarmReport
from microllm.inference.prompts import Prompt, as_batch, checked_params, is_list, one_choice
from microllm.inference.quantised import QuantisedLinear
from microllm.inference.request import Request
from microllm.inference.runner import ModelRunner
from microllm.inference.scheduler import Chunk, Scheduler
from microllm.inference.sequence import GeneratedSequence
from microllm.inference.verify import accept_tokens
from microllm.sampling import SamplingParams
from microllm.sampling.draft import Draft, NgramProposer
from microllm.step import PageAllocator, PagePool, count_pages, layer_dtypes, page_bytes

if TYPE_CHECKING:
    from microllm.inference.llm import LLM


class Engine:
    """Serves many requests at once from one pool of key-value pages.

    Those of an ``LLM`` that runs a plan (``load`` on a CPU) are loaded beside the plan's, once for all its engines.
    ``draft`` is a smaller model of the same vocabulary that guesses ahead in place of the text's own n-grams.
    Threads may call at the same time: a step runs to its end, under ``lock``, before another call goes on.

    Raises:
        ConfigError: int8 or int4 weights of a CPU's plan; a draft model of another vocabulary or nothing for it to
            guess; a cache that holds no page.
        UnavailableError: the device has no memory for the cache.
    """

    def __init__(self, llm: LLM, config: EngineConfig | None = None, *, draft: LLM | None = None) -> None:
        self.llm, self.config, self._draft = llm, config or EngineConfig(), draft
        config = self.config
        if isinstance(llm.model, Plan) and llm.precision in PACKED_PRECISIONS:
            raise ConfigError(
                f"got {llm.precision} weights packed for a CPU; the engine runs fp32, bf16 or fp16 ones there; "
                'load(..., precision="fp32")'
            )
        model = llm.transformer  # loads beside a plan's weights, before free memory is looked at
        if draft is not None and (draft.config.vocab_size != llm.config.vocab_size or not config.speculate):
            raise ConfigError(
                f"got a draft model of {draft.config.vocab_size} tokens and speculate={config.speculate}; "
                f"need the model's own {llm.config.vocab_size} and at least 1; say how many tokens it is to guess"
            )
        context = min(config.max_context or llm.config.max_position_embeddings, llm.config.max_position_embeddings)
        dtypes = layer_dtypes(llm.config, config.kv_dtype, model.norm.weight.dtype)
        num_pages = count_pages(
            page_bytes(llm.config, config.page_tokens, dtypes), limit_bytes=config.kv_bytes, device=llm.device,
            wanted=config.num_rows * -(-context // config.page_tokens),
        )  # fmt: skip
        self.pool = PagePool(llm.config, num_pages, page_tokens=config.page_tokens, dtypes=dtypes, device=llm.device)
        deterministic = llm.device.type == "cpu" if config.deterministic is None else config.deterministic
        shape = {"num_slots": config.num_rows, "context": context, "max_drafts": config.speculate}
        if config.steps == "plain" or (config.steps == "auto" and llm.device.type != "cuda"):
            self._runner = ModelRunner(model, self.pool, deterministic=deterministic, **shape)
        else:
            captures = config.steps == "auto"
            self._runner = GraphRunner(model, self.pool, deterministic=deterministic, captures=captures, **shape)
        num_tokens = count_tokens(llm.config.vocab_size, llm.banned_ids)
        self.scheduler = Scheduler(PageAllocator(num_pages), config, same_bits=self._runner.same_bits)
        self._bursts = (
            Bursts(self._runner, self.scheduler, num_tokens)
            if isinstance(self._runner, GraphRunner) and num_tokens and not config.diagnose else None
        )  # fmt: skip
        self._touched: list[Request] = []
        self.context = context
        self.lock = threading.RLock()
        self._num_requests = self._num_steps = 0

    def prewarm(self, buckets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> PrewarmReport:
        """Capture and compile, before requests come, what runs ``buckets`` of decoding rows and prompts of ``lengths``.

        None: any number of rows, and chunks of a prompt of any length; an empty list: none. What is there already is
        left as it is; a CPU has nothing to make. A request that meets a shape which is not ready makes it, and is
        ``cold``.

        Raises:
            ConfigError: no list of whole numbers, one below 1, rows beyond ``max_rows``, a prompt longer than a step.
        """
        most, longest = self.config.num_rows, min(self.config.step_tokens, self.context)
        lengths = [padded_width(n) for n in range(1, longest + 1)] if lengths is None else lengths
        given = () if buckets is None else buckets
        for name, values, limit in (("buckets", given, most), ("lengths", lengths, padded_width(longest))):
            if not is_list(values) or any(type(value) is not int or not 1 <= value <= limit for value in values):
                raise ConfigError(f"got {name}={values!r}; need a list of whole numbers from 1 to {limit}")
        num_tokens = None if self._bursts is None else self._bursts.num_tokens
        with self.lock:
            return PrewarmReport(tuple(self._runner.prewarm(buckets, lengths, num_tokens)))

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b"") -> list[Request]:
        """Queue a prompt; return its requests, one for each of its ``n`` choices.

        Prompts of different ``salt`` share no pages.

        Raises:
            RequestError: as ``LLM.generate``, or the request could grow larger than the pool.
        """
        return self._submit([prompt], checked_params(params), salt)

    def step(self) -> list[Request]:
        """Run one step; return the requests that got a token or ended in it, none when there is nothing to do.

        On a GPU a step may be a burst of several, whose tokens come together.
        """
        with self.lock:
            if self._bursts is not None and self._bursts.under_way:
                return self._land(self._bursts.land)
            touched, self._touched = self._touched, []
            for request in [r for r in self.scheduler.running if r.finish_reason is not None]:
                self._end(request)  # an exception in the last step came between its end and this
            chunks = self.scheduler.plan()
            if not chunks:
                return touched
            num_cold = self._runner.num_cold
            if self._bursts is not None and self._bursts.begin(chunks):
                self._mark(chunks, num_cold)
                return touched + self._land(self._bursts.land)
            for chunk in chunks:
                if chunk.start == chunk.request.cached_prefix_tokens and not chunk.request.preemptions:
                    chunk.request.sequence.start()
            touched += [chunk.request for chunk in chunks if chunk.reaches_end]
            logits, firsts = self._runner.run(chunks)
            self._mark(chunks, num_cold)
            num_kept = accept_tokens(
                chunks, logits, firsts, row_by_row=self._runner.same_bits,
                diagnosed_step=self._num_steps if self.config.diagnose else None,
            )  # fmt: skip
            self._num_steps += 1
            for chunk, kept in zip(chunks, num_kept, strict=True):
                self.scheduler.advance(chunk, kept)
                if chunk.request.finish_reason is not None:
                    self._end(chunk.request)
            return touched

    def cancel(self, request: Request) -> None:
        """End a request as "cancelled" and free its pages at once; an ended one is left as it is.

        Raises:
            RequestError: it is another engine's.
        """
        with self.lock:
            if request.state == "finished":
                return
            if self._bursts is not None and self._bursts.under_way:
                self._touched += self._land(self._bursts.drain)
            if request.state == "finished":
                return
            if request not in self.scheduler.running and request not in self.scheduler.waiting:
                raise RequestError(
                    f"got request {request.number} of another engine; need one of this engine's; cancel it there"
                )
            try:
                request.sequence.finish("cancelled")
            finally:
                self._end(request)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b"") -> RequestStream:
        """Return an iterator over one prompt's completion; reading it runs steps for all; closing it cancels.

        Raises:
            RequestError: as ``add``, at once and not at the first piece.
        """
        (request,) = self._submit([prompt], one_choice(checked_params(params)), salt)
        return RequestStream(self, request)

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Completion: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]: ...
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Return the completion of one prompt, or a list for a list, prompt by prompt, each with its ``n`` choices.

        Raises:
            RequestError: as ``add``; then none of the prompts has run.
        """
        params = checked_params(params)
        batch, is_one = as_batch(prompts)
        requests = self._submit(batch, one_choice(params) if is_one else params, b"")
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return requests[0].completion if is_one else [request.completion for request in requests]

    @property
    def has_work(self) -> bool:
        """Return whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def report(self) -> EngineReport:
        """Return the counters and where the pool's bytes are."""
        with self.lock:
            scheduler, allocator = self.scheduler, self.scheduler.allocator
            ahead = {} if self._bursts is None else self._bursts.num_ahead()
            page = self.config.page_tokens
            idle = sum(max(len(r.pages) * page - r.num_computed - ahead.get(r, 0), 0) for r in scheduler.running)
            return EngineReport(
                num_steps=self._num_steps, num_waiting=len(scheduler.waiting), num_running=len(scheduler.running),
                num_preemptions=scheduler.num_preemptions, num_prefix_tokens=scheduler.num_prefix_tokens,
                num_drafts_proposed=scheduler.num_drafts_proposed, num_drafts_accepted=scheduler.num_drafts_accepted,
                num_drafts_failed=scheduler.num_drafts_failed, num_cached_pages=allocator.num_cached,
                kv=self.pool.use(allocator.num_held, idle),
                draft_bytes=sum(r.draft.num_bytes for r in scheduler.running if r.draft is not None),
            )  # fmt: skip

    def _submit(self, prompts: Sequence[Prompt], params: SamplingParams, salt: bytes) -> list[Request]:
        """Check all prompts, then queue all of them."""
        if not isinstance(salt, bytes):
            raise RequestError(f"got a salt of type {type(salt).__name__}; need bytes; encode it")
        return self.submit(self.llm.sequences(prompts, params), salt=salt)

    def memory(self) -> EngineMemory:
        """Return where the memory is; on a GPU call ``torch.cuda.reset_peak_memory_stats`` where a peak is to begin."""
        model, device = self.llm.transformer, self.llm.device
        tensors = (*model.parameters(), *model.buffers())
        weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        coded = [module.matrix for module in model.modules() if isinstance(module, QuantisedLinear)]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return EngineMemory(
            weight_bytes=sum(weights.values()), code_bytes=sum(matrix.weight.nbytes for matrix in coded),
            scale_bytes=sum(part.nbytes for matrix in coded for part in matrix[2:] if part is not None),
            pool_bytes=self.pool.num_bytes, peak_bytes=peak,
            arena_bytes=self._runner.arena_bytes + self._runner.passing_bytes,
        )  # fmt: skip

    def submit(self, sequences: Sequence[GeneratedSequence], *, salt: bytes = b"") -> list[Request]:
        """Queue sequences of this engine's model that have not begun, all or none; return their requests.

        Raises:
            RequestError: one is longer than the engine's context or could grow larger than the pool.
        """
        with self.lock:
            requests = []
            for sequence in sequences:
                self._fit(sequence)
                number = self._num_requests + len(requests)
                requests.append(Request(number, sequence, salt=salt, draft=self._new_draft(sequence)))
                self.scheduler.check(requests[-1])
            for request in requests:
                request.submitted_step = self._num_steps
                self.scheduler.submit(request)
            self._num_requests += len(requests)
            return requests

    def _new_draft(self, sequence: GeneratedSequence) -> Draft | None:
        if not self.config.speculate:
            return None
        if self._draft is None:
            return Draft(NgramProposer, self.config.speculate)
        longest = len(sequence.prompt_ids) + sequence.max_new_tokens
        return Draft(partial(ModelProposer, self._draft.model, longest), self.config.speculate)

    def _fit(self, sequence: GeneratedSequence) -> None:
        """Let the engine's own context end a sequence, where that is shorter than the model's."""
        room = self.context - len(sequence.prompt_ids)
        if room < 1:
            raise RequestError(
                f"got a prompt of {len(sequence.prompt_ids)} tokens; need at most {self.context - 1} "
                f"(the engine's max_context is {self.context}); shorten it or raise max_context"
            )
        sequence.max_new_tokens = min(sequence.max_new_tokens, room)

    def _mark(self, chunks: Sequence[Chunk], num_cold: int) -> None:
        """Mark the requests of a step that made a shape."""
        if self._runner.num_cold > num_cold:
            for chunk in chunks:
                chunk.request.cold = True

    def _land(self, bursts: Callable[[], list[Request]]) -> list[Request]:
        """Hand out tokens of bursts; end the requests that are through, once no burst runs over their pages."""
        touched = bursts()
        self._num_steps += BURST_STEPS
        if self._bursts is not None and not self._bursts.under_way:
            for request in [r for r in self.scheduler.running if r.finish_reason is not None]:
                self._end(request)
        return touched

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        if request.finished_step is None:
            request.finished_step = self._num_steps


class RequestStream(Iterator[StreamPiece]):
    """The pieces of one request, as they come; a context manager that cancels what is left."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self.request = engine, request
        self._is_done = False

    def __next__(self) -> StreamPiece:
        while not self._is_done:
            with self._engine.lock:
                piece = self.request.sequence.piece()
                self._is_done = piece.finish_reason is not None
                if piece.token_ids or piece.text or self._is_done:
                    return piece
                self._engine.step()
        raise StopIteration

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request as "cancelled" if it still runs; its pages are free at once. May be called again."""
        self._engine.cancel(self.request)
        self._is_done = True

    @property
    def completion(self) -> Completion:
        """Return the completion, once the stream has ended or been closed.

        Raises:
            RequestError: it still runs.
        """
        if self.request.finish_reason is None:
            raise RequestError("got a stream that still runs; need its end; read on, or close() it")
        return self.request.completion
