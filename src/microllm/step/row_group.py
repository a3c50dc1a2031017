"""Rows of one width that a step runs together: their tokens, positions and page tables' slots, on the device.

Place: the runner fills one a step for the rows that decode, and one for each chunk of a prompt. A group keeps its
buffers, so that a captured step finds them where they were; rows that are not needed idle at position -1.

Axes:    A = rows, T = tokens a row
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Row = tuple[int, int, Sequence[int]]
"""A row's slot, the position of its first token, and its tokens."""


def bucket(num_rows: int) -> int:
    """Return how many rows a group has for ``num_rows`` of them: 1, 2, 4, or a multiple of 8."""
    return num_rows if num_rows <= 2 else 4 if num_rows <= 4 else -(-num_rows // 8) * 8


class RowGroup:
    """Buffers of one shape, filled anew each step in one copy; ``decodes`` or holds a prompt's chunk.

    Shapes:  ``token_ids`` and ``positions`` [A, T] int64, ``slots`` [A] int64
    """

    def __init__(self, num_rows: int, width: int, *, decodes: bool, device: torch.device | str = "cpu") -> None:
        self.num_rows, self.width, self.decodes = num_rows, width, decodes
        size, on_gpu = num_rows * width, torch.device(device).type == "cuda"
        self._host = torch.zeros(2 * size + num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._device = self._host.to(device)
        self.token_ids = self._device[:size].view(num_rows, width)
        self.positions = self._device[size : 2 * size].view(num_rows, width)
        self.slots = self._device[2 * size :]

    def fill(self, rows: Sequence[Row]) -> None:
        """Take the rows of the next step; those after them, and tokens after a row's own, idle."""
        idle_rows, width = self.num_rows - len(rows), self.width
        words: list[int] = []
        for _, _, ids in rows:
            words += [*ids, *[0] * (width - len(ids))]
        words += [0] * (idle_rows * width)
        for _, start, ids in rows:
            words += [*range(start, start + len(ids)), *[-1] * (width - len(ids))]
        words += [-1] * (idle_rows * width)
        words += [*(slot for slot, _, _ in rows), *[0] * idle_rows]
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the host's side: not every step waits for its own
        self._host.copy_(torch.tensor(words))
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))
