"""The bodies of the OpenAI-compatible API, both ways; what is not named here is refused by name.

Bounds that ``SamplingParams`` checks stand here only where the published schema needs them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from microllm.sampling.params import MAX_STOP_CHARS, MAX_TOP_LOGPROBS

MAX_PROMPTS = 128
MAX_WHOLE = 2**31 - 1


class Body(BaseModel):
    """What a client sends: exact types, and no name that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class TextPart(Body):
    """One part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, object]:
        """Return the message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool = False


class NamedSchema(Body):
    """A JSON schema with its name; ``strict`` changes nothing: the schema always holds."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Plain text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Body):
    """Text that a regular expression matches as a whole (not of the OpenAI API)."""

    type: Literal["regex"]
    regex: str


class ChoiceFormat(Body):
    """One of several texts (not of the OpenAI API)."""

    type: Literal["choice"]
    choices: Annotated[list[str], Field(min_length=1)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat, Field(discriminator="type")
]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class SamplingBody(Body):
    """What both kinds of request take; the last seven are not of the OpenAI API."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_PROMPTS)
    stop: Stop | list[Stop] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    top_k: int | None = Field(None, ge=0, le=MAX_WHOLE)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, le=MAX_WHOLE)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class ChatBody(SamplingBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, le=MAX_WHOLE)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_WHOLE)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class CompletionBody(SamplingBody):
    """The body of ``POST /v1/completions``; a prompt is text or token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=1, le=MAX_WHOLE)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class CachedTokens(BaseModel):
    """How many of the prompt's tokens were found in the cache."""

    cached_tokens: int


class Usage(BaseModel):
    """How many tokens went in and came out; ``cold``: a step of the request had to be captured first."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    cold: bool


class TopLogprob(BaseModel):
    """A token and its log-probability; -9999 stands for minus infinity, as in the OpenAI API."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    """A chosen token, and the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of a choice's tokens, one that ended it among them."""

    content: list[TokenLogprobs]


class CompletionLogprobs(BaseModel):
    """The same for ``/v1/completions``, column by column."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class AnswerMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Answer(BaseModel):
    """What both kinds of answer hold."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatAnswer(Answer):
    """The answer of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class CompletionAnswer(Answer):
    """The answer of ``POST /v1/completions``."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    """One model: its context, and the checkpoint's sampling parameters with whether they are applied."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "microllm"
    max_model_len: int | None
    precision: str | None
    checkpoint_sampling: dict[str, Any] | None
    checkpoint_sampling_applied: bool


class ModelList(BaseModel):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorFacts(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error, in the shape of the OpenAI API."""

    error: ErrorFacts


class Status(BaseModel):
    """The answer of ``/health`` and ``/ready``."""

    status: str
    detail: str | None = None
