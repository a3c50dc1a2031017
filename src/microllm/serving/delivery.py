"""Getting an answer to its client, or noticing that the client is gone: then the engine is told to stop at once.

A slow reader holds up nobody else: what comes meanwhile waits here, at most its own answer, and goes out as one chunk
when it reads on; one that reads nothing for ``client_timeout_s`` is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from microllm.serving.answers import Reply, error_event
from microllm.serving.engine_client import Ticket
from microllm.serving.errors import ApiError
from microllm.serving.protocol import ChatAnswer, CompletionAnswer
from microllm.serving.service import Service


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


async def whole_answer(
    service: Service, ticket: Ticket, reply: Reply, request: Request
) -> ChatAnswer | CompletionAnswer:
    """Return the answer once all choices have ended; give up when the client does.

    Raises:
        ApiError: the engine failed, or took too long.
        ClientGoneError: the client is gone; the engine no longer works for it.
    """

    async def collect() -> None:
        while not ticket.is_done or ticket.has_unread:
            reply.take(await ticket.pieces())

    try:
        async with asyncio.timeout(service.seconds_left(ticket)):
            await _unless_gone(collect(), request.receive)
        return reply.whole(ticket)
    except TimeoutError:
        raise service.too_slow() from None
    finally:
        service.cancel(ticket)
        request.state.facts |= ticket_facts(ticket)


def ticket_facts(ticket: Ticket) -> dict[str, Any]:
    """Return what the log says of a request that ended."""
    first = ticket.first_token_s
    return {
        "completion_tokens": ticket.num_tokens, "cached_tokens": ticket.cached_tokens, "finish": ticket.ending,
        "cold": ticket.cold,
        "ttft_ms": None if first is None else round(1e3 * (first - ticket.submitted_s), 3),
    }  # fmt: skip


class EventStream(Response):
    """The events of one request, as they come; ends the request when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, ticket: Ticket, reply: Reply, facts: dict[str, Any]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._ticket, self._reply, self._facts = service, ticket, reply, facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102  (ASGI's)
        try:
            with suppress(ClientGoneError):
                await _unless_gone(self._deliver(send), receive)
        finally:
            self._service.cancel(self._ticket)
            self._facts |= ticket_facts(self._ticket)

    async def _deliver(self, send: Send) -> None:
        ticket, reply = self._ticket, self._reply
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._service.seconds_left(ticket)):
                while not ticket.is_done or ticket.has_unread:
                    reply.take(await ticket.pieces())
                    if events := reply.events():
                        await self._send(send, _body(events))
            last = reply.last_events(ticket)
        except ApiError as error:
            last = error_event(error)
        except TimeoutError:
            last = error_event(self._service.too_slow())
        await self._send(send, _body(last, more=False))

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        timer = asyncio.get_running_loop().call_later(
            self._service.config.client_timeout_s, _cancel_with, asyncio.current_task()
        )
        try:
            await send(message)
        finally:
            timer.cancel()


def _body(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _cancel_with(task: asyncio.Task[Any] | None) -> None:
    assert task is not None, "an answer is sent from a task"
    task.cancel("the client does not read on")


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work`` to its end, or until the client is gone.

    Raises:
        ClientGoneError: it is.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done() or worker.cancelled():
            raise ClientGoneError
        worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.wait({worker, watcher})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
