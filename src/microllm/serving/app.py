"""The routes: what each path answers, and in which shape it says no."""

from __future__ import annotations

import re
import reprlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import microllm.serving
from microllm.serving.answers import Choice, Reply
from microllm.serving.delivery import ClientGoneError, EventStream, whole_answer
from microllm.serving.errors import ApiError
from microllm.serving.gate import Gate
from microllm.serving.protocol import (
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    ErrorAnswer,
    ModelCard,
    ModelList,
    Status,
)  # fmt: skip
from microllm.serving.requests import read_request
from microllm.serving.server_config import ServerConfig
from microllm.serving.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request cannot be served as it is.", 401: "No API key that is known.", 404: "No such model.",
        408: "The body did not come in time.", 413: "The body is too long.", 429: "The queue is full.",
        500: "The engine failed.", 503: "Loading, shutting down, or the engine ended.", 504: "It took too long.",
    }.items()
}  # fmt: skip
_STREAM = {"text/event-stream": {"schema": {"type": "string", "description": "With stream=true."}}}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def build_app(config: ServerConfig, on_fatal: Callable[[str], None] | None = None) -> FastAPI:
    """Return the application; its engines start with it, and end with it.

    Raises:
        MicroLLMError: the model or its tokenizer cannot be found or read; an API key file cannot be used.
    """
    service = Service(config, on_fatal)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="microLLM", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Gate, service=service)
    _add_error_shapes(app)
    _add_model_routes(app, service)
    _add_watching_routes(app, service)
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions", responses={**_ERRORS, 200: {"model": ChatAnswer, "content": _STREAM}},
        response_model=None,
    )  # fmt: skip
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, body, request)

    @app.post(
        "/v1/completions", responses={**_ERRORS, 200: {"model": CompletionAnswer, "content": _STREAM}},
        response_model=None,
    )  # fmt: skip
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a text."""
        return await _answer(service, body, request)

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> ModelList:
        """List the one model."""
        return ModelList(data=[_model_card(service)])

    @app.get("/v1/models/{model:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(model: str) -> ModelCard:
        """Describe the model."""
        if model != service.name:
            raise ApiError(404, f"got model {model!r}; need {service.name!r}", code="model_not_found", param="model")
        return _model_card(service)


def _add_watching_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {"model": Status}})
    async def health(response: Response) -> Status:
        """Say whether the engines work, or load for the first time; 503 when one has ended."""
        if service.is_alive:
            return Status(status="alive")
        dead = [engine.index for engine in service.engines if not engine.is_alive]
        response.status_code = 503
        return Status(status="dead", detail=f"engines {dead} of {len(service.engines)} do not run")

    @app.get("/ready", responses={503: {"model": Status}})
    async def ready(response: Response) -> Status:
        """Say whether requests are let in."""
        if service.is_ready:
            return Status(status="ready")
        response.status_code = 503
        return Status(status="draining" if service.is_draining else "loading")

    @app.get("/metrics", responses={401: _ERRORS[401], 200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(service.metrics.exposition(service.engines), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", responses={401: _ERRORS[401]})
    async def stats() -> dict[str, Any]:
        """Return the numbers that the page shows."""
        return service.metrics.live(service.engines)

    page = files(microllm.serving).joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        """Return the page."""
        return HTMLResponse(
            page, headers={"content-security-policy": _PAGE_POLICY, "x-content-type-options": "nosniff"}
        )


async def _answer(service: Service, body: ChatBody | CompletionBody, request: Request) -> Response:
    kind = "chat" if isinstance(body, ChatBody) else "completion"
    prompts, params = await read_request(service, body)
    num_prompt_tokens = sum(map(len, prompts))
    ticket = service.submit(prompts, params, request.state.salt)
    reply = Reply(
        kind=kind, id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}", created=int(time.time()),
        model=service.name, fingerprint=service.fingerprint, tokenizer=service.tokenizer,
        num_prompt_tokens=num_prompt_tokens, has_logprobs=params.logprobs is not None,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        choices=[Choice() for _ in range(ticket.num_running)],
    )  # fmt: skip
    request.state.facts |= {"answer": reply.id, "user": (body.user or "")[:64], "prompt_tokens": num_prompt_tokens}
    try:
        await ticket.accepted()
    except BaseException:
        service.cancel(ticket)
        raise
    service.metrics.note_prompts(map(len, prompts))
    if body.stream:
        return EventStream(service, ticket, reply, request.state.facts)
    answer = await whole_answer(service, ticket, reply, request)
    return Response(answer.model_dump_json(), media_type="application/json")


def _model_card(service: Service) -> ModelCard:
    facts = next((engine.facts for engine in service.engines if engine.facts is not None), None)
    return ModelCard(
        id=service.name, created=service.created, max_model_len=facts and facts.longest_tokens,
        precision=facts and facts.precision, checkpoint_sampling=facts and facts.defaults,
        checkpoint_sampling_applied=service.config.checkpoint_sampling,
    )  # fmt: skip


def _add_error_shapes(app: FastAPI) -> None:
    """Make every error one of the OpenAI shape."""

    def shaped(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return shaped(error)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # to nobody; the log shows it

    @app.exception_handler(RequestValidationError)
    async def bad_body(_: Request, error: RequestValidationError) -> Response:
        return shaped(_validation_error(error))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        found = ApiError(error.status_code, str(error.detail))
        return JSONResponse(found.body(), found.status, {**(error.headers or {}), **found.headers()})

    @app.exception_handler(Exception)
    async def our_bug(_: Request, error: Exception) -> Response:
        return shaped(ApiError(500, f"got {type(error).__name__} in the server; report it", kind="server_error"))


def _validation_error(error: RequestValidationError) -> ApiError:
    found = error.errors()  # of a union, each member's: what is no wrong type says most
    first = next((each for each in found if not each["type"].endswith("_type")), found[0])
    place = [str(part) for part in first["loc"] if re.fullmatch(r"\w+", str(part)) and part not in ("body", "str")]
    param = ".".join(place)[:200] or None
    if first["type"] == "extra_forbidden":
        return ApiError.bad_request(
            f"got unknown parameter {param!r}; need one that this server has; leave it out", param
        )
    if first["type"] == "json_invalid":
        return ApiError.bad_request(f"got bad JSON at character {param}: {first['ctx']['error']}; need valid JSON")
    shown = reprlib.repr(first.get("input"))  # short, whatever its depth and size
    return ApiError.bad_request(f"got {param or 'a body'} = {shown}; {first['msg']}; correct it", param)
