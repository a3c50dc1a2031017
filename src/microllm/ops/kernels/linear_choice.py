"""Which form a linear takes, and its tiles: tuned entries where there are any, else what experiment no. 1 found.

Place: asked by ``linear.multiply`` for each call that is not replayed. Two entries of ``tuned.json`` speak of a matrix:
of {N, K} what fixes the bits of the mma form (WARPS_K, KB, SUMS) and the most rows that take the fma form (fma_rows);
of {M, N, K}, M rounded up to a bucket, the form (0 fma, 1 mma, 2 tile) and that form's blocks. Inside
``batch_invariant`` only the former counts: it is one for every number of rows.

The defaults are an H200's: one row takes fp32 multiply-adds; up to 16 rows matrix instructions straight from memory;
from 17 rows on tiles, for narrow matrices where there is shared memory for long steps. Inside ``batch_invariant`` every
number of rows takes the mma form. In fp32, which has no such instructions, and on AMD, whose lanes hold other
fragments, tiles of 16 rows stand in for it.

Axes:    M = rows, N = rows of the weight, NY = outputs, K = in, J = positions of a weight row
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from microllm.ops.select import is_batch_invariant
from microllm.ops.target import INTERPRETER, MUCH_SHARED_BYTES, Target, target_of
from microllm.ops.tuned import damaged, device_name, tuned

FORMS = ("fma", "mma", "tile")
BUCKETS = (1, 8, 16, 32, 64, 256)
"""Numbers of rows that have entries of their own; more than the last count as the last."""
WIDE = 4096
"""Outputs from which on tiles of 64 fill the multiprocessors."""
REGISTERS = 112
"""Registers a thread for weights on their way: what is resident early is what is fetched early."""
MOST_SPLIT, COUNTERS = 64, 4096
"""Rows up to which programs may share K, and the tiles whose ends are counted."""
Tile = dict[str, int]


class Matrix(NamedTuple):
    """A weight as the kernels meet it, by the operator that reads it."""

    op: str
    N: int
    K: int
    dtype: torch.dtype
    format: str = "plain"
    swiglu: bool = False
    normed: bool = False

    @property
    def outputs(self) -> int:
        """NY: the outputs of a row."""
        return self.N // 2 if self.swiglu else self.N

    @property
    def positions(self) -> int:
        """J: the positions of a weight row."""
        return self.K // 2 if self.format == "int4" else self.K

    @property
    def lane(self) -> int:
        """Neighbours that one lane loads."""
        return 8 if self.format == "plain" else 16

    @property
    def registers(self) -> int:
        """Registers of one such load."""
        return self.lane * (self.dtype.itemsize if self.format == "plain" else 1) // 4


def matrix_of(op: str, N: int, K: int, dtype: torch.dtype) -> Matrix:
    """Return a linear operator's weight [N, K] as the choice sees it."""
    form = {"linear_int8": "int8", "linear_fp8": "e4m3fn", "linear_int4": "int4"}.get(op, "plain")
    return Matrix(op, N, K, dtype, form, op.endswith("swiglu"), op.startswith("norm"))


class Choice(NamedTuple):
    """A form, its constants, how it is launched, and whether an entry of ``tuned.json`` had a part in it."""

    form: str
    constants: Tile
    num_warps: int
    num_stages: int = 1
    tuned: bool = False


@cache
def choose(matrix: Matrix, M: int, target: Target, device: str, one_order: bool) -> Choice:
    """Return form and tiles for M rows on a device (its target and name)."""
    of_all = _entry(matrix, {"N": matrix.N, "K": matrix.K}, device)
    order = _order(matrix) | of_all
    bucket = bucket_of(M)
    found = {} if one_order else _entry(matrix, {"M": bucket, "N": matrix.N, "K": matrix.K}, device)
    form = FORMS[found["form"]] if found else "mma" if one_order else _form(matrix, M, order["fma_rows"], target)
    is_tuned = bool(found or of_all)
    if form == "mma" and target != INTERPRETER and (matrix.dtype == torch.float32 or target.warp_size != 32):
        tile = wide_tile(matrix, 16, target)  # never split: its rows' bits are promised
        return Choice("tile", _only(tile, _TILE), tile["num_warps"], tile["STAGES"])
    if form == "mma":
        tile = _mma_tile(matrix, bucket, order, target) | found
        return Choice(form, _only(tile, _MMA) | _only(order, _ORDER), order["WARPS_K"], tuned=is_tuned)
    tile = (_fma_tile(matrix, target) if form == "fma" else _split_tile(matrix, M, target)) | found
    names = _FMA if form == "fma" else _TILE
    return Choice(form, _only(tile, names), tile["num_warps"], tile.get("STAGES", 1), bool(found))


