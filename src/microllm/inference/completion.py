"""What a request gives back: frozen records of text, tokens, log-probabilities, times and how it ended.

Place: made by ``sequence.py`` and ``llm.py``, printed by the commands and sent by the HTTP API. Plain data only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from microllm.sampling import TokenLogprob

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long a sequence took, from the call that asked for it.

    Units:   milliseconds of wall-clock time; ``None`` for what never happened
    Numbers: ``decode_tokens_per_s`` counts the tokens after the first, each of which cost a forward pass of its own,
             over the time since the first token; rows of a batch share that time
    """

    prefill_ms: float | None
    ttft_ms: float | None
    total_ms: float
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished sequence.

    ``text`` leaves out the stop text or stop token that ended it; ``token_ids`` hold every token that was chosen, the
    one that ended it too. ``index`` is the choice's number among the ``n`` of its prompt. ``seed`` repeats the draw.
    ``logprobs`` has one entry a token; ``prompt_logprobs`` one a prompt token, None for the first, which follows
    nothing. ``error`` says what went wrong where ``finish_reason`` is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the completion as plain data that JSON can hold: a number that is not finite becomes None."""
        return {name: _finite(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What one step added: a token, and the text that became certain (none while it might be part of a stop text)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a model finds a text, token by token.

    Units:   natural logarithms; ``perplexity`` is exp(-sum / num_tokens)
    Numbers: the first token follows nothing: its entry is None and ``num_tokens`` leaves it out; where nothing is
             left, ``perplexity`` is None
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    sum_logprob: float
    num_tokens: int
    perplexity: float | None


def _finite(value: Any) -> Any:  # noqa: ANN401  (whatever a record holds)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
