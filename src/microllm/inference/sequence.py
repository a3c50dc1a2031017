"""One sequence on its way from a prompt to a completion: its tokens, its text, and when it ends.

Place: the generator hands it each chosen token; ``llm.py`` makes it and takes its completion. Does not run the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from microllm.inference.completion import Completion, FinishReason, StreamPiece, Timings
from microllm.sampling import Sampler, SamplingParams, StopChecker, TokenLogprob, grammar_of

if TYPE_CHECKING:
    from microllm.io.tokenizer import Tokenizer

IF_NOT_FINITE = "try precision='fp32', and look for the layer with microllm align"


class GeneratedSequence:
    """A prompt and what has been generated after it.

    It ends, in this order of precedence: by a stop token id, a stop text or its grammar's end ("stop"), at
    ``max_tokens`` or the end of the context ("length"). ``finish`` ends it from outside.
    """

    def __init__(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, tokenizer: Tokenizer, *, seed: int, choice: int,
        context: int, eos_ids: frozenset[int], banned_ids: Tensor | None,
    ) -> None:  # fmt: skip
        self.prompt_ids, self.params = prompt_ids, params
        self.max_new_tokens = min(params.max_tokens, context - len(prompt_ids))
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self.sampler = Sampler(
            params, seed=seed, choice=choice, prompt_ids=prompt_ids, stop_ids=self._stop_ids, banned_ids=banned_ids,
            grammar=grammar_of(params, tokenizer, eos_ids),
        )  # fmt: skip
        self._stream = tokenizer.stream()
        self._checker = StopChecker(params.stop_texts)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._texts: list[str] = []
        self._num_sent = 0, 0
        self._error: str | None = None
        self.submitted_s = time.perf_counter()
        self._started: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """Return the tokens chosen so far; a view, not to be changed."""
        return self._token_ids

    def start(self) -> None:
        """Note that the prompt's forward pass begins."""
        self._started = time.perf_counter()

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Take the next token; -1 (the logits were not finite) ends this sequence with "error"."""
        assert self.finish_reason is None, "a finished sequence takes no token"
        if token_id < 0:
            self.fail(
                f"got non-finite logits at step {len(self._token_ids)} (position {self.sampler.position}); "
                f"need finite ones; {IF_NOT_FINITE}"
            )
            return
        self.first_token_s = self.first_token_s or time.perf_counter()
        self._token_ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        self.sampler.accept(token_id)
        if token_id in self._stop_ids:
            self.finish("stop")
            return
        self._texts.append(self._checked(self._stream.push(token_id)))
        if self._checker.stopped is not None or self.sampler.is_over:
            self.finish("stop")
        elif len(self._token_ids) >= self.max_new_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """End the sequence and let out the text that was held back; the first call decides, later ones do nothing."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason  # before the text, so that one that cannot be decoded ends as well
        self.finished_s = time.perf_counter()
        if self._checker.stopped is None:
            rest = self._checked(self._stream.flush())
            self._texts.append(rest + self._checker.flush())
        if self._checker.stopped is not None and reason == "length":
            self.finish_reason = "stop"

    def fail(self, error: str) -> None:
        """End the sequence with "error" and the text that says what went wrong."""
        self._error = error
        self.finish("error")
        self.finish_reason = "error"  # also where the failure came while it was ending otherwise

    def _checked(self, text: str) -> str:
        """Return what of new text may go out; stop texts count once ``min_tokens`` tokens lie before them."""
        return text if len(self._token_ids) <= self.params.min_tokens else self._checker.push(text)

    def piece(self, most: int | None = None) -> StreamPiece:
        """Return what is new since the last call, of at most ``most`` tokens; the end comes with the last of them."""
        (first_text, first), count = self._num_sent, len(self._token_ids)
        end = count if most is None else min(first + most, count)
        texts = self._texts[first_text : None if end == count else first_text + end - first]
        self._num_sent = first_text + len(texts), end
        return StreamPiece(
            text="".join(texts),
            token_ids=tuple(self._token_ids[first:end]),
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs[first:end]),
            finish_reason=self.finish_reason if end == count else None,
        )

    def completion(self) -> Completion:
        """Return the finished sequence."""
        assert self.finish_reason is not None, "a completion is of a finished sequence"
        return Completion(
            index=self.sampler.choice,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            prompt_token_ids=self.prompt_ids,
            finish_reason=self.finish_reason,
            seed=self.sampler.seed,
            timings=self._timings(),
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            error=self._error,
        )

    def _timings(self) -> Timings:
        assert self.finished_s is not None, "times are of a finished sequence"
        first, num_decoded = self.first_token_s, len(self._token_ids) - 1
        decode_s = self.finished_s - first if first is not None else 0.0
        return Timings(
            prefill_ms=None if first is None or self._started is None else 1e3 * (first - self._started),
            ttft_ms=None if first is None else 1e3 * (first - self.submitted_s),
            total_ms=1e3 * (self.finished_s - self.submitted_s),
            decode_tokens_per_s=num_decoded / decode_s if num_decoded > 0 and decode_s > 0 else None,
        )
