"""What no metric of one call sees: a result that was kept, work that goes on after the call, another dtype.

Place: ``replicate`` asks beside the correctness gate, before anything is timed. Inputs are found where an arm's
callable holds them (closure, arguments, attributes); one that hides them is not asked whether it reads them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from microllm.evidence.tensor_statistics import same_bits
from microllm.lab.contract import Build, Case, Output

SETTLE_S = 0.05
"""How long a result is left alone before it is looked at again."""


def joined(output: Output) -> Tensor:
    """Return an arm's output as one tensor."""
    return output if isinstance(output, Tensor) else torch.cat([part.reshape(-1) for part in output])


def find_faults(build: Build, case: Case, other: Case, want: Tensor) -> list[str]:
    """Return why a result that may be right is not to be believed; ``other`` gives other inputs of equal shapes."""
    action = build(case)
    action()
    output = action()
    at_return, found = joined(output).clone(), []
    if torch.device(case.device).type == "cuda":
        torch.cuda.synchronize(case.device)
    time.sleep(SETTLE_S)
    if not same_bits(at_return, joined(output)):
        found.append("its result changed after the call: work went on in another thread or stream")
    if at_return.dtype != want.dtype:
        found.append(f"its result is {at_return.dtype}, the baseline's {want.dtype}")
    own = {part.untyped_storage().data_ptr() for part in ((output,) if isinstance(output, Tensor) else output)}
    before = joined(output).clone()
    if _change_inputs(action, build(other), own) and same_bits(before, joined(action())):
        found.append("its result is the same on other inputs: it was kept; hold in the callable what the result is of")
    return found


def _change_inputs(action: Callable[[], object], twin: Callable[[], object], outputs: set[int]) -> int:
    """Copy what ``twin`` holds into what ``action`` holds at the same place, and return how many tensors changed."""
    changed, others = 0, dict(_held(twin, "", set()))
    with torch.no_grad():
        for path, mine in _held(action, "", set()):
            other = others.get(path)
            if other is None or (mine.shape, mine.dtype) != (other.shape, other.dtype):
                continue
            if mine.untyped_storage().data_ptr() not in outputs and not same_bits(mine, other):
                mine.copy_(other)
                changed += 1
    return changed


def _held(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - anything
    """Yield the tensors that a callable holds, each with the way to it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    parts: dict[str, Any] = {}
    if isinstance(value, nn.Module):
        parts = value.state_dict(keep_vars=True)
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, dict):
        parts = {str(key): each for key, each in value.items()}
    elif isinstance(value, list | tuple):
        parts = {str(at): each for at, each in enumerate(value)}
    elif callable(value):
        cells = getattr(value, "__closure__", None) or ()
        names = getattr(getattr(value, "__code__", None), "co_freevars", ())
        parts = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False) if _is_full(cell)}
        parts |= {"self": getattr(value, "__self__", None), "defaults": getattr(value, "__defaults__", None)}
        parts |= {} if isinstance(value, type) else getattr(value, "__dict__", {})
    for name, each in parts.items():
        yield from _held(each, f"{path}.{name}", seen)


def _is_full(cell: Any) -> bool:  # noqa: ANN401 - a cell has no public type
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
