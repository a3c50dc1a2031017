"""The contract of an operator, as data: what it takes, what it refuses, how exact it is, what it costs.

Place: every file in ``ops/`` holds an operator, its plain-torch reference and its ``Contract``; checks, results'
shapes, fake implementations, examples and refusals all follow from the row. One test drives all rows.
Does not choose implementations and knows no model.

Axes are letters: "BTHD" has four, "...D" any number before D, "2F D" an even first axis, "BTP|CP" either form.
A row's ``sizes`` give each letter a number ("..." a tuple), so that examples and bytes follow from the same words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from microllm.errors import OperatorError

Level = Literal["reference", "vendor", "triton"]
Sizes = Mapping[str, Any]
Draw = Callable[[tuple[int, ...], Sizes, torch.dtype, torch.Generator], Any]
Out: TypeAlias = Tensor | None
Outs: TypeAlias = tuple[Tensor, ...] | None
Sink: TypeAlias = dict[str, Tensor] | None
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP32, INT64 = (torch.float32,), (torch.int64,)
REFERENCE: Mapping[str, tuple[Level, ...]] = {"cpu": ("reference",), "cuda": ("reference",)}
TRITON: Mapping[str, tuple[Level, ...]] = {"cpu": ("reference",), "cuda": ("triton", "reference")}
VENDOR: Mapping[str, tuple[Level, ...]] = {"cpu": ("vendor", "reference"), "cuda": ("vendor", "reference")}
VENDOR_ON_CPU: Mapping[str, tuple[Level, ...]] = {"cpu": ("vendor", "reference"), "cuda": ("reference",)}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted |a - r| as atol + rtol * |r|, r in fp32 or better."""

    atol: float
    rtol: float


def rounded(atol: float, rtol: float, times: int = 1, *, wide: float = 1e-6) -> dict[torch.dtype, Tolerance]:
    """Return fp32's tolerance, and bf16's and fp16's for results rounded ``times`` times on top of it.

    ``wide`` is bf16's atol, where what was rounded is larger than the result; fp16's is an eighth of it.
    """
    return {
        torch.float32: Tolerance(atol, rtol),
        torch.bfloat16: Tolerance(atol + wide, rtol + times * 2.0**-8),
        torch.float16: Tolerance(atol + wide / 8, rtol + times * 2.0**-11),
    }


def flat(atol: float, rtol: float) -> dict[torch.dtype, Tolerance]:
    """Return one tolerance for all float dtypes: of results that are fp32 or exact whatever comes in."""
    return {dtype: Tolerance(atol, rtol) for dtype in FLOATS}


EXACT = flat(0, 0)
"""No tolerance at all: what is only moved, compared or counted."""


