"""The plain generation loop: prefill a batch in chunks, then one step at a time over the rows that still run.

Place: between ``llm.py`` and the model; the oracle of every faster loop. Rows need not be of one length and end on
their own: an ended row's place is taken by the last one. Does not schedule, and knows no files or HTTP.

Memory: a chunk of the prompt is as long as fits in ``MAX_CHUNK_BYTES`` of fp32 attention scores [rows, H, chunk, S],
feed-forward activations and, where the prompt's own logits are asked for, logits [rows, chunk, V]. A row of the cache
is as long as the longest prompt with its new tokens.

Axes:    P = prompts, B = rows, T = tokens of a chunk, S = tokens so far, A = active rows, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from microllm.inference.plan import Plan
from microllm.inference.sequence import GeneratedSequence
from microllm.model import Transformer
from microllm.sampling import TokenLogprob, choose_tokens, token_logprobs
from microllm.step import DenseCache

Model = Transformer | Plan
MAX_CHUNK_TOKENS = 512
MAX_CHUNK_BYTES = 256 << 20


def generate_tokens(model: Model, sequences: Sequence[GeneratedSequence]) -> Generator[None]:
    """Run all sequences to their ends as one batch, pausing after each step.

    Sequences of one prompt share its prefill. Stopping early ends those that still run as "cancelled".
    """
    active = list(sequences)
    try:
        logits_AV, cache = _prefill_all(model, active)
        while True:
            token_ids = _choose(logits_AV, active)
            yield
            running = [i for i, sequence in enumerate(active) if sequence.finish_reason is None]
            if not running:
                return
            if len(running) < len(active):
                rows = _filled_gaps(running)
                cache.take(rows)
                active, token_ids = [active[i] for i in rows], [token_ids[i] for i in rows]
            logits_AV = _step(model, cache, token_ids, takes_top=all(s.sampler.takes_top for s in active))
    finally:
        for sequence in sequences:
            sequence.finish("cancelled")


@torch.inference_mode()
def prefill(
    model: Model, prompts: Sequence[Sequence[int]], cache: DenseCache, num_top: int | None = None
) -> tuple[Tensor, list[list[TokenLogprob | None]]]:
    """Run prompts of any lengths through the model, chunk by chunk, into the cache.

    With ``num_top``, the log-probability of each prompt's tokens comes back as well, None for the first.

    Shapes:  -> logits [P, V] of each prompt's last token, and P lists
    """
    device, longest = cache.keys.device, max(len(prompt) for prompt in prompts)
    ids_PS = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
    lengths_P = torch.tensor([len(p) for p in prompts], device=device)
    size = chunk_tokens(model, len(prompts), longest, keeps_logits=num_top is not None)
    last_PV: Tensor | None = None
    logprobs: list[list[TokenLogprob | None]] = [[None] for _ in prompts]
    for start in range(0, longest, size):
        ids_PT = ids_PS[:, start : start + size]
        num_tokens_P = (lengths_P - start).clamp(0, ids_PT.shape[1])
        logits = model(ids_PT, cache=cache, num_tokens_B=num_tokens_P, last_only=num_top is None)
        last_P = (num_tokens_P - 1).clamp(min=0) if num_top is not None else torch.zeros_like(num_tokens_P)
        chunk_PV = logits[torch.arange(len(prompts), device=device), last_P]
        ends_here = (num_tokens_P > 0)[:, None]
        last_PV = chunk_PV if last_PV is None else torch.where(ends_here, chunk_PV, last_PV)
        if num_top is not None:
            for row, prompt in enumerate(prompts):
                following = prompt[start + 1 : start + size + 1]
                if following:
                    tops = [num_top] * len(following)
                    logprobs[row] += token_logprobs(logits[row, : len(following)], following, tops)
    assert last_PV is not None, "a prompt has at least one token"
    return last_PV, logprobs


def chunk_tokens(model: Model, num_rows: int, longest: int, *, keeps_logits: bool) -> int:
    """Return how many tokens of each row go through the model at once."""
    config = model.config
    width = config.num_attention_heads * longest + 3 * config.intermediate_size
    width += 2 * config.vocab_size if keeps_logits else 0
    return max(1, min(MAX_CHUNK_TOKENS, MAX_CHUNK_BYTES // (4 * num_rows * width)))


def _prefill_all(model: Model, sequences: Sequence[GeneratedSequence]) -> tuple[Tensor, DenseCache]:
    """Prefill each different prompt once, and give every sequence a row of its own."""
    for sequence in sequences:
        sequence.start()
    prompts = list(dict.fromkeys(sequence.prompt_ids for sequence in sequences))
    row_of = {prompt: row for row, prompt in enumerate(prompts)}
    cache = model.new_cache(len(sequences), max(len(s.prompt_ids) + s.max_new_tokens for s in sequences))
    cache.take(range(len(prompts)))
    wanted = [s.params.prompt_logprobs for s in sequences if s.params.prompt_logprobs is not None]
    logits_PV, logprobs = prefill(model, prompts, cache, max(wanted, default=None))
    rows = [row_of[sequence.prompt_ids] for sequence in sequences]
    cache.take(rows)
    for row, sequence in zip(rows, sequences, strict=True):
        num_top = sequence.params.prompt_logprobs
        if num_top is not None:
            sequence.prompt_logprobs = [entry and replace(entry, top=entry.top[:num_top]) for entry in logprobs[row]]
    return logits_PV[torch.tensor(rows, device=logits_PV.device)], cache


@torch.inference_mode()
def _choose(logits_AV: Tensor, active: Sequence[GeneratedSequence]) -> list[int]:
    """Choose each row's next token and hand it to its sequence."""
    token_ids: list[int] = choose_tokens(logits_AV, [sequence.sampler for sequence in active]).tolist()
    wanted = [
        row for row, sequence in enumerate(active)
        if sequence.params.logprobs is not None and token_ids[row] >= 0
    ]  # fmt: skip
    logprobs: dict[int, TokenLogprob] = {}
    if wanted:
        tops = [active[row].params.logprobs or 0 for row in wanted]
        rows = torch.tensor(wanted, device=logits_AV.device)
        found = token_logprobs(logits_AV[rows], [token_ids[row] for row in wanted], tops)
        logprobs = dict(zip(wanted, found, strict=True))
    for row, sequence in enumerate(active):
        sequence.accept(token_ids[row], logprobs.get(row))
    return token_ids


@torch.inference_mode()
def _step(model: Model, cache: DenseCache, token_ids: Sequence[int], *, takes_top: bool) -> Tensor:
    """Run one token of each row; return the next logits, [A, V]; of each row the largest alone with ``takes_top``."""
    ids_A1 = torch.tensor(token_ids, device=cache.keys.device)[:, None]
    if takes_top and isinstance(model, Plan):
        return model(ids_A1, cache=cache, last_only=True, top_only=True)[:, 0]
    return model(ids_A1, cache=cache, last_only=True)[:, 0]


def _filled_gaps(running: Sequence[int]) -> list[int]:
    """Return which old row each new row is: those that run keep their place, the last ones fill the gaps."""
    stay = set(running)
    last = [row for row in running if row >= len(running)]
    return [row if row in stay else last.pop() for row in range(len(running))]
