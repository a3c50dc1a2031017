"""The contract of an operator, as data: what it takes, what it refuses, how exact it is, what it costs.

Place: every file in ``ops/`` holds one operator, its plain-torch reference and its ``CONTRACT``; one test
drives all rows. Does not choose implementations and knows no model.

Axes are letters ("BTHD"); a row's ``sizes`` give each letter a number, so that examples, bytes and FLOPs
follow from the same few words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from microllm.errors import OperatorError

Sizes = Mapping[str, int]
Draw = Callable[[tuple[int, ...], Sizes, torch.dtype, torch.Generator], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted |a - r| as atol + rtol * |r|, r in fp32 or better."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Arg:
    """One tensor argument: its name, its axes as letters, and how an example is drawn."""

    name: str
    axes: str
    draw: Draw
    is_float: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """One kind of input the operator refuses: the reason, and a change that makes a good call bad."""

    reason: str
    change: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What an operator promises, in a form that a test can drive.

    Units:   ``num_bytes`` in bytes read once and written once; ``num_flops`` in multiply-adds counted as two
    Numbers: ``oracle`` is the formula in plain torch on fp64 copies of the inputs
    """

    name: str
    call: Callable[..., Any]
    oracle: Callable[..., Any]
    args: tuple[Arg, ...]
    sizes: tuple[Sizes, ...]
    refusals: tuple[Refusal, ...]
    forward: Mapping[torch.dtype, Tolerance]
    backward: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    num_bytes: Callable[[Sizes, int], int]
    num_flops: Callable[[Sizes], int]
    levels: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"cpu": ("reference",), "cuda": ("reference",)}
    )
    exact: bool = False

    def example(self, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
        """Return one valid call's keyword arguments, drawn on the CPU from ``seed``."""
        generator = torch.Generator().manual_seed(seed)
        call: dict[str, Any] = {
            arg.name: arg.draw(tuple(sizes[a] for a in arg.axes), sizes, dtype, generator) for arg in self.args
        }
        return call | dict(self.scalars)


def normal(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw standard normal values."""
    return torch.randn(shape, generator=generator).to(dtype)


def near_one(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw norm weights: about one."""
    return (1 + 0.1 * torch.randn(shape, generator=generator)).to(dtype)


def ids_below(letter: str) -> Draw:
    """Return a draw of int64 ids below the size of axis ``letter``."""

    def draw(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randint(sizes[letter], shape, generator=generator)

    return draw


def require(condition: bool, op: str, got: str, need: str) -> None:  # noqa: FBT001 - reads as an assertion
    """Raise ``OperatorError`` unless ``condition`` holds.

    Raises:
        OperatorError: with the operator's name, what it got and what it needs.
    """
    if not condition:
        raise OperatorError(f"{op}: got {got}; need {need}")


def require_float(op: str, *tensors: Tensor) -> None:
    """Raise unless all tensors share one of the three float dtypes, and one device."""
    first = tensors[0]
    if first.dtype in FLOATS and all(t.dtype == first.dtype and t.device == first.device for t in tensors):
        return
    got = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
    raise OperatorError(f"{op}: got {got}; need one dtype of float32, bfloat16, float16 on one device")


def require_unit_stride(op: str, *tensors: Tensor) -> None:
    """Raise unless the last dimension of every tensor is contiguous: a copy is never made silently."""
    for t in tensors:
        if t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise OperatorError(
                f"{op}: got strides {t.stride()} for shape {tuple(t.shape)}; need a contiguous last dimension; "
                "call .contiguous()"
            )


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:  # noqa: ANN401 - any argument, any value
    """Return a change for a ``Refusal``: each named argument gets the value, or the value made from the call."""

    def change(call: dict[str, Any]) -> dict[str, Any]:
        return call | {name: value(call) if callable(value) else value for name, value in changes.items()}

    return change
