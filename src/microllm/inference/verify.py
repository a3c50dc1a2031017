"""From a step's logits to tokens: the next one of each row, and as many of its draft tokens as the model chose itself.

Place: between the runner and the scheduler. A sampled row is verified like a greedy one: its draw at a position depends
on seed, choice and position alone, so that a draft token is kept exactly where plain decoding would have drawn it.

Axes:    A = rows, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from microllm.inference.scheduler import Chunk
from microllm.inference.sequence import GeneratedSequence
from microllm.sampling import TokenLogprob, choose_tokens, token_logprobs


@torch.inference_mode()
def accept_tokens(chunks: Sequence[Chunk], logits: Tensor, firsts: Sequence[int], *, row_by_row: bool) -> list[int]:
    """Hand each chunk's request its next tokens; return how many of the chunk's own tokens turned out to be right.

    ``firsts``: the row of ``logits`` where each chunk's begin. ``row_by_row``: each row goes through the sampler alone,
    where its bits may not know the batch: torch's vectorised functions round the end of a tensor differently.
    """
    num_kept = [len(chunk.token_ids) - chunk.num_drafts for chunk in chunks]
    for chunk, first in zip(chunks, firsts, strict=True):
        if chunk.kind == "prefill" and chunk.request.sequence.params.prompt_logprobs is not None:
            _note_prompt(chunk, logits[first : first + chunk.num_logits])
    active, depth = [i for i, chunk in enumerate(chunks) if chunk.reaches_end], 0
    while active:
        rows = [firsts[i] + chunks[i].num_logits - 1 - chunks[i].num_drafts + depth for i in active]
        sequences = [chunks[i].request.sequence for i in active]
        if row_by_row:
            tokens = [_choose(logits, [row], [s])[0] for row, s in zip(rows, sequences, strict=True)]
        else:
            tokens = _choose(logits, rows, sequences)
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
