"""Keep an answer within a JSON schema, a regular expression or a list of texts: a mask over the next tokens.

Place: a sequence's sampler holds one and asks it before each choice; the mask is a bit a token, computed on the host
and applied where the logits are. The rules themselves are llguidance's (the extra ``guided``). Knows no model.

JSON comes with ", " and ": " and no other white space, so that no model can loop in it; strings and numbers have no
bound but ``max_tokens``, whose end is reported as "length".
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from microllm.errors import MissingExtraError, RequestError
from microllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from microllm.io.tokenizer import Tokenizer

_LEXER_FUEL = 200_000
"""What llguidance may spend on regular expressions before the first token, and at each: 4 and 14 ms or so."""
_JSON: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """One sequence's place in its grammar.

    Raises:
        MissingExtraError: llguidance is not installed.
        RequestError: the grammar is none, or nothing satisfies it.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        try:
            from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("llguidance", "guided", "structured output") from error
        name, text = params.grammar
        try:
            if name == "json_schema":
                text = LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
            else:
                text = LLMatcher.grammar_from_regex(text) if name == "regex" else LLMatcher.grammar_from_lark(text)
            limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, step_lexer_fuel=_LEXER_FUEL)
            self._matcher = LLMatcher(_vocabulary(tokenizer, tuple(sorted(eos_ids))), text, log_level=0, limits=limits)
        except ValueError as error:
            raise RequestError(f"got {name} that cannot be used: {error}; need one that some text satisfies") from error
        self._num_tokens = tokenizer.num_tokens
        self._mask: Tensor | None = self._next_mask(name)

    @property
    def is_over(self) -> bool:
        """Return whether nothing may follow: the text satisfies the grammar and cannot go on."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def forbid(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that may not come next to minus infinity, in place.

        Shapes:  logits [V] fp32, on any device
        Raises:
            RequestError: the grammar has become too complex to go on.
        """
        mask = self._next_mask("a grammar") if self._mask is None else self._mask
        bits = torch.arange(32, dtype=torch.int32, device=logits_V.device)
        allowed_V = ((mask.to(logits_V.device)[:, None] >> bits) & 1).bool().flatten()[: logits_V.shape[0]]
        logits_V[: allowed_V.shape[0]].masked_fill_(~allowed_V, -math.inf)
        logits_V[allowed_V.shape[0] :] = -math.inf

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen; one that ends the sequence from outside the grammar changes nothing."""
        self._mask = None
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def _next_mask(self, name: str) -> Tensor:
        mask = torch.zeros(-(-self._num_tokens // 32), dtype=torch.int32)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.itemsize)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split("<state>")[0].split())[:300]
            raise RequestError(f"got {name} that cannot be used: {reason}; need one that some text satisfies")
        return mask


def grammar_of(params: SamplingParams, tokenizer: Tokenizer, eos_ids: Collection[int]) -> Grammar | None:
    """Return the grammar that the parameters ask for, if any.

    Raises:
        MissingExtraError, RequestError: as ``Grammar``.
    """
    return Grammar(params, tokenizer, eos_ids) if params.grammar[0] else None


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Return llguidance's view of a tokenizer: a third of a second to make, shared by all of its sequences."""
    from llguidance import LLTokenizer  # noqa: PLC0415

    return LLTokenizer(tokenizer.to_json(), eos_token=list(eos_ids) or None)
