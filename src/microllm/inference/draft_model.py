"""Guess with a smaller model: what it finds likeliest, token by token.

Place: a ``Proposer`` for ``sampling.draft``, one for a request that runs. Its cache is its own, one dense row outside
the pool of pages, and holds its guesses too: those that were not taken are cut off before it goes on. One that has
raised is of no more use: its cache and its notes may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microllm import ops
from microllm.inference.generator import Model, prefill


class ModelProposer:
    """The likeliest continuation in the eyes of a draft model; nothing where the text passes ``capacity`` tokens."""

    def __init__(self, model: Model, capacity: int) -> None:
        self._model = model
        self._capacity = min(capacity, model.config.max_position_embeddings)
        self._cache = model.new_cache(1, self._capacity)
        self._cached: list[int] = []
        self._num_sure = 0  # cached tokens that were the text's own, not guesses

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its cache."""
        return self._cache.num_bytes

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` tokens."""
        if len(tokens) + most - 1 > self._capacity:
            return []
        kept = self._num_sure
        while kept < min(len(self._cached), len(tokens) - 1) and self._cached[kept] == tokens[kept]:
            kept += 1
        rejected = len(self._cached) - kept
        if rejected:
            self._cache.advance(-rejected, -rejected)
        proposed: list[int] = []
        feed = list(tokens[kept:])
        while len(proposed) < most:
            token = self._next(feed)
            if token < 0:
                break
            proposed.append(token)
            feed = [token]
        self._cached = [*tokens, *proposed[: most - 1]]
        self._num_sure = len(tokens) - 1  # the last is run again: its logits are needed
        return proposed

    def _next(self, feed: list[int]) -> int:
        """Run the text's next tokens and return the likeliest one after them; -1 where logits are not finite."""
        if len(feed) > 1:
            logits_1V, _ = prefill(self._model, [feed], self._cache)
        else:
            ids_11 = torch.tensor([feed], device=self._cache.keys.device)
            logits_1V = self._model(ids_11, cache=self._cache, last_only=True)[:, 0]
        return int(ops.argmax(logits_1V.float())[0])
