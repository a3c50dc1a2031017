"""From a step's logits to tokens: the next one of each row, and as many of its draft tokens as the model chose itself.

Place: between the runner and the scheduler. A sampled row is verified like a greedy one: its draw at a position depends
on seed, choice and position alone, so that a draft token is kept exactly where plain decoding would have drawn it.

Axes:    A = rows, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from microllm.errors import RequestError
from microllm.inference.scheduler import Chunk
from microllm.inference.sequence import GeneratedSequence
from microllm.sampling import TokenLogprob, choose_tokens, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrigin:
    """Where a token was made, and what it won against.

    Numbers: ``step`` is the engine's; ``position`` is the token's own in its sequence; ``num_rows`` requests and
             ``num_tokens`` tokens shared the step; ``best`` holds the ids and logits that the model found likeliest
    """

    token_id: int
    position: int
    producer: Literal["prefill", "decode", "verify"]
    step: int
    slot: int | None
    num_rows: int
    num_tokens: int
    best: tuple[tuple[int, float], tuple[int, float]]

    @property
    def margin(self) -> float:
        """Return how far the best logit is ahead."""
        return self.best[0][1] - self.best[1][1]


@torch.inference_mode()
def accept_tokens(
    chunks: Sequence[Chunk], logits: Tensor, firsts: Sequence[int], *, row_by_row: bool,
    diagnosed_step: int | None = None,
) -> list[int]:  # fmt: skip
    """Hand each chunk's request its next tokens; return how many of the chunk's own tokens turned out to be right.

    ``firsts``: the row of ``logits`` where each chunk's begin. ``row_by_row``: each row goes through the sampler alone,
    where its bits may not know the batch: torch's vectorised functions round the end of a tensor differently.
    ``diagnosed_step``: the step's number, where each token's origin is to be noted.
    """
    num_kept = [len(chunk.token_ids) - chunk.num_drafts for chunk in chunks]
    for chunk, first in zip(chunks, firsts, strict=True):
        if chunk.kind == "prefill" and chunk.request.sequence.params.prompt_logprobs is not None:
            _note_prompt(chunk, logits[first : first + chunk.num_logits])
    active, depth = [i for i, chunk in enumerate(chunks) if chunk.reaches_end], 0
    while active:
        rows = [firsts[i] + chunks[i].num_logits - 1 - chunks[i].num_drafts + depth for i in active]
        sequences = [chunks[i].request.sequence for i in active]
        tokens = None if row_by_row else _choose_together(logits, rows, sequences)
        if tokens is None:
            tokens = [_choose_alone(logits, row, sequence) for row, sequence in zip(rows, sequences, strict=True)]
        if diagnosed_step is not None:
            for i, row, token in zip(active, rows, tokens, strict=True):
                if token < 0:
                    continue
                chunks[i].request.origins.append(_origin(chunks, i, depth, diagnosed_step, token, logits[row]))
        depth += 1
        active = [
            i for i, sequence, token in zip(active, sequences, tokens, strict=True)
            if sequence.finish_reason is None and depth <= chunks[i].num_drafts and chunks[i].token_ids[depth] == token
        ]  # fmt: skip
        for i in active:
            num_kept[i] += 1
    return num_kept


def _choose(logits: Tensor, rows: Sequence[int], sequences: Sequence[GeneratedSequence]) -> list[int]:
    """Choose the next token of some rows and hand it to their sequences."""
    logits_AV = logits[torch.tensor(rows, device=logits.device)]
    tokens: list[int] = choose_tokens(logits_AV, [sequence.sampler for sequence in sequences]).tolist()
    wanted = [i for i, s in enumerate(sequences) if s.params.logprobs is not None and tokens[i] >= 0]
    logprobs: dict[int, TokenLogprob] = {}
    if wanted:
        tops = [sequences[i].params.logprobs or 0 for i in wanted]
        picked = logits_AV[torch.tensor(wanted, device=logits.device)]
        logprobs = dict(zip(wanted, token_logprobs(picked, [tokens[i] for i in wanted], tops), strict=True))
    for i, sequence in enumerate(sequences):
        sequence.accept(tokens[i], logprobs.get(i))
    return tokens


def _choose_together(logits: Tensor, rows: Sequence[int], sequences: Sequence[GeneratedSequence]) -> list[int] | None:
    """Choose as ``_choose``; None where one row's grammar failed, which is before any row was handed a token."""
    try:
        return _choose(logits, rows, sequences)
    except RequestError:
        return None


def _choose_alone(logits: Tensor, row: int, sequence: GeneratedSequence) -> int:
    """Choose the next token of one row; what fails there ends its sequence alone, and -1 comes back."""
    try:
        return _choose(logits, [row], [sequence])[0]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
        sequence.fail(f"got {type(error).__name__} while its next token was chosen: {error}; need none; report it")
        return -1


def _origin(
    chunks: Sequence[Chunk], index: int, depth: int, step: int, token: int, logits_V: Tensor
) -> TokenOrigin:  # fmt: skip
    chunk = chunks[index]
    values, ids = logits_V.float().topk(2)
    return TokenOrigin(
        token_id=token, position=chunk.start + len(chunk.token_ids) - chunk.num_drafts + depth, step=step,
        producer="prefill" if chunk.kind == "prefill" else "verify" if depth else "decode", slot=chunk.request.slot,
        num_rows=len(chunks), num_tokens=sum(len(each.token_ids) for each in chunks),
        best=((int(ids[0]), float(values[0])), (int(ids[1]), float(values[1]))),
    )  # fmt: skip


def _note_prompt(chunk: Chunk, logits_TV: Tensor) -> None:
    """Write the log-probabilities of the prompt's tokens that follow a chunk's."""
    sequence = chunk.request.sequence
    following = sequence.prompt_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
    entries = list(sequence.prompt_logprobs or [None] * len(sequence.prompt_ids))
    for i, token in enumerate(following):  # one by one: a row's bits, whatever the chunk
        entries[chunk.start + 1 + i : chunk.start + 2 + i] = token_logprobs(
            logits_TV[i : i + 1], [token], [sequence.params.prompt_logprobs or 0]
        )
    sequence.prompt_logprobs = entries
