"""What an engine may be told: one frozen object, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microllm.errors import ConfigError

MAX_DRAFT = 7
"""Draft tokens a row: with the row's own token, the 8 queries that decoding attention takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine schedules requests and where it keeps their keys and values.

    Args:
        scheduler: "continuous" runs many requests at once and lets them share prefixes; "serial" one after the other.
        max_rows: Requests that run at once.
        max_step_tokens: Tokens of a step: a decoding row's own and its guesses first, then chunks of prompts; None is
            512, or two a row where that is more, and the guesses.
        max_context: Longest prompt and answer together; None is the model's own limit.
        page_tokens: Tokens a page, a power of two.
        kv_dtype: What keys and values are stored as: auto (the model's dtype), fp32, bf16, fp16 or fp8; or one a layer.
        kv_bytes: Most bytes of the KV cache; None takes what ``max_rows`` can need, within a share of free memory.
        prefix_cache: Let a prompt use the pages of an earlier one that began alike.
        deterministic: Give a request the same bits whatever runs beside it; None does so on a CPU.
        speculate: Tokens that a row may guess ahead from its own text, 0 to 7; they change no token.
        steps: What runs a step: "auto" (captured on a GPU, plain on a CPU), "uncaptured" (the GPU's fused pass, called
            and not captured, on any device: for looking into it) or "plain" (operator by operator).
        diagnose: Keep a record of each token: where it was made, and the two likeliest ids.

    Raises:
        ConfigError: a value out of its range, or a step too small for its rows.
    """

    scheduler: Literal["continuous", "serial"] = "continuous"
    max_rows: int = 64
    max_step_tokens: int | None = None
    max_context: int | None = None
    page_tokens: int = 16
    kv_dtype: str | tuple[str, ...] = "auto"
    kv_bytes: int | None = None
    prefix_cache: bool = True
    deterministic: bool | None = None
    speculate: int = 0
    steps: Literal["auto", "uncaptured", "plain"] = "auto"
    diagnose: bool = False

    def __post_init__(self) -> None:
        if self.scheduler not in ("continuous", "serial"):
            raise ConfigError(f"got scheduler {self.scheduler!r}; need continuous or serial")
        if self.steps not in ("auto", "uncaptured", "plain"):
            raise ConfigError(f"got steps {self.steps!r}; need auto, uncaptured or plain")
        for name, least, most in (
            ("max_rows", 1, 4096), ("max_step_tokens", 2, 2**20), ("max_context", 2, 2**31), ("kv_bytes", 1, 2**63),
            ("page_tokens", 1, 256), ("speculate", 0, MAX_DRAFT),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (type(value) is int and least <= value <= most):
                raise ConfigError(f"got {name}={value!r}; need a whole number from {least} to {most}")
        if self.page_tokens & (self.page_tokens - 1):
            raise ConfigError(f"got page_tokens={self.page_tokens}; need a power of two")
        if self.min_chunk < 1:
            raise ConfigError(
                f"got max_step_tokens={self.max_step_tokens}; need more than {self.num_rows * (1 + self.speculate)}, "
                "the rows that decode with their draft tokens, so that a prompt goes on in every step"
            )

    @property
    def num_rows(self) -> int:
        """Return how many requests run at once."""
        return 1 if self.scheduler == "serial" else self.max_rows

    @property
    def step_tokens(self) -> int:
        """Return the most tokens of a step."""
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        return max(512, 2 * self.num_rows) + self.num_rows * self.speculate

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prompts may use pages of earlier ones."""
        return self.prefix_cache and self.scheduler != "serial"

    @property
    def min_chunk(self) -> int:
        """Return the fewest prompt tokens that a step has room for, whatever decodes."""
        return self.step_tokens - self.num_rows * (1 + self.speculate)