def normal(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw standard normal values."""
    return torch.randn(shape, generator=generator).to(dtype)


def near_one(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw norm weights: about one."""
    return (1 + 0.1 * torch.randn(shape, generator=generator)).to(dtype)


def weight(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw a matrix that keeps the size of what it multiplies: normal values over the root of its width."""
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)


def between(low: float, high: float) -> Draw:
    """Return a draw of values from ``low`` to below ``high``, whole where the dtype is."""

    def draw(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)

    return draw


def ids_below(letter: str) -> Draw:
    """Return a draw of ids below the size of axis ``letter``."""

    def draw(shape: tuple[int, ...], sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randint(sizes[letter], shape, generator=generator, dtype=dtype)

    return draw


def cases(*words: str) -> tuple[Sizes, ...]:
    """Return sizes from words: "B2 T7" gives B = 2 and T = 7, "...3,2" two leading axes, "..." none."""

    def size(axis: str, number: str) -> int | tuple[int, ...]:
        return tuple(int(n) for n in number.split(",") if n) if axis == "..." else int(number)

    found = (re.findall(r"(\.\.\.|[A-Z])([\d,]*)", text) for text in words)
    return tuple({axis: size(axis, number) for axis, number in pairs} for pairs in found)


@dataclass(frozen=True)
class Arg:
    """One tensor of a call or its result: name, axes, how an example is drawn, and the dtypes it may have.

    No ``dtypes``: a float dtype, the same for all such tensors of a call. ``draw=None``: absent from examples.
    ``layout``: "rows" = last axis contiguous, and the axes of "..." as one; "any" = whatever strides.
    """

    name: str
    axes: str
    draw: Draw | None = normal
    dtypes: tuple[torch.dtype, ...] = ()
    optional: bool = False
    mutated: bool = False
    many: bool = False
    layout: Literal["rows", "any"] = "rows"
    forms: tuple[tuple[tuple[str, int], ...], ...] = field(init=False)
    spread: bool = field(init=False)

    def __post_init__(self) -> None:
        """Read the axes once."""
        tokens = (re.findall(r"(\d*)([A-Z]|\.\.\.)", form) for form in self.axes.split("|"))
        object.__setattr__(self, "forms", tuple(tuple((x, int(n or 1)) for n, x in form) for form in tokens))
        object.__setattr__(self, "spread", self.axes.startswith("..."))

    def bind(self, t: Tensor, sizes: dict[str, Any]) -> bool:
        """Give each letter its size; say whether t's axes are those of one form and agree with what is bound."""
        shape = tuple(t.shape)
        for form in self.forms:
            spread = self.spread
            lead = len(shape) - len(form) + spread
            if lead < 0 or (lead and not spread):
                continue
            if spread and sizes.setdefault("...", shape[:lead]) != shape[:lead]:
                return False
            for letter, times in form[1:] if spread else form:
                size = shape[lead]
                lead += 1
                if times > 1:
                    if size % times:
                        return False
                    size //= times
                if sizes.setdefault(letter, size) != size:
                    return False
            return True
        return False

    def lies_well(self, t: Tensor) -> bool:
        """Say whether t's strides are taken as they are."""
        if self.layout == "any" or t.is_contiguous():
            return True
        if t.dim() == 0 or (t.shape[-1] > 1 and t.stride(-1) != 1):
            return False
        last = t.dim() - len(self.forms[0]) if self.spread else 0
        return all(t.stride(i) == t.stride(i + 1) * t.shape[i + 1] for i in range(last) if t.shape[i] != 1)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of the first form."""
        lead = tuple(sizes["..."]) if self.spread else ()
        return lead + tuple(times * sizes[letter] for letter, times in self.forms[0] if letter != "...")


def numel(sizes: Sizes, axes: str) -> int:
    """Return the number of elements that ``axes`` span."""
    return prod(Arg("", axes).shape(sizes))


def in_range(t: Tensor, low: int, end: int) -> bool:
    """Say whether all values of t are from ``low`` to below ``end``."""
    smallest, largest = (int(v) for v in t.aminmax()) if t.numel() else (low, low)
    return low <= smallest and largest < max(end, low + 1)


Change = Mapping[str, Any]
"""Arguments that make a good call bad: values, or functions of the call that give them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Something that must hold besides axes and dtypes: the words, the test, and changes that break it.

    ``by_value`` rules look into tensors: tested where that costs no synchronisation, on a CPU, by the operator itself.
    """

    need: str
    holds: Callable[..., bool]
    breaks: tuple[Change, ...]
    by_value: bool = False


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What an operator promises, in a form that a test can drive.

    ``reference`` takes the tensors of ``args``, then ``scalars``, by position; ``vendor`` too, and ``out=`` where
    ``vendor_takes_out``; ``vendor_suits`` says whether it takes a call, and why.
    ``autograd``: torch's pair (backward, setup_context).
    ``composite``: made of torch's operators, which bring gradients and fakes.
    ``levels``: best first, by device.
    ``invariant``: the levels at which a row's bits do not depend on the other rows of the call.
    ``mode_b``: of a kernel with several forms, the one that ``select.batch_invariant`` holds it to.
    ``sink``: the intermediates that the diagnostic form returns.

    Units:   ``num_flops`` counts a multiply-add as two
    """

    name: str
    args: tuple[Arg, ...]
    results: tuple[Arg, ...] = ()
    scalars: Mapping[str, bool | int | float] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    reference: Callable[..., Any]
    vendor: Callable[..., Any] | None = None
    vendor_suits: Callable[..., tuple[bool, str]] | None = None
    vendor_takes_out: bool = False
    autograd: tuple[Callable[..., Any], Callable[..., None]] | None = None
    composite: bool = False
    levels: Mapping[str, tuple[Level, ...]] = field(default_factory=lambda: REFERENCE)
    invariant: tuple[Level, ...] = ()
    mode_b: str = ""
    sink: tuple[str, ...] = ()
    sizes: tuple[Sizes, ...]
    forward: Mapping[torch.dtype, Tolerance]
    backward: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    traffic: Callable[[Sizes, int], int] | None = None
    num_flops: Callable[[Sizes], int]

    def check(self, values: Sequence[Any]) -> None:
        """Raise ``OperatorError`` where an axis, dtype, device or layout is not the row's, or a rule is broken."""
        sizes: dict[str, Any] = {}
        dtype = device = None
        for arg, value in zip(self.args, values, strict=False):
            for t in value if arg.many else () if value is None and arg.optional else (value,):
                if not isinstance(t, Tensor):
                    self.refuse(values, self.needs)
                device = device or t.device
                dtype = dtype or (None if arg.dtypes else t.dtype)
                alike = t.device == device and (bool(arg.dtypes) or t.dtype == dtype)
                fits = alike and t.dtype in (arg.dtypes or FLOATS)
                if not (fits and (arg.many or arg.bind(t, sizes)) and arg.lies_well(t)):
                    self.refuse(values, self.needs)
        for rule in self.rules:
            if not (rule.by_value or rule.holds(*values)):
                self.refuse(values, rule.need)

    def outcome(self, values: Sequence[Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each result of a call that has been checked."""
        sizes: dict[str, Any] = {}
        shared = torch.float32
        for arg, value in zip(self.args, values, strict=False):
            if value is not None and not arg.many:
                arg.bind(value, sizes)
                shared = shared if arg.dtypes else value.dtype
        return [(result.shape(sizes), result.dtypes[0] if result.dtypes else shared) for result in self.results]

    def check_values(self, values: Sequence[Any]) -> None:
        """Raise unless the rules that look into tensors hold."""
        for rule in self.rules:
            if rule.by_value and not rule.holds(*values):
                self.refuse(values, rule.need)

    def refuse(self, values: Sequence[Any], need: str) -> NoReturn:
        """Raise ``OperatorError`` with what the call got and what it needs."""
        names = [*(arg.name for arg in self.args), *self.scalars, *["out"] * len(self.results)]
        got = ", ".join(f"{name} {_described(value)}" for name, value in zip(names, values, strict=False))
        raise OperatorError(f"{self.name}: got {got}; need {need}")

    @property
    def needs(self) -> str:
        """The arguments' axes and dtypes in words."""
        words = ", ".join(f"{a.name} [{a.axes}]" + "".join(f" {_short(d)}" for d in a.dtypes) for a in self.args)
        one = "one float dtype (fp32, bf16, fp16) where none is named, one device, rows contiguous"
        return f"{words}; {one}; cast, move or call .contiguous()"

    @property
    def takes_grad(self) -> bool:
        """Whether inputs may require grad: gradients flow, or no result could carry one."""
        whole = bool(self.results) and all(r.dtypes and not r.dtypes[0].is_floating_point for r in self.results)
        return self.composite or self.autograd is not None or whole

    def example(
        self, sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return one valid call's arguments by name, in the operator's order, drawn on ``device`` from ``seed``."""
        generator = torch.Generator(device).manual_seed(seed)
        call: dict[str, Any] = {}
        with torch.device(device):
            for arg in self.args:
                own = dtype if not arg.dtypes or dtype in arg.dtypes else arg.dtypes[0]
                call[arg.name] = arg.draw and arg.draw(arg.shape(sizes), sizes, own, generator)
        return call | dict(self.scalars)

    def num_bytes(self, sizes: Sizes, itemsize: int) -> int:
        """Return the bytes of an example's arguments read once and its results written once, or ``traffic``'s."""
        if self.traffic is not None:
            return self.traffic(sizes, itemsize)
        tensors = [t for t in (*self.args, *self.results) if t.draw is not None]
        return sum(numel(sizes, t.axes) * (t.dtypes[0].itemsize if t.dtypes else itemsize) for t in tensors)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} x {_described(value[0])}" if value else "none"
    if not isinstance(value, Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f" strides {value.stride()}"
    return f"{tuple(value.shape)} {_short(value.dtype)} {value.device}{strides}"
