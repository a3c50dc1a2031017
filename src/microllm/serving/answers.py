"""From an engine's pieces to bodies and stream events of the OpenAI API, for chats and completions alike."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from microllm.io.tokenizer import Tokenizer
from microllm.serving.engine_client import Piece, Ticket
from microllm.serving.errors import ApiError
from microllm.serving.protocol import (
    AnswerMessage,
    CachedTokens,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprobs,
    TopLogprob,
    Usage,
)  # fmt: skip

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One choice so far: what has come of it, and how much of it a stream has sent."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    num_chars: int = 0
    is_begun: bool = False

    def take(self, piece: Piece) -> None:
        """Add a piece.

        Raises:
            ApiError: the engine could not finish the choice.
        """
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        if piece.finish_reason in ("stop", "length"):
            self.finish_reason = piece.finish_reason
        elif piece.finish_reason is not None:
            raise ApiError.engine_failed((piece.facts or {}).get("error") or "got no reason; report it")


@dataclass(slots=True, kw_only=True)
class Reply:
    """What all events and the whole answer of one request share, and how they are written."""

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    num_prompt_tokens: int
    has_logprobs: bool
    include_usage: bool
    choices: list[Choice]

    def take(self, pieces: Sequence[Piece]) -> None:
        """Add what came.

        Raises:
            ApiError: the engine could not finish one of the choices.
        """
        for piece in pieces:
            self.choices[piece.choice].take(piece)

    def usage(self, ticket: Ticket) -> Usage:
        """Return the tokens counted so far."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens, completion_tokens=ticket.num_tokens,
            total_tokens=self.num_prompt_tokens + ticket.num_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=ticket.cached_tokens),
            cold=ticket.cold,
        )  # fmt: skip

    def whole(self, ticket: Ticket) -> ChatAnswer | CompletionAnswer:
        """Return the answer of a request whose choices have ended."""
        head: dict[str, Any] = {
            "id": self.id, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint,
            "usage": self.usage(ticket),
        }  # fmt: skip
        if self.kind == "chat":
            return ChatAnswer(**head, choices=[self._chat_choice(i, c) for i, c in enumerate(self.choices)])
        return CompletionAnswer(**head, choices=[self._completion_choice(i, c) for i, c in enumerate(self.choices)])

    def events(self) -> bytes:
        """Return one event for each choice of which something new can be shown; what was shown is forgotten."""
        events = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.texts)
            if text or choice.finish_reason or choice.logprobs:
                events.append(self._event(self._delta(index, choice, text)))
                choice.num_chars += sum(len(self._token(i)) for i in choice.token_ids) if self.has_logprobs else 0
                choice.is_begun = True
                choice.texts, choice.token_ids, choice.logprobs, choice.finish_reason = [], [], [], None
        return b"".join(events)

    def last_events(self, ticket: Ticket) -> bytes:
        """Return what ends a stream: the usage, if it was asked for, and the mark."""
        if not self.include_usage:
            return DONE
        return self._event("", f',"usage":{self.usage(ticket).model_dump_json()}') + DONE

    def _event(self, choice: str, usage: str | None = None) -> bytes:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        if usage is None:
            usage = ',"usage":null' if self.include_usage else ""
        return (
            f'data: {{"id":"{self.id}","object":"{name}","created":{self.created},"model":{json.dumps(self.model)},'
            f'"system_fingerprint":"{self.fingerprint}","choices":[{choice}]{usage}}}\n\n'
        ).encode()

    def _delta(self, index: int, choice: Choice, text: str) -> str:
        logprobs = "null"
        if self.has_logprobs:
            found = self._chat_logprobs(choice) if self.kind == "chat" else self._completion_logprobs(choice)
            logprobs = found.model_dump_json()
        shown, reason = json.dumps(text), json.dumps(choice.finish_reason)
        if self.kind == "completion":
            return f'{{"index":{index},"text":{shown},"logprobs":{logprobs},"finish_reason":{reason}}}'
        role = "" if choice.is_begun else '"role":"assistant",'
        return f'{{"index":{index},"delta":{{{role}"content":{shown}}},"logprobs":{logprobs},"finish_reason":{reason}}}'

    def _chat_choice(self, index: int, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None, "an answer is of choices that ended"
        return ChatChoice(
            index=index, message=AnswerMessage(content="".join(choice.texts)), finish_reason=choice.finish_reason,
            logprobs=self._chat_logprobs(choice) if self.has_logprobs else None,
        )  # fmt: skip

    def _completion_choice(self, index: int, choice: Choice) -> CompletionChoice:
        assert choice.finish_reason is not None, "an answer is of choices that ended"
        return CompletionChoice(
            index=index, text="".join(choice.texts), finish_reason=choice.finish_reason,
            logprobs=self._completion_logprobs(choice) if self.has_logprobs else None,
        )  # fmt: skip

    def _chat_logprobs(self, choice: Choice) -> ChatLogprobs:
        content = []
        for token_id, (logprob, top) in zip(choice.token_ids, choice.logprobs, strict=True):
            others = [self._top(other, value) for other, value in top]
            content.append(TokenLogprobs(**self._top(token_id, logprob).model_dump(), top_logprobs=others))
        return ChatLogprobs(content=content)

    def _completion_logprobs(self, choice: Choice) -> CompletionLogprobs:
        tokens = [self._token(token_id) for token_id in choice.token_ids]
        offsets, place = [], choice.num_chars
        for token in tokens:
            offsets.append(place)
            place += len(token)
        tops = [{self._token(i): _finite(value) for i, value in top} for _, top in choice.logprobs]
        return CompletionLogprobs(
            tokens=tokens, token_logprobs=[_finite(logprob) for logprob, _ in choice.logprobs],
            top_logprobs=tops if any(tops) else None, text_offset=offsets,
        )  # fmt: skip

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._token(token_id), logprob=_finite(logprob), bytes=list(self.tokenizer.token_bytes(token_id))
        )

    def _token(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which cannot go on."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
