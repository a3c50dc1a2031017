"""What the routes share: the tokenizer, the engines, who may ask, how much is in flight, and the way to the end."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.metadata
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from microllm.errors import UnavailableError
from microllm.io.resolve import resolve_model
from microllm.io.tokenizer import load_tokenizer
from microllm.sampling import SamplingParams
from microllm.serving.engine_client import EngineClient, Piece, Ticket, add_command
from microllm.serving.errors import ApiError
from microllm.serving.metrics import Metrics
from microllm.serving.router import PrefixRouter
from microllm.serving.server_config import ServerConfig

log = logging.getLogger(__name__)


class Service:
    """One model behind HTTP, on one or several engines. Lives in one event loop.

    ``on_fatal`` is called with the text when an engine cannot be started at all.

    Raises:
        MicroLLMError: the model or its tokenizer cannot be found or read; an API key file cannot be used.
    """

    def __init__(self, config: ServerConfig, on_fatal: Callable[[str], None] | None = None) -> None:
        self.config, self._on_fatal = config, on_fatal
        source = resolve_model(config.model)
        self.tokenizer = load_tokenizer(source)
        self.name = config.served_name or source.name
        self._salts = {_digest(key): _digest(key)[:16] for key in config.api_keys()}
        self.metrics = Metrics()
        self.engines = [EngineClient(config, index, self._on_piece) for index in range(config.replicas)]
        self.created = int(time.time())
        self.is_draining = False
        self._router: PrefixRouter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    def start(self) -> None:
        """Begin to load every engine; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        for engine in self.engines:
            self._spawn(self._run_engine(engine))

    def drain(self) -> None:
        """Let nothing more in; after ``drain_s`` end what still runs, and tell who waits. May be called by a signal."""
        if not self.is_draining and self._loop is not None:
            log.info("draining: %d choices in flight", self.num_choices)
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._end_after_drain()))
        self.is_draining = True

    async def close(self) -> None:
        """End the engines."""
        self.is_draining = True
        await asyncio.gather(*(engine.close() for engine in self.engines))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_engine(self, engine: EngineClient) -> None:
        await engine.run()
        if engine.fatal is not None and not self.is_draining:
            log.error("engine %d cannot be started: %s", engine.index, engine.fatal)
            if self._on_fatal is not None:
                self._on_fatal(engine.fatal)

    async def _end_after_drain(self) -> None:
        await asyncio.sleep(self.config.drain_s)
        for engine in self.engines:
            engine.fail_all(ApiError.stopping())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- state

    @property
    def num_choices(self) -> int:
        """Return how many choices run and wait."""
        return sum(engine.num_choices for engine in self.engines)

    @property
    def is_ready(self) -> bool:
        """Return whether a request would be let in, the queue apart."""
        return not self.is_draining and any(engine.is_ready for engine in self.engines)

    @property
    def is_alive(self) -> bool:
        """Return whether every engine works, or loads for the first time."""
        return all(engine.is_alive for engine in self.engines)

    @property
    def longest_tokens(self) -> int:
        """Return the longest prompt and answer together.

        Raises:
            ApiError: no engine is ready.
        """
        return self._ready_engine().facts_now.longest_tokens

    @property
    def fingerprint(self) -> str:
        """Return what answers call the system that made them: version, precision, device."""
        facts = self._ready_engine().facts_now
        return f"microllm-{importlib.metadata.version('microllm')}-{facts.precision}-{facts.device.split(':')[0]}"

    @property
    def checkpoint_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters that the checkpoint's author published."""
        return self._ready_engine().facts_now.defaults

    def _ready_engine(self) -> EngineClient:
        if self.is_draining:
            raise ApiError.stopping()
        for engine in self.engines:
            if engine.is_ready:
                return engine
        was_ready = any(engine.facts is not None for engine in self.engines)
        got = "an engine that ended and starts anew" if was_ready else "a model that is still loading"
        raise ApiError(
            503, f"got {got}; need a ready one; ask /ready, then send the request again",
            kind="server_error", code="not_ready", retry_after_s=2,
        )  # fmt: skip

    # ---- requests

    def salt_of(self, key: str | None) -> bytes:
        """Return what keeps a key's prompts apart from those of others in the prefix cache.

        Raises:
            ApiError: keys are asked for, and this is none of them.
        """
        if not self._salts:
            return b""
        given = _digest(key or "")
        for known, salt in self._salts.items():
            if hmac.compare_digest(known, given):
                return salt
        raise ApiError(
            401, "got no API key that is known; need one; send the header Authorization: Bearer KEY",
            kind="authentication_error", code="invalid_api_key",
        )  # fmt: skip

    def submit(self, prompts: list[list[int]], params: SamplingParams, salt: bytes) -> Ticket:
        """Hand prompts to an engine.

        Raises:
            ApiError: no engine is ready, or the queue is full.
        """
        facts = self._ready_engine().facts_now
        num_new, capacity = len(prompts) * params.n, self.config.capacity
        if num_new > capacity:
            raise ApiError.bad_request(f"got {num_new} choices; need at most {capacity}; send them in several requests")
        if self.num_choices + num_new > capacity:
            self.metrics.rejected.inc()
            raise ApiError(
                429, f"got {num_new} choices beside {self.num_choices}; need at most {capacity} at once; retry",
                kind="rate_limit_error", code="queue_full", retry_after_s=1,
            )  # fmt: skip
        if self._router is None:
            self._router = PrefixRouter(facts.page_tokens, slack=max(1, facts.max_rows // 2))
        loads = {engine.index: engine.num_choices for engine in self.engines if engine.is_ready}
        try:
            engine = self.engines[self._router.choose(prompts[0], salt, loads)]
        except UnavailableError as error:
            raise ApiError.engine_lost() from error
        number = next(self._numbers)
        ticket = Ticket(number, add_command(number, prompts, params, salt), num_new, choices_a_prompt=params.n)
        engine.submit(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request if it still runs."""
        for engine in self.engines:
            if ticket.number in engine.tickets:
                self.metrics.finished.labels("cancelled").inc(ticket.num_running)
                engine.cancel(ticket)

    def seconds_left(self, ticket: Ticket) -> float:
        """Return how long a request may still take."""
        return ticket.submitted_s + self.config.request_timeout_s - time.perf_counter()

    def too_slow(self) -> ApiError:
        """Return the error of a request that took too long."""
        return ApiError(
            504, f"got no end of the answer within {self.config.request_timeout_s:g} s; lower max_tokens",
            kind="server_error", code="timeout",
        )  # fmt: skip

    def _on_piece(self, ticket: Ticket, piece: Piece) -> None:
        self.metrics.note(ticket, piece)
        if piece.facts is not None and piece.facts["cold"]:
            ticket.cold = True
            self.metrics.cold.inc()
        if piece.facts is not None and piece.choice % ticket.choices_a_prompt == 0:
            ticket.cached_tokens += piece.facts["cached_tokens"]


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32, person=b"microllm key").digest()


def check_listens_safely(config: ServerConfig) -> str | None:
    """Return a warning for a server that anybody on the network may ask, None where there is none to give."""
    if config.host in ("127.0.0.1", "::1", "localhost") or config.api_keys():
        return None
    return f"{config.host} is not loopback and no API key is set: whoever reaches port {config.port} may ask"
