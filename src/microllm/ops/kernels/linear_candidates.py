"""What the tuner tries for a linear: from where it stands, each block a step smaller and a step larger.

Place: asked by ``lab/tune``. A candidate is a whole entry of ``tuned.json``, and is run as one: nothing here launches,
and nothing here says that a candidate is right.

Axes:    as ``linear_choice``
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
import triton

from microllm.ops.kernels.linear_choice import (
    BUCKETS,
    FORMS,
    REGISTERS,
    Choice,
    Matrix,
    Tile,
    bucket_of,
    choose,
    fault,
    matrix_of,
)
from microllm.ops.target import INTERPRETER, Target
from microllm.ops.tuned import Tuned, trial

__all__ = [
    "BUCKETS", "ORDER", "bucket_of", "choose", "entry_of", "fault", "forms_of", "matrix_of", "neighbours",
    "order_candidates", "order_of", "problem", "shared_bytes", "trying",
]  # fmt: skip
_LADDERS: dict[str, dict[str, tuple[int, int]]] = {
    "fma": {"BLOCK_K": (64, 4096), "num_warps": (1, 8), "REP": (1, 4)},
    "mma": {"BLOCK_M": (8, 64), "BLOCK_N": (16, 64), "EARLY": (1, 64), "AHEAD": (1, 64)},
    "tile": {
        "BLOCK_M": (16, 128), "BLOCK_N": (32, 256), "BLOCK_K": (32, 256), "STAGES": (1, 6), "SPLIT": (1, 16),
        "num_warps": (2, 8),
    },
}  # fmt: skip
"""What is varied in each form, and how far; the rest follows from it."""
ORDER = {"WARPS_K": (1, 2, 4, 8), "KB": (1, 2), "SUMS": (1, 2, 4)}
_MOST_STEPS = 20  # unrolled: more take minutes to compile


@contextmanager
def trying(*entries: Tuned) -> Iterator[None]:
    """Let entries stand before those of ``tuned.json``, for linears too, whose choices are kept."""
    with trial(*entries):
        choose.cache_clear()
        try:
            yield
        finally:
            choose.cache_clear()


def entry_of(choice: Choice) -> Tile:
    """Return the entry of some rows that gives this choice, whatever the defaults become."""
    own = {name: size for name, size in choice.constants.items() if name not in ORDER}
    warps = {} if choice.form == "mma" else {"num_warps": choice.num_warps}
    return {"form": FORMS.index(choice.form), **own, **warps}


def order_of(choice: Choice) -> Tile:
    """Return what of a choice of the mma form is one for all rows."""
    return {name: choice.constants[name] for name in ORDER}


def forms_of(matrix: Matrix, M: int, target: Target) -> list[int]:
    """Return the forms that M rows can take on a target."""
    mma = target == INTERPRETER or (matrix.dtype != torch.float32 and target.warp_size == 32)
    able = {"fma": M == 1, "mma": mma and M <= BUCKETS[-1], "tile": True}
    return [i for i, form in enumerate(FORMS) if able[form]]


def neighbours(matrix: Matrix, M: int, order: Tile, entry: Tile, target: Target) -> Iterator[Tile]:
    """Yield the entries one step from ``entry`` that the target can hold."""
    for name, (low, high) in _LADDERS[FORMS[entry["form"]]].items():
        size = entry[name]
        for other in (size - 1, size + 1) if name == "STAGES" else (size // 2, size * 2):
            changed = _whole(matrix, entry | {name: other}, target)
            if low <= other <= high and not problem(matrix, M, order, changed, target):
                yield changed


def order_candidates(matrix: Matrix) -> Iterator[Tile]:
    """Yield the orders of K whose block is no longer than a row of the weight."""
    for sizes in product(*ORDER.values()):
        order = dict(zip(ORDER, sizes, strict=True))
        if _step(matrix, order) < 2 * matrix.positions:
            yield order


def problem(matrix: Matrix, M: int, order: Tile, entry: Tile, target: Target) -> str:
    """Return why a target cannot run a whole entry of M rows, or nothing; only the compiler knows all of it."""
    if what := fault(matrix, {"M": bucket_of(M)}, entry):
        return what
    if entry["form"] not in forms_of(matrix, M, target):
        return f"form {FORMS[entry['form']]} does not take {M} rows of {matrix.dtype} on {target.name}"
    if (shared := shared_bytes(matrix, entry)) > target.shared_bytes:
        return f"it takes {shared} bytes of shared memory; {target.name} has {target.shared_bytes}"
    form = FORMS[entry["form"]]
    if form == "mma":
        steps = triton.cdiv(matrix.positions, _step(matrix, order))
        if max(entry["EARLY"], entry["AHEAD"]) > steps:
            return f"EARLY and AHEAD are at most {steps}, the steps of K"
    if form == "fma":
        steps = triton.cdiv(matrix.positions, entry["BLOCK_K"])
        registers = steps * entry["REP"] * matrix.registers * (2 if matrix.swiglu else 1)
        if steps > _MOST_STEPS or registers > 2 * REGISTERS or entry["EARLY"] > steps:
            return f"{steps} steps of K, {registers} registers a thread; at most {_MOST_STEPS}, {2 * REGISTERS}"
    return ""


def shared_bytes(matrix: Matrix, entry: Tile) -> int:
    """Return the least shared memory of an entry: a tile form's operands on their way, less the one in use."""
    if FORMS[entry["form"]] != "tile":
        return 0
    weight = 1 if matrix.format != "plain" else matrix.dtype.itemsize
    x = matrix.dtype.itemsize * (matrix.K // matrix.positions)
    columns = entry["BLOCK_N"] * weight * (2 if matrix.swiglu else 1) + entry["BLOCK_M"] * x
    return max(1, entry["STAGES"] - 1) * entry["BLOCK_K"] * columns


def _step(matrix: Matrix, order: Tile) -> int:
    return 4 * matrix.lane * order["WARPS_K"] * order["KB"]


def _whole(matrix: Matrix, entry: Tile, target: Target) -> Tile:
    """Return the entry with what follows from its blocks: in the fma form a program's rows, and the steps in flight."""
    if FORMS[entry["form"]] != "fma":
        return entry
    threads = entry["num_warps"] * (512 if target == INTERPRETER else target.warp_size)
    rows = max(1, threads * matrix.lane // max(1, entry["BLOCK_K"]))
    return entry | {"ROWS": rows, "EARLY": triton.cdiv(matrix.positions, max(1, entry["BLOCK_K"]))}
