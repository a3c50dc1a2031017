"""Choose the implementation of an operator, say why, and count what ran.

Place: every call of an operator that is not replayed from a graph passes ``choose``. Levels are tried in the order of
the row's ``levels`` for the device; one that does not suit the call is passed over, and the reason says so.
Does not tune, and knows no operator by name.

``use`` and ``ledger`` hold for the whole process: a backward pass runs in threads of its own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from microllm.errors import OperatorError
from microllm.ops.contract import Contract, Level, Outs, Sink

if TYPE_CHECKING:
    from microllm.ops.kernels import Kernel


@dataclass(frozen=True, slots=True)
class Choice:
    """The level that a call runs at, and why not a better one, or what stands behind it."""

    level: Level
    reason: str


class Ran(NamedTuple):
    """One entry of the ledger."""

    op: str
    level: Level
    reason: str


_forced: dict[str, Level] = {}
_ledgers: list[Counter[Ran]] = []


@contextmanager
def use(level: Level, *names: str) -> Iterator[None]:
    """Force a level inside the context, for the operators named or for all; one that does not qualify is an error.

    Raises:
        OperatorError: at the call, when the operator has no such level or it does not suit the call.
    """
    before = dict(_forced)
    _forced.update(dict.fromkeys(names or ("",), level))
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextmanager
def ledger() -> Iterator[Counter[Ran]]:
    """Count what runs inside the context: operator, level, reason. A graph traced or replayed counts nothing."""
    counts: Counter[Ran] = Counter()
    _ledgers.append(counts)
    try:
        yield counts
    finally:
        _ledgers[:] = [kept for kept in _ledgers if kept is not counts]


_one_order: list[bool] = []


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Take, inside the context, only what gives a row the same bits whatever rows stand beside it: mode B.

    A kernel that has several forms takes the one that its row names; a vendor's library whose row is not listed as
    ``invariant`` is passed over. Holds for the whole process, as ``use`` does.
    """
    _one_order.append(True)
    try:
        yield
    finally:
        _one_order.pop()


def is_batch_invariant() -> bool:
    """Say whether a call made now is inside ``batch_invariant``."""
    return bool(_one_order)


def is_watched() -> bool:
    """Say whether somebody counts operators, or says which level or form of them runs: captured steps would miss it."""
    return bool(_ledgers or _forced or _one_order)


_overlapped: ContextVar[bool] = ContextVar("overlapped", default=False)


@contextmanager
def overlapped() -> Iterator[None]:
    """Let kernels launched inside begin, and read weights, before the one ahead ends (programmatic dependent launch).

    Only for a step in which nothing writes weights: they are read before the kernel waits for its inputs.
    """
    token = _overlapped.set(True)
    try:
        yield
    finally:
        _overlapped.reset(token)


def is_overlapped() -> bool:
    """Say whether a call made now is inside ``overlapped``."""
    return _overlapped.get()


_choice = cache(Choice)


def choose(contract: Contract, values: Sequence[Any], *, with_sink: bool = False) -> Choice:
    """Return the best level that suits the call.

    Raises:
        OperatorError: the forced level does not.
    """
    device = first_tensor(values).device.type
    levels: tuple[Level, ...] = contract.levels.get(device, ("reference",))
    forced = _forced.get(contract.name) or _forced.get("")
    if forced is None and len(levels) == 1:
        return _choice(levels[0], "the only level")
    if forced == "triton" and _interpreted() and "triton" in contract.levels["cuda"]:
        levels = ("triton",)
    passed: list[str] = []
    for level in levels:
        if forced not in (None, level):
            continue
        suits, reason = _suits(contract, level, values, with_sink)
        if suits:
            return _choice(level, "; ".join([*passed, reason]) if passed else reason)
        passed.append(f"not {level}: {reason}")
    raise OperatorError(
        f"{contract.name}: got use({forced!r}); need one of its levels on {device}, which are "
        f"{', '.join(levels)}{''.join(f'; {text}' for text in passed)}"
    )


def run(contract: Contract, values: Sequence[Any], *, out: Outs = None, sink: Sink = None) -> Any:
    """Run a call at the level that suits it, count it, and fill ``out`` where it is given.

    Raises:
        OperatorError: a rule on values is broken (looked at on a CPU alone), or the forced level does not suit.
    """
    if first_tensor(values).device.type == "cpu":
        contract.check_values(values)
    choice = choose(contract, values, with_sink=sink is not None)
    for counts in [] if torch.compiler.is_compiling() else _ledgers:
        counts[Ran(contract.name, choice.level, choice.reason)] += 1
    more: dict[str, Any] = {} if sink is None else {"sink": sink}
    if choice.level == "triton":
        with torch.cuda.device_of(first_tensor(values)):  # triton launches on the current device
            return _kernel(contract.name).run(*values, out=out, **more)
    if choice.level == "vendor":
        assert contract.vendor is not None, f"{contract.name} lists a vendor level and has none"
        if out is not None and contract.vendor_takes_out:
            return contract.vendor(*values, out=out[0])
        results = contract.vendor(*values)
    else:
        results = contract.reference(*values, **more)
    if out is not None:
        for target, result in zip(out, results if isinstance(results, tuple) else (results,), strict=True):
            target.copy_(result)
    return results


def _suits(contract: Contract, level: Level, values: Sequence[Any], with_sink: bool) -> tuple[bool, str]:
    if level == "reference":
        return True, "plain torch"
    if level == "vendor":
        if with_sink:
            return False, "no diagnostic form"
        if _one_order and "vendor" not in contract.invariant:
            return False, "its rows' bits depend on the number of rows"
        return contract.vendor_suits(*values) if contract.vendor_suits else (True, "torch's library")
    if first_tensor(values).device.type != "cuda" and not _interpreted():
        return False, "needs a GPU"
    if not _has_triton():
        return False, "the package triton is absent; run: pip install 'microllm[gpu]'"
    return _kernel(contract.name).suits(*values)


def first_tensor(values: Sequence[Any]) -> Tensor:
    """Return the call's first tensor: the device of all."""
    return values[0] if isinstance(values[0], Tensor) else values[0][0]


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _kernel(name: str) -> Kernel:
    from microllm.ops.kernels import KERNELS  # noqa: PLC0415 - brings triton: on first use

    return KERNELS[name]
