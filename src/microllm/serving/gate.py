"""What every HTTP request passes first and last: its id, its key, the size and pace of its body; its log line."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microllm.serving.errors import ApiError
from microllm.serving.service import Service

OPEN_PATHS = ("/", "/health", "/ready", "/openapi.json")
"""What anybody may read, keys or not."""
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}", re.ASCII)
log = logging.getLogger("microllm.requests")


class Gate:
    """Middleware around all routes; ``scope["state"]`` gets a "request_id", a "salt" and "facts" for the log line."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102  (ASGI's)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _Visit(self._service, scope, receive, send)
        try:
            visit.check()
            await self._app(scope, visit.receive, visit.send)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, visit.send)
        finally:
            visit.close()


class _Visit:
    """One request's way in and out."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._service, self._scope, self._receive, self._send = service, scope, receive, send
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._started_s, self._num_bytes, self._status = time.perf_counter(), 0, 0
        self._has_body = False
        given = self._headers.get(b"x-request-id", b"")
        self.id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._state |= {"request_id": self.id, "salt": b"", "facts": {}}

    def check(self) -> None:
        """Refuse what need not be read.

        Raises:
            ApiError: no key that is known, or a body that says it is too long.
        """
        if self._scope["path"] not in OPEN_PATHS:
            scheme, _, key = self._headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            self._state["salt"] = self._service.salt_of(key.strip() if scheme.lower() == "bearer" else None)
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._service.config.max_body_bytes:
            raise ApiError(413, self._too_long(length.decode("latin-1")[:32]), code="body_too_large")

    async def receive(self) -> Message:
        """Pass on the body's next piece, within its limits of bytes and time."""
        if self._has_body:
            return await self._receive()  # from here on it only tells that the client is gone
        timeout_s = self._service.config.client_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"got no rest of the body within {timeout_s:g} s; need all of it") from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._service.config.max_body_bytes:
            raise HTTPException(413, self._too_long(str(self._num_bytes)))
        self._has_body = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass on the answer, with the request's id in its head."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        await self._send(message)

    def close(self) -> None:
        """Count and log it."""
        route = self._scope.get("route")
        path = route.path if route is not None else "none"
        self._service.metrics.http.labels(path, str(self._status)).inc()
        if path in ("/health", "/ready", "/metrics", "/stats") and self._status == 200:
            return  # asked every second
        facts = {
            "id": self.id, "method": self._scope["method"], "path": self._scope["path"][:200], "status": self._status,
            "total_ms": round(1e3 * (time.perf_counter() - self._started_s), 3), **self._state["facts"],
        }  # fmt: skip
        log.info("request", extra={"facts": facts})

    def _too_long(self, got: str) -> str:
        return f"got a body of {got} bytes; need at most {self._service.config.max_body_bytes}; shorten it"


class JsonLines(logging.Formatter):
    """Log records as one JSON object a line; ``extra={"facts": {...}}`` adds its entries. No text of any prompt."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(), "event": record.getMessage(),
        }  # fmt: skip
        line |= vars(record).get("facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json() -> None:
    """Send this process's log records to standard error, as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
