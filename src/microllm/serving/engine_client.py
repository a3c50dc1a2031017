"""The HTTP process's side of one engine process: starts it, hands it requests, routes what comes back, starts it anew.

A ``Ticket`` is one HTTP request on its way through an engine. When the engine's process dies, tickets of which nothing
has gone out yet wait for the next process and run there (once); the others fail and say so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from microllm.sampling import SamplingParams
from microllm.serving.errors import ApiError
from microllm.serving.server_config import ServerConfig
from microllm.serving.wire import FrameReader, Message, encode_frame

RESTART_S = 1.0
"""Pause before a dead engine is started anew, doubled with each failure in a row, up to ``MAX_RESTART_S``."""
MAX_RESTART_S = 30.0
_READ_BYTES = 1 << 18
log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """What one step added to one choice; ``logprobs``: a token's own, and the likeliest (id, logprob)."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[Any] | None
    finish_reason: str | None
    facts: Message | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself when it is ready.

    Units:   ``longest_tokens`` is the longest prompt and answer together
    """

    precision: str
    device: str
    longest_tokens: int
    pool_tokens: int
    page_tokens: int
    max_rows: int
    defaults: dict[str, Any]
    load_ms: float
    warm_ms: float
    warm_shapes: int
    warm_bytes: int
    memory: dict[str, Any]


class Ticket:
    """One HTTP request's choices in an engine: accepted or refused, then pieces until each choice has ended."""

    def __init__(self, number: int, command: Message, num_choices: int, *, choices_a_prompt: int) -> None:
        self.number, self.command, self.num_running = number, command, num_choices
        self.choices_a_prompt = choices_a_prompt
        self.submitted_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: dict[int, float] = {}
        self.cached_tokens = self.num_tokens = 0
        self.cold = False
        self._is_accepted = asyncio.get_running_loop().create_future()
        self._pieces: list[Piece] = []
        self._wake = asyncio.Event()
        self._error: ApiError | None = None
        self.has_output = self.is_resent = False

    @property
    def is_done(self) -> bool:
        """Return whether nothing more will come."""
        return self._error is not None or self.num_running == 0

    @property
    def ending(self) -> str:
        """Return how it ended: done, cancelled (by its client or its end), or an error's code."""
        return "done" if self.num_running == 0 else (self._error.code or "error") if self._error else "cancelled"

    @property
    def has_unread(self) -> bool:
        """Return whether ``pieces`` has something to return, or to raise."""
        return bool(self._pieces) or self._error is not None

    async def accepted(self) -> None:
        """Wait until the engine has queued it.

        Raises:
            ApiError: the engine refused it, or is gone.
        """
        await self._is_accepted

    async def pieces(self) -> list[Piece]:
        """Return what has come since the last call, waiting for something; several steps' where several are ready.

        Raises:
            ApiError: it failed as a whole.
        """
        await self._wake.wait()
        if not self._pieces and self._error is not None:
            raise self._error
        taken, self._pieces = self._pieces, []
        if self._error is None:
            self._wake.clear()
        return taken

    def accept(self) -> None:
        """Note that the engine queued it."""
        if not self._is_accepted.done():
            self._is_accepted.set_result(None)

    def push(self, piece: Piece) -> None:
        """Add a piece."""
        self.has_output = True
        self.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.num_running -= 1
        self._pieces.append(piece)
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """End it: whoever waits for it gets the error, after the pieces that are there."""
        self._error = self._error or error
        if not self._is_accepted.done():
            self._is_accepted.set_exception(error)
            self._is_accepted.exception()  # retrieved: nobody may wait for it any more
        self._wake.set()


