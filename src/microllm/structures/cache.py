"""The loop's cache: keys and values of every block at fixed places, so that a captured step reads and writes them.

Place: the loop hands it to a host's blocks in place of the host's own. Speaks the language of ``transformers``' caches
(``update``) and of this project's (``store``). A row has its own positions; a slot's index is its position.

Axes:    B = rows, S = slots, T = tokens of a call, G = KV heads, K = head dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microllm.errors import RequestError
from microllm.structures.block import PAGE_TOKENS, Pages, pages_of


class LoopCache:
    """Keys and values of ``num_rows`` sequences, ``capacity`` slots each (rounded up to whole pages).

    ``tables``: cosines and sines by position, where a host has them; a block that runs as a chain reads them.
    Between ``begin_prompt`` or ``begin_tokens`` and the end of a pass, ``positions`` and ``mask`` are that pass's.
    """

    def __init__(
        self, num_layers: int, num_rows: int, capacity: int, heads: tuple[int, int], *, like: Tensor
    ) -> None:  # fmt: skip
        if num_rows < 1 or capacity < 1:
            raise RequestError(f"got {num_rows} rows of {capacity} tokens; need at least 1 of each")
        self.num_rows, self.capacity = num_rows, -(-capacity // PAGE_TOKENS) * PAGE_TOKENS
        shape = (num_rows, self.capacity, *heads)
        self.keys = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers)]
        self._slots = torch.arange(self.capacity, device=like.device)
        self._rows = torch.arange(num_rows, device=like.device)[:, None]
        self.positions: Tensor = torch.zeros(num_rows, 1, dtype=torch.int64, device=like.device)
        self.mask: Tensor | None = None
        self.tables: tuple[Tensor, Tensor] | None = None
        self.decoding = False
        self._seen = self.capacity

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def pages(self) -> Pages:
        """Return how its slots lie as pages."""
        return pages_of(self.num_rows, self.capacity, self._slots.device)

    def begin_prompt(self, positions_BT: Tensor) -> None:
        """Begin a pass whose tokens stand at 0, 1, ... of every row: they see each other, and nothing before."""
        self.positions, self.mask, self.decoding = positions_BT, None, False

    def begin_tokens(self, positions_BT: Tensor, seen: int | None = None) -> None:
        """Begin a pass of tokens behind what the cache holds; ``seen``: slots that any may see (default: all)."""
        self._seen = self.capacity if seen is None else seen
        self.positions, self.decoding = positions_BT, True
        self.mask = (self._slots[: self._seen] <= positions_BT[:, :, None])[:, None]

    def write(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> None:
        """Write a pass's keys and values to its positions."""
        for cached, new in ((self.keys[layer], k_BTGK), (self.values[layer], v_BTGK)):
            if self.decoding:
                cached[self._rows, self.positions] = new.to(cached.dtype)
            else:
                cached[:, : new.shape[1]] = new

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Write keys and values [B, G, T, K], and return those that the pass may see: [B, G, S, K]."""
        self.write(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
        if not self.decoding:
            return key_states, value_states
        keys, values = self.keys[layer_idx][:, : self._seen], self.values[layer_idx][:, : self._seen]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def store(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, T, G, K], and return those that the pass may see: [B, S, G, K]."""
        self.write(layer, k, v)
        if not self.decoding:
            return k, v
        return self.keys[layer][:, : self._seen], self.values[layer][:, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the slots that a pass may see, for hosts that ask."""
        return self._seen if self.decoding else 0
