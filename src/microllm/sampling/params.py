"""What a caller may ask of sampling: one frozen dataclass, checked when it is made.

Place: the first thing a request meets; the sampler, the generator and the HTTP API read it. Knows no model: what
depends on a vocabulary or a context (is this stop id a token at all?) is checked where the model is.

Source: repetition penalty as in transformers (arXiv:1909.05858), presence and frequency penalty and logit bias as in
the OpenAI API, min-p as in arXiv:2407.01082.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from microllm.errors import RequestError

if TYPE_CHECKING:
    from microllm.io.hf_config import GenerationDefaults

MAX_STOPS = 64
MAX_STOP_CHARS = 512
MAX_BIASES = 1024
MAX_GRAMMAR_CHARS = 100_000
MAX_TOP_LOGPROBS = 20
MAX_BIAS = 100.0
MIN_TEMPERATURE = 1e-6
"""Below it scores could overflow fp32; 0 is the exact argmax."""

# Field -> least and greatest value, both allowed.
_WHOLE: dict[str, tuple[int, int]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "n": (1, 128),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
}
_REAL: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
_HINTS = {
    "max_tokens": "; to score a text without generating, use LLM.score()",
    "top_k": "; 0 turns it off",
    "top_p": "; 1 turns it off, temperature=0 picks the likeliest token",
    "min_p": "; 0 turns it off",
    "repetition_penalty": "; 1 turns it off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends; every value is checked when the object is made.

    Nothing is filled in from a checkpoint unless asked for: ``LLM.default_params`` holds what its author published.
    Steps apply in this order: logit_bias, bans (stop ids before ``min_tokens``, ids that are no token), the three
    penalties, temperature, top_k, top_p, min_p. The draw depends on (seed, choice, position) alone.

    Args:
        max_tokens: Most tokens to generate; the model's context may end a sequence earlier, with reason "length".
        temperature: 0 is the exact argmax, the lowest id winning a tie; 1 is the model's own distribution.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens that together reach this mass; 1 is off.
        min_p: Keep tokens at least this many times as likely as the best; 0 is off.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt and output; 1 is off.
        presence_penalty: Subtracted once from the logits of tokens in the output.
        frequency_penalty: Subtracted once an occurrence from the logits of tokens in the output.
        seed: None draws a fresh one; the completion carries the seed that was used.
        n: How many choices each prompt gets.
        stop: Texts that end a sequence and are not part of its text (one, or several).
        stop_token_ids: Ids that end a sequence, beside the model's own.
        ignore_eos: Let only stop_token_ids and stop end a sequence, not the model's own ids.
        min_tokens: No stop id and no stop text ends a sequence before it has this many tokens.
        logit_bias: Token id to a number added to its logit, -100 to 100.
        logprobs: None for none, 0 for each token's own log-probability, k for the k likeliest as well; from the
            model's logits before any step above.
        prompt_logprobs: The same for the prompt's tokens.
        json_schema: A JSON schema, as text, that the answer satisfies (extra ``guided``); at most one of these three.
        regex: A regular expression that the whole answer matches.
        one_of: Texts of which the answer is one.

    Raises:
        RequestError: a value of the wrong type or out of its range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    one_of: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, _whole(name, value, low, high))
        for name, (low, high) in _REAL.items():
            self._set(name, _real(name, getattr(self, name), low, high))
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"got temperature={self.temperature!r}; need 0 or at least {MIN_TEMPERATURE:g}; "
                "temperature=0 picks the likeliest token"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"got ignore_eos={self.ignore_eos!r}; need True or False")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"got min_tokens={self.min_tokens}, max_tokens={self.max_tokens}; need min_tokens <= max_tokens"
            )
        self._set("stop", _stops(self.stop))
        ids = _bounded_list("stop_token_ids", self.stop_token_ids)
        self._set("stop_token_ids", tuple(_whole("a stop token id", i, 0, 2**31 - 1) for i in ids))
        self._set("logit_bias", _biases(self.logit_bias))
        self._check_grammar()

    def _check_grammar(self) -> None:
        self._set("one_of", tuple(_stops(self.one_of, "one_of")))
        given = [name for name in ("json_schema", "regex", "one_of") if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise RequestError(f"got {' and '.join(given)}; need one of them")
        for name in ("json_schema", "regex"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and 0 < len(text) <= MAX_GRAMMAR_CHARS):
                raise RequestError(f"got {name}={str(text)[:40]!r}; need a text of 1 to {MAX_GRAMMAR_CHARS} characters")
        if self.json_schema is not None:
            try:
                schema = json.loads(self.json_schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"got json_schema that is no JSON: {error}; need a JSON schema's text") from error
            if not isinstance(schema, dict):
                raise RequestError("got json_schema that is no object; need a JSON schema; {} takes any JSON")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Return ``stop`` as the tuple that it is stored as, whatever it was given as."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def grammar(self) -> tuple[str, str]:
        """Return which kind of grammar the answer is held to, and its text; two empty texts for none."""
        found = {"json_schema": self.json_schema, "regex": self.regex, "one_of": texts_grammar(self.one_of)}
        return next(((name, text) for name, text in found.items() if text), ("", ""))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters that a mapping (a JSON object) names; None stands for "not given".

        Raises:
            RequestError: a name that is no parameter (all of them are listed), or a value out of range.
        """
        names = [f.name for f in fields(cls)]
        unknown = [f"{name!r}{_near(name, names)}" for name in values if name not in names]
        if unknown:
            raise RequestError(f"got unknown sampling parameters {', '.join(unknown)}; need of {', '.join(names)}")
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def from_defaults(cls, defaults: GenerationDefaults) -> SamplingParams:
        """Return what a checkpoint's author recommends; ``do_sample: false`` is temperature 0.

        Change single fields with ``dataclasses.replace``.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values = {name: getattr(defaults, name) for name in names} | {"max_tokens": defaults.max_new_tokens}
        if defaults.do_sample is False:
            values["temperature"] = 0.0
        return cls.from_dict(values)


def _near(name: object, names: list[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _whole(name: str, value: object, low: int, high: int) -> int:
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or not low <= number <= high:
        hint = _HINTS.get(name, "")
        raise RequestError(f"got {name}={value!r}; need a whole number from {low} to {high}{hint}")
    return number


def _real(name: str, value: object, low: float, high: float) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not low <= number <= high:
        hint = _HINTS.get(name, "")
        raise RequestError(f"got {name}={value!r}; need a number from {low:g} to {high:g}{hint}")
    return number


def _bounded_list(name: str, value: object) -> Sequence[object]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) > MAX_STOPS:
        got = f"{len(value)} {name}" if isinstance(value, list | tuple) else f"{name}={value!r}"
        raise RequestError(f"got {got}; need a list of at most {MAX_STOPS}")
    return value


def texts_grammar(texts: Sequence[str]) -> str:
    """Return a grammar of which each of ``texts`` is one sentence, "" for none."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) if texts else ""


def _stops(value: object, name: str = "stop") -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else _bounded_list(name, value)
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            got = f"a {name} text of {len(text)} characters" if isinstance(text, str) else f"{name} text {text!r}"
            raise RequestError(f"got {got}; need a str of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(str(text) for text in texts))


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        got = f"{len(value)} biases" if isinstance(value, Mapping) else f"logit_bias={value!r}"
        raise RequestError(f"got {got}; need a mapping from token id to number, at most {MAX_BIASES} entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key  # JSON keys are text
        token = _whole("a logit_bias token id", token, 0, 2**31 - 1)
        biases[token] = _real(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
    return biases
