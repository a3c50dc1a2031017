"""Choose the next token of each row: edit its logits as its parameters say, then take the argmax or draw.

Place: called once a step with the rows that are active; a row brings its own ``Sampler``, so that rows with different
parameters share a batch and come and go freely. Does not know models, text or when a sequence ends.

Axes:    A = active rows, V = vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microllm import ops
from microllm.sampling.grammar import Grammar
from microllm.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model's own logits, and the likeliest tokens there, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """One sequence's sampling state: parameters, random key, and the tokens that penalties count.

    ``banned_ids`` are never chosen (ids that are no token); ``stop_ids`` not before ``min_tokens`` are there.
    """

    def __init__(
        self, params: SamplingParams, *, seed: int, choice: int, prompt_ids: Sequence[int],
        stop_ids: Collection[int] = (), banned_ids: Tensor | None = None, grammar: Grammar | None = None,
    ) -> None:  # fmt: skip
        self.params, self.seed, self.choice = params, seed, choice
        self.position = len(prompt_ids)
        self._num_chosen = 0
        self._stop_ids = sorted(stop_ids)
        self._banned_ids, self._grammar = banned_ids, grammar
        self._prompt_ids = prompt_ids
        self._seen_V: Tensor | None = None
        self._counts_V: Tensor | None = None
        self._has_penalties = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def edits(self) -> bool:
        """Return whether this row's next logits need a change before a token is chosen."""
        return self._banned_ids is not None or self.edits_by_request

    @property
    def edits_by_request(self) -> bool:
        """Return whether that is so for more than the ids that are no token."""
        held = bool(self._stop_ids) and self._too_short
        return held or self._has_penalties or bool(self.params.logit_bias) or self._grammar is not None

    @property
    def takes_top(self) -> bool:
        """Return whether the next token is the argmax of its logits as they are, and nothing else is asked of them."""
        return self.params.temperature == 0 and self.params.logprobs is None and not self.edits

    @property
    def is_over(self) -> bool:
        """Return whether the grammar, where there is one, lets nothing follow."""
        return self._grammar is not None and self._grammar.is_over

    @property
    def _too_short(self) -> bool:
        return self._num_chosen < self.params.min_tokens

    def edit(self, logits_V: Tensor) -> None:
        """Change one row's logits in place: biases, bans, penalties, the grammar's mask.

        Shapes:  logits [V] fp32
        """
        if self.params.logit_bias:
            ids = torch.tensor(list(self.params.logit_bias), device=logits_V.device)
            logits_V[ids] += torch.tensor(list(self.params.logit_bias.values()), device=logits_V.device)
        if self._too_short and self._stop_ids:
            logits_V[torch.tensor(self._stop_ids, device=logits_V.device)] = -math.inf
        if self._banned_ids is not None:
            logits_V[self._banned_ids] = -math.inf
        if self._has_penalties:
            seen_V, counts_V = self._counted(logits_V)
            factor = self.params.repetition_penalty
            penalised_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
            logits_V.copy_(torch.where(seen_V, penalised_V, logits_V))
            logits_V -= self.params.frequency_penalty * counts_V
            logits_V -= self.params.presence_penalty * (counts_V > 0)
        if self._grammar is not None:
            self._grammar.forbid(logits_V)

    def accept(self, token_id: int) -> None:
        """Count the token that was chosen for this row."""
        self.position += 1
        self._num_chosen += 1
        if self._grammar is not None:
            self._grammar.accept(token_id)
        if self._seen_V is not None and self._counts_V is not None:
            self._seen_V[token_id] = True
            self._counts_V[token_id] += 1

    def _counted(self, like_V: Tensor) -> tuple[Tensor, Tensor]:
        """Return which ids prompt and output hold, and how often the output holds each."""
        if self._seen_V is None or self._counts_V is None:
            self._seen_V = torch.zeros_like(like_V, dtype=torch.bool)
            self._seen_V[torch.tensor(self._prompt_ids, dtype=torch.int64, device=like_V.device)] = True
            self._counts_V = torch.zeros_like(like_V)
        return self._seen_V, self._counts_V


def choose_tokens(logits_AV: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return the next token of each row; -1 where the logits are not finite. The logits are left as they are.

    A row at temperature 0 takes the argmax and draws nothing, whoever shares its batch.

    Shapes:  logits [A, V] float -> [A] int64
    """
    if any(sampler.edits for sampler in samplers):
        logits_AV = logits_AV.to(torch.float32, copy=True)
        for sampler, logits_V in zip(samplers, logits_AV, strict=True):
            if sampler.edits:
                sampler.edit(logits_V)
    token_A = ops.argmax(logits_AV)
    warm = [i for i, sampler in enumerate(samplers) if sampler.params.temperature > 0]
    if warm:
        rows = torch.tensor(warm, device=logits_AV.device)
        token_A[rows] = _draw(logits_AV[rows], [samplers[i] for i in warm])
    return token_A


def _draw(logits_AV: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits_AV.device)

    params = [sampler.params for sampler in samplers]
    return ops.sample(
        logits_AV,
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column([s.seed for s in samplers], torch.int64),
        choice=column([s.choice for s in samplers], torch.int64),
        position=column([s.position for s in samplers], torch.int64),
    )


def token_logprobs(logits_AV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return each row's token with its log-probability, and the ``num_top`` likeliest tokens of that row.

    Shapes:  logits [A, V] float, A token ids, A numbers
    Numbers: log-softmax in fp32 over all V logits, before any sampling step
    """
    logprobs_AV = logits_AV.float().log_softmax(dim=1)
    chosen = logprobs_AV.gather(1, torch.tensor(token_ids, device=logits_AV.device)[:, None])[:, 0].tolist()
    best, ids = logprobs_AV.topk(min(max(num_top), logprobs_AV.shape[1]), dim=1)
    rows = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), best.tolist(), strict=True)]
    return [
        TokenLogprob(token, logprob, tuple(sorted(row[:count], key=lambda pair: (-pair[1], pair[0]))))
        for token, logprob, row, count in zip(token_ids, chosen, rows, num_top, strict=True)
    ]
