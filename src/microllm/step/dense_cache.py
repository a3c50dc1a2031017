"""A dense key-value cache: one buffer a layer, slot index = position, a length for each row.

Place: the reference path of generation. The paged cache must give what this one gives. Knows no model.

Axes:    B = rows, C = capacity in tokens, G = KV heads, D = head dim, T = new tokens, S = filled slots
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from microllm import ops
from microllm.config import ModelConfig
from microllm.errors import RequestError, UnavailableError


class DenseCache:
    """Keys and values of ``num_rows`` sequences, each with its own length.

    Rows may advance by different counts: a padded row writes past its own length, where no query looks before a
    later token overwrites it.

    Units:   ``capacity`` in tokens a row; ``num_bytes`` in bytes allocated
    """

    def __init__(
        self, config: ModelConfig, num_rows: int, capacity: int, *,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if num_rows < 1 or capacity < 1:
            raise RequestError(f"got {num_rows} rows, capacity {capacity}; need both at least 1")
        shape = (config.num_hidden_layers, num_rows, config.num_key_value_heads, capacity, config.head_dim)
        try:  # a head's tokens lie together, which is the order that attention reads them in
            self._all_keys = self.keys = torch.zeros(shape, dtype=dtype, device=device).transpose(2, 3)
            self._all_values = self.values = torch.zeros(shape, dtype=dtype, device=device).transpose(2, 3)
        except RuntimeError as error:  # torch's own out-of-memory error is one of them
            num_bytes = 2 * math.prod(shape) * dtype.itemsize
            raise UnavailableError(
                f"got no memory on {device} for a cache of {num_bytes:,} bytes ({num_rows} rows of {capacity} tokens); "
                "need that much free; lower max_tokens, n or the number of prompts"
            ) from error
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_rows, self.capacity = num_rows, capacity
        self._filled = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of both buffers: 2 * layers * rows * capacity * KV heads * head dim * itemsize."""
        return 2 * self._all_keys.numel() * self._all_keys.element_size()

    @property
    def num_filled(self) -> int:
        """Return the tokens of the longest row."""
        return self._filled

    def reserve(self, num_tokens: int) -> Tensor:
        """Return the positions of each row's next ``num_tokens`` tokens.

        Shapes:  -> [B, T] int64
        Raises:
            RequestError: the longest row would pass the capacity; nothing has been written.
        """
        self.check_room(num_tokens)
        return self.lengths[:, None] + torch.arange(num_tokens, device=self.lengths.device)

    def check_room(self, num_tokens: int) -> None:
        """Raise RequestError if the longest row would pass the capacity with so many new tokens."""
        if self._filled + num_tokens > self.capacity:
            raise RequestError(
                f"got {self._filled} cached tokens and {num_tokens} new ones; need at most {self.capacity}; "
                "make the cache larger or the request shorter"
            )

    def store(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, and return views of all slots that a query may see.

        Shapes:  k, v [B, T, G, D], positions [B, T] as ``reserve`` gave them -> two views [B, S, G, D]
        """
        filled = self._filled + positions.shape[1]
        keys = ops.kv_store(self.keys[layer], k, positions)
        values = ops.kv_store(self.values[layer], v, positions)
        return keys[:, :filled], values[:, :filled]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values of the only row behind its last ones, and return all of them.

        As ``store``, by slices instead of positions: nothing is looked up.

        Shapes:  k, v [T, G, D] -> two views [S, G, D]
        """
        filled = self._filled + len(k)
        for buffer, new in ((self.keys, k), (self.values, v)):
            buffer[layer, 0, self._filled : filled] = new
        return self.keys[layer, 0, :filled], self.values[layer, 0, :filled]

    def advance(self, num_tokens: Tensor | int, longest: int) -> None:
        """Count ``num_tokens`` new tokens a row ([B] or one number); ``longest`` is the largest of them."""
        self.lengths += num_tokens
        self._filled += longest

    def take(self, rows: Sequence[int]) -> None:
        """Let row i hold what row ``rows[i]`` held: rows may be copied, moved and left out.

        The buffers stay, so there may be at most as many rows as the cache was made with; only rows that move are
        copied.
        """
        assert 0 < len(rows) <= self._all_keys.shape[1], "more rows than the cache was made with"
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new, old = (torch.tensor(side, device=self.lengths.device) for side in zip(*moved, strict=True))
            for buffer in (self._all_keys, self._all_values):
                buffer[:, new, : self._filled] = buffer[:, old, : self._filled]
        self.keys, self.values = self._all_keys[:, : len(rows)], self._all_values[:, : len(rows)]
        self.lengths = self.lengths[torch.tensor(rows, device=self.lengths.device)]
        self.num_rows, self._filled = len(rows), int(self.lengths.max())

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.lengths.zero_()
        self._filled = 0
