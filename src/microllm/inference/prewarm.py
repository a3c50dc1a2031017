"""What was made ready before anybody waits: shapes of steps, captured and compiled, with their time and bytes.

Place: runners fill it, ``Engine.prewarm`` returns it, a server logs it before it lets the first request in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmedShape:
    """One shape of step: what for ("decode", "greedy", "sampled" or "prompt"), its rows and tokens a row.

    Units:   ``num_bytes`` are its own buffers, held as long as the engine
    """

    kind: str
    num_rows: int
    width: int
    ms: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PrewarmReport:
    """The shapes that a call made ready; none of those that were before."""

    shapes: tuple[WarmedShape, ...]

    @property
    def ms(self) -> float:
        """Return the time of all."""
        return sum(shape.ms for shape in self.shapes)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all."""
        return sum(shape.num_bytes for shape in self.shapes)