def is_tuned(op: str, x: Tensor, *rest: Any) -> bool:
    """Say whether an entry has a part in the choice for a call of a linear operator."""
    w = next(each for each in rest if isinstance(each, Tensor) and each.dim() == 2)
    M, matrix = x.numel() // x.shape[-1], matrix_of(op, w.shape[0], x.shape[-1], x.dtype)
    return choose(matrix, M, target_of(x.device), device_name(x.device), is_batch_invariant()).tuned


def bucket_of(M: int) -> int:
    """Return the number of rows whose entry counts for M rows."""
    return next((size for size in BUCKETS if size >= M), BUCKETS[-1])


_ORDER, _MMA = ("WARPS_K", "KB", "SUMS"), ("BLOCK_M", "BLOCK_N", "EARLY", "AHEAD")
_FMA, _TILE = ("ROWS", "REP", "BLOCK_K", "EARLY"), ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "SPLIT")


def fault(matrix: Matrix, shape: Tile, entry: Tile) -> str:
    """Return what in an entry no launch takes, or nothing."""
    if "M" not in shape:
        allowed: tuple[str, ...] = (*_ORDER, "fma_rows")
    elif entry.get("form") not in range(len(FORMS)):
        return f"form {entry.get('form')}"
    else:
        allowed = ("form", *((*_FMA, "num_warps"), _MMA, (*_TILE, "num_warps"))[entry["form"]])
    for name, size in entry.items():
        if name not in allowed:
            return f"{name}, which is none of {', '.join(allowed)}"
        is_count = name in ("form", "EARLY", "AHEAD", "STAGES", "fma_rows")
        if size < (name not in ("form", "EARLY", "fma_rows")) or not (is_count or size & (size - 1) == 0):
            return f"{name} {size}"
    if entry.get("SPLIT", 1) > 1:
        tiles = triton.cdiv(matrix.outputs, entry.get("BLOCK_N", 16)) * triton.cdiv(
            shape["M"], entry.get("BLOCK_M", 16)
        )
        if matrix.swiglu or matrix.normed or shape["M"] > MOST_SPLIT or tiles > COUNTERS:
            return f"SPLIT above 1 with a gain, SwiGLU, more than {MOST_SPLIT} rows or {COUNTERS} tiles"
    return ""


def _entry(matrix: Matrix, shape: Tile, device: str) -> Tile:
    found = tuned(matrix.op, shape, matrix.dtype, device) or {}
    if found and (what := fault(matrix, shape, found)):
        raise damaged(f"{what} in the entry for {matrix.op} {shape}")
    return found


def _only(tile: Tile, names: tuple[str, ...]) -> Tile:
    return {name: tile[name] for name in names}


def _form(matrix: Matrix, M: int, fma_rows: int, target: Target) -> str:
    if M <= fma_rows:
        return "fma"
    fills = matrix.outputs >= WIDE or target.shared_bytes >= MUCH_SHARED_BYTES
    return "tile" if M > BUCKETS[-1] or (M > 16 and fills) else "mma"


def _order(matrix: Matrix) -> Tile:
    """Return what fixes the bits of the mma form: more warps share a longer K."""
    spans = triton.cdiv(matrix.positions, 4 * matrix.lane)
    warps = min(2 if matrix.K <= 1024 else 4 if matrix.K <= 2048 else 8, triton.next_power_of_2(spans))
    blocks = 2 if spans % (2 * warps) == 0 and matrix.registers == 4 else 1
    several = matrix.N < WIDE and warps < 8 and spans > warps * blocks
    return {"WARPS_K": warps, "KB": blocks, "SUMS": 2 if several else 1, "fma_rows": 1}


