"""What ``microllm tune`` is asked for, and whether this machine can do it; brings no triton.

Place: read by ``cli/tune`` for its options, checked before anything is run.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from microllm.errors import ConfigError, MissingExtraError, UnavailableError
from microllm.evidence.environment import read_device_name
from microllm.ops.contract import Contract, Sizes, cases

LINEARS = (
    "linear", "linear_residual", "norm_linear", "norm_linear_swiglu", "linear_int8", "linear_fp8", "linear_int4",
)  # fmt: skip
ATTENTION = "attention_decode"
TUNABLE = (*LINEARS, ATTENTION)
FORMS = ("fma", "mma", "tile")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is tuned, from which candidates, and how long each is timed.

    Units:   ``round_s`` in seconds; ``rotate_mib`` the operands that a round goes through
    """

    device: str = "cuda"
    """cuda or cuda:N. With TRITON_INTERPRET=1 also cpu, to try the command: its times mean nothing."""
    op: tuple[str, ...] = ("linear",)
    """Operators: linear, linear_residual, norm_linear, norm_linear_swiglu, linear_int8, linear_fp8, linear_int4,
    attention_decode (its split of keys)."""
    what: Literal["rows", "order"] = "rows"
    """rows: for each number of rows a linear's form and blocks, which mode B never takes. order: what fixes the bits of
    its sums in mode B, one choice for all --rows: WARPS_K, KB, SUMS."""
    model: tuple[str, ...] = ()
    """Presets whose decoding shapes are tuned; none, and no --shape: qwen2.5-0.5b."""
    shape: tuple[str, ...] = ()
    """Shapes in the operator's letters: "M8 K896 N4864" (norm_linear_swiglu: M K F; int8, fp8: M K N U; int4: M J N U
    with K = 2 J), "A8 H14 G2 D64 S16 N256" for attention. --rows is not asked then."""
    rows: tuple[int, ...] = (1, 8, 32)
    """Rows of a decoding step, for the shapes of --model."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Activations (and plain weights)."""
    candidate: tuple[str, ...] = ()
    """Candidates as JSON, what is left out as it stands: '{"form": "tile", "BLOCK_N": 128, "STAGES": 3}',
    '{"split": 128}', '{"WARPS_K": 8}'. None: the tuner's own, each block a step from where it stands."""
    most: int = 40
    """Most candidates of one entry."""
    climbs: int = 2
    """How often the search goes on from the best candidate so far."""
    finalists: int = 2
    """Best candidates that are timed again, longer, before one may win."""
    round_s: float = 0.15
    """Length of a round of that second timing; the first one takes 20 ms."""
    rotate_mib: int = 256
    """Operands to rotate through, more than the caches hold."""
    quick: bool = False
    """Screen only: nothing wins."""
    accept: bool = False
    """Write the winners to the table that the kernels read (ops/tuned.json of this installation)."""
    out: Path = Path("tune.json")
    """The report: every candidate, rejected ones too, written again after each entry."""

    def check(self) -> None:
        """Raise unless the options make sense and this machine can run kernels.

        Raises:
            ConfigError, MissingExtraError, UnavailableError: what is wrong, and what to do.
        """
        if unknown := [op for op in self.op if op not in TUNABLE] or ([""] if not self.op else []):
            raise ConfigError(f"got operator {unknown[0]!r}; need one of {', '.join(TUNABLE)}: others have no choice")
        numbers = {
            "most": self.most,
            "finalists": self.finalists,
            "rotate_mib": self.rotate_mib,
            "round_s": self.round_s,
        }
        if wrong := [f"{name} {size}" for name, size in numbers.items() if not size > 0]:
            raise ConfigError(f"got {wrong[0]}; need a number above 0")
        if self.climbs < 0 or not self.rows or min(self.rows) < 1:
            raise ConfigError(f"got climbs {self.climbs} and rows {self.rows}; need climbs from 0 and rows from 1")
        if self.what == "order" and ATTENTION in self.op:
            raise ConfigError(
                f"got --what order for {ATTENTION}; need linears: its order follows from the split of keys"
            )
        if self.accept and self.quick:
            raise ConfigError("got --accept with --quick, which decides nothing; leave one of them out")
        if find_spec("triton") is None:
            raise MissingExtraError("triton", "gpu", "tuning kernels")
        read_device_name(self.device)  # raises for one that is not there
        kind, interpreted = torch.device(self.device).type, os.environ.get("TRITON_INTERPRET") == "1"
        if kind != "cuda" and not interpreted:
            raise UnavailableError(
                f"got device {self.device!r}; need cuda, or, to try the command, TRITON_INTERPRET=1 before it starts"
            )
        if kind != "cuda" and self.accept:
            raise ConfigError("got --accept on a CPU; need a GPU: an interpreter's times say nothing of a kernel's")


def parse_candidate(text: str) -> dict[str, int]:
    """Return a candidate from JSON, its form as a number.

    Raises:
        ConfigError: it is no object of whole numbers, or it is empty.
    """
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"got candidate {text!r}: {error}; need JSON, as in " + "'{\"split\": 128}'") from error
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"got candidate {text!r}; need an object with at least one option")
    if isinstance(found.get("form"), str):
        if found["form"] not in FORMS:
            raise ConfigError(f"got form {found['form']!r}; need one of {', '.join(FORMS)}")
        found["form"] = FORMS.index(found["form"])
    if wrong := [name for name, size in found.items() if type(size) is not int]:
        raise ConfigError(f"got candidate {text!r}; need a whole number for {wrong[0]}")
    return found


def parse_shape(text: str, row: Contract) -> Sizes:
    """Return a call's sizes from letters and numbers, M standing for any leading axes.

    Raises:
        ConfigError: they are not the operator's letters, or a call of these sizes is not one that it takes.
    """
    words = text.split()
    clean = all(word[:1].isalpha() and word[1:].isdecimal() and word.isascii() for word in words)
    given = dict(cases(text)[0]) if clean else {}
    lead = row.args[0].forms[0][0][0] == "..."
    filled = {"U": 1} if row.name in ("linear_int8", "linear_fp8") else {"T": 1} if row.name == ATTENTION else {}
    letters = sorted({letter for arg in row.args if arg.draw for letter, _ in arg.forms[0]} - {"P"})
    letters = ["M" if letter == "..." else letter for letter in letters]  # M, or any leading axes
    sizes = {**filled, **given}
    if len(words) != len(given) or sorted(sizes) != sorted(letters) or min(sizes.values(), default=0) < 1:
        raise ConfigError(
            f"got shape {text!r} for {row.name}; need {' '.join(letters)}, each with a number from 1, as in "
            f"{' '.join(f'{letter}64' for letter in letters)!r}"
        )
    if lead:
        sizes["..."] = (sizes.pop("M"),)
    if row.name == ATTENTION:
        sizes["P"] = sizes["A"] * sizes["N"]
    return sizes
