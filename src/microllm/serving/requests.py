"""From a body to what an engine takes: token ids and sampling parameters."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio.to_thread

from microllm.errors import MicroLLMError, RequestError
from microllm.sampling import SamplingParams
from microllm.serving.errors import ApiError
from microllm.serving.protocol import (
    MAX_PROMPTS,
    ChatBody,
    ChoiceFormat,
    CompletionBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
)  # fmt: skip
from microllm.serving.service import Service

COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that does not say, as in the OpenAI API; a chat's answer may fill the context."""
_AS_THEY_ARE = (
    "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos",
)  # fmt: skip


async def read_request(service: Service, body: ChatBody | CompletionBody) -> tuple[list[list[int]], SamplingParams]:
    """Return the prompts of a body as token ids, and its sampling parameters.

    Text is rendered and encoded in a thread: a long one holds up nobody.

    Raises:
        ApiError: another model, a prompt that cannot be used, a parameter out of its range.
    """
    if body.model != service.name:
        raise ApiError(
            404, f"got model {body.model!r}; need {service.name!r}", kind="not_found_error", code="model_not_found",
            param="model",
        )  # fmt: skip
    if body.stream_options is not None and not body.stream:
        raise ApiError.bad_request("got stream_options without stream; need stream=true beside it", "stream_options")
    longest = service.longest_tokens
    try:
        prompts = await anyio.to_thread.run_sync(_encode, service, body)
    except MicroLLMError as error:
        raise ApiError.bad_request(str(error), "messages" if isinstance(body, ChatBody) else "prompt") from error
    for prompt in prompts:
        _check_prompt(prompt, longest)
    try:
        return prompts, _sampling_params(service, body, longest - max(map(len, prompts)))
    except RequestError as error:
        named = re.match(r"got (\w+)=", str(error))
        raise ApiError.bad_request(str(error), named[1] if named else None) from error


def _encode(service: Service, body: ChatBody | CompletionBody) -> list[list[int]]:
    tokenizer = service.tokenizer
    if isinstance(body, ChatBody):
        messages = [message.plain() for message in body.messages]
        if not service.config.allow_control_tokens:
            for index, message in enumerate(messages):
                ids = tokenizer.encode(str(message["content"]), add_special_tokens=False)
                if forged := tokenizer.special_ids.intersection(ids):
                    spelled = tokenizer.decode(sorted(forged)[:1], skip_special_tokens=False)
                    raise RequestError(
                        f"got messages[{index}] with the control token {spelled!r} in its content; need plain text; "
                        "take it out, or serve with --allow-control-tokens"
                    )
        return [tokenizer.encode_chat(messages)]
    prompt = body.prompt
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if not 0 < len(prompt) <= (MAX_PROMPTS if not isinstance(prompt[0], int) else len(prompt)):
        raise RequestError(f"got a list of {len(prompt)} prompts; need 1 to {MAX_PROMPTS}")
    if isinstance(prompt[0], int):
        return [prompt]  # pyright: ignore[reportReturnType]  (the body's type is one list or the other)
    return [tokenizer.encode(each) if isinstance(each, str) else each for each in prompt]  # pyright: ignore


def _check_prompt(prompt: list[int], longest: int) -> None:
    if not 0 < len(prompt) < longest:
        raise ApiError(
            400, f"got a prompt of {len(prompt)} tokens; need 1 to {longest - 1}; shorten it",
            code="context_length_exceeded", param="messages",
        )  # fmt: skip


def _sampling_params(service: Service, body: ChatBody | CompletionBody, room: int) -> SamplingParams:
    values: dict[str, Any] = {}
    if service.config.checkpoint_sampling:
        values |= service.checkpoint_defaults
    values |= {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
    values |= _grammar(body)
    wanted = body.max_tokens
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError(f"got top_logprobs={body.top_logprobs} without logprobs; need logprobs=true beside it")
        if body.logprobs:
            values["logprobs"] = body.top_logprobs or 0
        if wanted is not None and body.max_completion_tokens is not None:
            raise RequestError("got max_tokens and max_completion_tokens; need one of them")
        wanted = body.max_completion_tokens if wanted is None else wanted
    else:
        values["logprobs"] = body.logprobs
        wanted = COMPLETION_TOKENS if wanted is None else wanted
    limit = service.config.max_answer_tokens
    if limit is not None and wanted is not None and wanted > limit:
        raise RequestError(f"got max_tokens={wanted}; need at most {limit}, this server's limit")
    values["max_tokens"] = max(1, min(room if wanted is None else wanted, room, limit or room))
    if values.get("min_tokens", 0) > values["max_tokens"]:
        raise RequestError(
            f"got min_tokens={values['min_tokens']}; need at most {values['max_tokens']}, which the answer may have"
        )
    return SamplingParams.from_dict(values)


def _grammar(body: ChatBody | CompletionBody) -> dict[str, Any]:
    match body.response_format:
        case JsonObjectFormat():
            return {"json_schema": '{"type": "object"}'}
        case JsonSchemaFormat() as found:
            try:
                return {"json_schema": json.dumps(found.json_schema.schema_)}
            except RecursionError:
                raise RequestError("got a JSON schema that is nested too deep; need a flatter one") from None
        case RegexFormat() as found:
            return {"regex": found.regex}
        case ChoiceFormat() as found:
            return {"one_of": found.choices}
        case _:
            return {}