def _mma_tile(matrix: Matrix, M: int, order: Tile, target: Target) -> Tile:
    """Return the mma form's blocks.

    More rows spill registers. Interpreted, big programs take no longer than small ones, and a product's bits depend on
    its shape: one shape for any number of rows.
    """
    rows = 64 if target.backend == "cpu" else max(8, min(M, 16 if matrix.normed else 32))
    outputs = 64 if target.backend == "cpu" else 32 if matrix.N >= 8 * WIDE and 8 < M <= 32 else 16
    steps = triton.cdiv(matrix.positions, 4 * matrix.lane * order["WARPS_K"] * order["KB"])
    weights = outputs // 8 * order["KB"] * matrix.registers
    x = rows // 8 * order["KB"] * matrix.lane * matrix.dtype.itemsize // 4 * (matrix.K // matrix.positions)
    return {
        "BLOCK_M": rows,
        "BLOCK_N": outputs,
        "EARLY": min(steps, max(1, REGISTERS // weights)),
        "AHEAD": min(steps, max(1, (32 if matrix.normed and rows > 8 else 64) // x)),
    }


def _fma_tile(matrix: Matrix, target: Target) -> Tile:
    """Return the fma form's blocks: 32 outputs and all of a short K in flight for a head, few outputs elsewhere."""
    head, long = matrix.outputs >= 8 * WIDE, matrix.positions > 2048
    block, warps, each = (128, 4, 4) if head else (256, 2, 2) if matrix.swiglu else (256, 1 if long else 4, 1)
    most = REGISTERS // matrix.registers // (2 if matrix.swiglu else 1)
    while triton.cdiv(matrix.positions, block) > min(20, most):
        block, warps = 2 * block, warps if head else min(8, 2 * warps)
    steps = triton.cdiv(matrix.positions, block)
    threads = warps * (512 if target.backend == "cpu" else target.warp_size)
    shared = matrix.normed and matrix.format.startswith("e4m3")  # whose decoding takes registers beside x and the gain
    while each > 1 and (steps * each > most or shared):
        each //= 2
    return {
        "ROWS": max(1, threads * matrix.lane // block), "REP": each, "BLOCK_K": block, "EARLY": steps,
        "num_warps": warps,
    }  # fmt: skip


def wide_tile(matrix: Matrix, M: int, target: Target) -> Tile:
    """Return the tile form's blocks; with M above 128 they are those of every larger M."""
    rows = next((size for size in (16, 32, 64) if size >= M), 128)
    wide = matrix.dtype == torch.float32  # twice the registers; int4's positions are two columns each
    outputs = 64 if rows < 128 or matrix.swiglu or wide else 128
    block = 16 if wide else 32 if matrix.format == "int4" else 64
    small = target.shared_bytes <= 64 * 1024
    warps = 8 if rows == 128 else 4
    stages = 2 if small else 3
    return {"BLOCK_M": rows, "BLOCK_N": outputs, "BLOCK_K": block, "STAGES": stages, "SPLIT": 1, "num_warps": warps}


def _split_tile(matrix: Matrix, M: int, target: Target) -> Tile:
    """Return the tile form's blocks where rows share no promise of bits: long steps, and K shared by programs."""
    tile = wide_tile(matrix, M, target)
    if M > 64 or matrix.dtype == torch.float32 or matrix.format != "plain" or target.shared_bytes < MUCH_SHARED_BYTES:
        return tile
    tile |= {"BLOCK_K": 128, "STAGES": 4}
    tiles, steps = triton.cdiv(matrix.outputs, tile["BLOCK_N"]), triton.cdiv(matrix.K, 128)
    if not (matrix.swiglu or matrix.normed):
        tile["SPLIT"] = next(n for n in (8, 4, 2, 1) if n == 1 or (tiles * n <= 132 and steps >= 2 * n - 1))
    return tile
