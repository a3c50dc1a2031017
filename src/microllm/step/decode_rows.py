"""Rows that decode by themselves: what a step needs to feed the next one, on the device, and the tokens it leaves.

Place: a captured decode step reads these buffers and moves them on (``ops.advance_rows``); the host fills them when
the rows change, and reads the tokens late. Knows no requests.

Axes:    A = rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microllm.step.row_group import RowGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """A row's next token and where it goes, up to which position it may run, and how its tokens are chosen."""

    slot: int
    position: int
    token_id: int
    last: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0


class DecodeRows:
    """Buffers of A rows and of the tokens of up to ``num_steps`` steps; idle rows are at position -1.

    Shapes:  ``group`` [A, 1]; ``last``, ``top_k``, ``seed``, ``choice`` [A] int64; ``temperature``, ``top_p``,
             ``min_p`` [A] fp32; ``history`` [num_steps, A] and ``step`` [] int64
    """

    def __init__(self, num_rows: int, num_steps: int, device: torch.device | str = "cpu") -> None:
        self.num_rows = num_rows
        self.group = RowGroup(num_rows, 1, decodes=True, device=device)
        self._on_gpu = torch.device(device).type == "cuda"
        self._whole = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        self.last, self.top_k, self.seed, self.choice = self._whole
        self._real = torch.zeros(3, num_rows, device=device)
        self.temperature, self.top_p, self.min_p = self._real
        self.history = torch.zeros(num_steps, num_rows, dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        """Take the rows that run from the next step on; those after them idle."""
        self.group.fill([(row.slot, row.position, [row.token_id]) for row in rows])
        idle = self.num_rows - len(rows)
        whole = [[row.last, row.top_k, row.seed, row.choice] for row in rows] + [[0, 0, 0, 0]] * idle
        real = [[row.temperature, row.top_p, row.min_p] for row in rows] + [[0.0, 1.0, 0.0]] * idle
        self._whole.copy_(torch.tensor(whole).T)
        self._real.copy_(torch.tensor(real).T)

    def idle(self, rows: Sequence[int]) -> None:
        """Let some rows run no further, from the next step on."""
        positions = self.group.positions.view(-1)
        positions.index_fill_(0, torch.tensor(rows, device=positions.device), -1)

    def rewind(self) -> None:
        """Let the next step write the history's first line."""
        self.step.zero_()

    def read(self) -> TokenReader:
        """Begin to copy the history to the host, and return what waits for it."""
        return TokenReader(self.history, on_gpu=self._on_gpu)


class TokenReader:
    """A history on its way to the host."""

    def __init__(self, history: Tensor, *, on_gpu: bool) -> None:
        self._host = torch.empty(history.shape, dtype=history.dtype, pin_memory=on_gpu)
        self._host.copy_(history, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    def tokens(self) -> list[list[int]]:
        """Wait, and return each step's tokens; -2 (``ops.advance.IDLE``) of a row that did not run."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