class EngineClient:
    """One replica: its process, its tickets, its last report. ``on_piece`` sees every piece as it arrives."""

    def __init__(
        self, config: ServerConfig, index: int, on_piece: Callable[[Ticket, Piece], None]
    ) -> None:  # fmt: skip
        self.index = index
        self.tickets: dict[int, Ticket] = {}
        self.facts: EngineFacts | None = None
        self.report: Message = {}
        self.fatal: str | None = None
        """Why it never started, once that is known; it is not tried again then."""
        self.num_starts = 0
        self._config, self._on_piece = config, on_piece
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: asyncio.StreamWriter | None = None
        self._heard_s = time.monotonic()
        self._is_closing = False

    @property
    def is_ready(self) -> bool:
        """Return whether it is loaded, connected and was heard of lately."""
        return self._connection is not None and not self._is_silent

    @property
    def is_alive(self) -> bool:
        """Return whether it works, or loads for the first time."""
        return self.fatal is None and (self.facts is None or self.is_ready)

    @property
    def facts_now(self) -> EngineFacts:
        """Return what a ready engine said of itself."""
        assert self.facts is not None, "a ready engine has said what it is"
        return self.facts

    @property
    def num_choices(self) -> int:
        """Return how many choices run or wait here."""
        return sum(ticket.num_running for ticket in self.tickets.values())

    @property
    def process_id(self) -> int | None:
        """Return the id of the process that runs."""
        return None if self._process is None else self._process.pid

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_s > self._config.engine_timeout_s

    def submit(self, ticket: Ticket) -> None:
        """Hand over a request; it waits here while the process starts anew."""
        self.tickets[ticket.number] = ticket
        self._send(ticket.command)

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request, whatever its state; its pages are free after the step that runs."""
        if self.tickets.pop(ticket.number, None) is not None:
            self._send({"cancel": ticket.number})

    def fail_all(self, error: ApiError) -> None:
        """End every request with an error."""
        for ticket in list(self.tickets.values()):
            self.cancel(ticket)
            ticket.fail(error)

    async def run(self) -> None:
        """Keep a process running until ``close``; return when the first one cannot be started."""
        num_failures = 0
        while not self._is_closing:
            was_ready = await self._run_once()
            if self._is_closing or self.fatal is not None:
                return
            num_failures = 0 if was_ready else num_failures + 1
            pause_s = min(RESTART_S * 2**num_failures, MAX_RESTART_S)
            log.error("engine %d ended; it is started anew in %.0f s", self.index, pause_s)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """End the process."""
        self._is_closing = True
        self.fail_all(ApiError.stopping())
        if self._connection is not None:
            self._connection.close()
        process = self._process
        if process is None:
            return
        if self._connection is None:
            process.kill()  # it loads: nobody waits for what it would answer
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 5)
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _run_once(self) -> bool:
        """Run one process to its end; return whether it was ever ready."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "microllm.serving.engine_process", str(theirs.fileno())]
        # Threads of torch that wait by spinning would take the cores that HTTP needs; a session of its own: no Ctrl-C.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        theirs.close()
        self.num_starts += 1
        reader, writer = await asyncio.open_connection(sock=ours)
        config = self._config
        options = {
            "model": config.model, "device": config.device, "precision": config.precision,
            "num_threads": config.num_threads, "replica": self.index, "prewarm": config.prewarm,
            "engine": asdict(config.engine),
        }  # fmt: skip
        writer.write(encode_frame({"load": options}))
        try:
            await self._read(reader, writer)
        finally:
            was_ready, self._connection = self._connection is not None, None
            writer.close()
            self._bury()
        return was_ready

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(None) as silence:
                while data := await reader.read(_READ_BYTES):
                    self._heard_s = time.monotonic()
                    for message in frames.feed(data):
                        self._take(message, writer)
                    if self._connection is not None:
                        silence.reschedule(asyncio.get_running_loop().time() + self._config.engine_timeout_s)

    def _bury(self) -> None:
        """After a process has ended: put back what may run anew, fail the rest."""
        assert self._process is not None
        if self._process.poll() is None and not self._is_closing:
            self._process.kill()  # its socket is closed: nothing can reach it any more
        if self._is_closing:
            return
        self._process.wait()
        self.report = {}
        if self.fatal is not None or self.facts is None:
            self.fatal = self.fatal or f"engine {self.index} ended with status {self._process.returncode} while loading"
        for ticket in list(self.tickets.values()):
            if ticket.has_output or ticket.is_resent or self.fatal is not None:
                del self.tickets[ticket.number]
                ticket.fail(ApiError.engine_lost())
            ticket.is_resent = True

    def _take(self, message: Message, writer: asyncio.StreamWriter) -> None:
        if "fatal" in message:
            self.fatal = message["fatal"]
        if "ready" in message:
            self.facts = EngineFacts(**message["ready"])
            self._connection = writer
            log.info("engine %d is ready", self.index, extra={"facts": message["ready"]})
            for ticket in self.tickets.values():
                self._send(ticket.command)
        for number in message.get("accepted", ()):
            if ticket := self.tickets.get(number):
                ticket.accept()
        for number, kind, text in message.get("refused", ()):
            if ticket := self.tickets.pop(number, None):
                ticket.fail(ApiError.bad_request(text) if kind == "request" else ApiError.engine_failed(text))
        for number, *fields in message.get("pieces", ()):
            if ticket := self.tickets.get(number):
                piece = Piece(*fields)
                self._on_piece(ticket, piece)
                ticket.push(piece)
                if ticket.is_done:
                    del self.tickets[number]
        self.report = message.get("report", self.report)

    def _send(self, command: Message) -> None:
        if self._connection is not None:
            self._connection.write(encode_frame(command))


def add_command(number: int, prompts: list[list[int]], params: SamplingParams, salt: bytes) -> Message:
    """Return the command that queues prompts."""
    return {"add": number, "prompts": prompts, "params": asdict(params), "salt": salt.hex()}
