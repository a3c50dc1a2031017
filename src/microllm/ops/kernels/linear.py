"""Linears: alone, with a residual, with RMSNorm before and SwiGLU after, and with one tiling for any number of rows.

Place: operators of ``ops/linear.py``. Device code is in ``linear_forms`` (few rows) and ``linear_tiles`` (many), the
choice in ``linear_choice``. ``multiply`` launches for the quantised linears and the head too.

Axes:    M = rows, K = in, N = out
Bytes:   every weight is read once for each tile of rows: N * K * itemsize a call up to 64 rows
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from microllm.ops.contract import Out, Outs, Sink
from microllm.ops.kernels import linear_choice
from microllm.ops.kernels.launch import Compiled, overlapping, pdl, row_stride, scratch, stream_of, zeros
from microllm.ops.kernels.linear_choice import Choice, Matrix
from microllm.ops.kernels.linear_fma import fma_kernel
from microllm.ops.kernels.linear_forms import mma_kernel
from microllm.ops.kernels.linear_tiles import tile_kernel
from microllm.ops.select import is_batch_invariant
from microllm.ops.target import TARGETS, Target, target_of

MAX_ROWS = 256
KERNELS = {"fma": fma_kernel, "mma": mma_kernel, "tile": tile_kernel}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What is multiplied, and what is folded in. ``w`` holds codes as bytes where ``format`` is not "plain"."""

    op: str
    x: Tensor
    w: Tensor
    bias: Out = None
    gain: Out = None
    eps: float = 0.0
    residual: Out = None
    swiglu: bool = False
    scale: Out = None
    minimum: Out = None
    format: str = "plain"

    @property
    def num_rows(self) -> int:
        """M."""
        return self.x.numel() // self.x.shape[-1]

    @property
    def group(self) -> int:
        """Columns that share a scale; 0: a row has one, and it is applied to the sum."""
        one = self.scale is None or (self.scale.shape[1] == 1 and self.minimum is None)
        return 0 if self.scale is None or one else self.x.shape[-1] // self.scale.shape[1]

    @property
    def matrix(self) -> Matrix:
        """The weight as the choice of form sees it."""
        K, swiglu = self.x.shape[-1], self.swiglu
        return Matrix(self.op, self.w.shape[0], K, self.x.dtype, self.format, swiglu, self.gain is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where a product goes: y, the diagnostic form's intermediates, the largest output of each tile and its index."""

    y: Out = None
    normed: Out = None
    first: Out = None
    second: Out = None
    best: Out = None
    index: Out = None


def chosen(o: Operands) -> Choice:
    """Return form and tiles of a call."""
    x = o.x
    one_order = is_batch_invariant()
    return linear_choice.choose(
        o.matrix, o.num_rows, target_of(x.device), linear_choice.device_name(x.device), one_order
    )


def multiply(o: Operands, into: Results, choice: Choice | None = None) -> None:
    """Launch one product; nothing for no rows."""
    M, matrix, choice = o.num_rows, o.matrix, choice or chosen(o)
    if M == 0 or matrix.N == 0:
        return
    tiles, rows = num_tiles(matrix, choice), M if choice.form == "fma" else triton.cdiv(M, choice.constants["BLOCK_M"])
    overlap, parts = pdl(o.x.device), ()
    if choice.form == "tile":
        sizes, stream = choice.constants, stream_of(o.x)
        numel = tiles * rows * sizes["SPLIT"] * sizes["BLOCK_M"] * sizes["BLOCK_N"] if sizes["SPLIT"] > 1 else 1
        parts = scratch(o.x.device, stream, "tile", triton.next_power_of_2(numel)), zeros(o.x.device, stream, 4096)
        assert tiles * rows <= 4096 or sizes["SPLIT"] == 1, "more tiles than counters"
    KERNELS[choice.form][(tiles, rows, choice.constants.get("SPLIT", 1))](
        o.x, o.w, o.scale, o.minimum, o.gain, o.bias, o.residual,
        into.y, into.normed, into.first, into.second, into.best, into.index, *parts, M,
        row_stride(o.x), row_stride(o.w), row_stride(o.scale), row_stride(o.minimum), row_stride(o.residual),
        row_stride(into.y), N=matrix.N, K=matrix.K, EPS=o.eps, SWIGLU=o.swiglu, FORMAT=o.format, GROUP=o.group,
        **choice.constants, PDL=overlap, num_warps=choice.num_warps, num_stages=choice.num_stages,
        **overlapping(overlap),
    )  # fmt: skip


def num_tiles(matrix: Matrix, choice: Choice) -> int:
    """Return the programs along a row's outputs."""
    sizes = choice.constants
    if choice.form == "fma":
        return triton.cdiv(matrix.outputs, sizes["ROWS"] * sizes["REP"])
    width = sizes["BLOCK_N"] // 2 if matrix.swiglu and choice.form == "mma" else sizes["BLOCK_N"]
    return triton.cdiv(matrix.outputs, width)


def suits(x: Tensor, w: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether the rows are few enough."""
    rows = x.numel() // max(1, x.shape[-1])
    return x.shape[-1] > 0 and rows <= MAX_ROWS, f"for up to {MAX_ROWS} rows, K above 0"


def suits_any(x: Tensor, w: Tensor, *_: object) -> tuple[bool, str]:
    """Say that any number of rows will do."""
    return x.shape[-1] > 0, "one tile for any number of rows, K above 0"


def result(x: Tensor, width: int, out: Outs) -> Tensor:
    """Return what the product [..., width] is written to."""
    return x.new_empty((*x.shape[:-1], width)) if out is None else out[0]


def run(x: Tensor, w: Tensor, bias: Out, *, out: Outs = None) -> Tensor:
    """Run ``linear``."""
    y = result(x, w.shape[0], out)
    multiply(Operands(op="linear", x=x, w=w, bias=bias), Results(y=y))
    return y


def run_residual(x: Tensor, w: Tensor, residual: Tensor, bias: Out, *, out: Outs = None, sink: Sink = None) -> Tensor:
    """Run ``linear_residual``."""
    y = result(x, w.shape[0], out)
    o = Operands(op="linear_residual", x=x, w=w, bias=bias, residual=residual)
    if sink is not None:
        sink.update(projected=torch.empty_like(y))
    multiply(o, Results(y=y, first=sink and sink["projected"]))
    return y


def run_norm(
    x: Tensor, norm_weight: Tensor, w: Tensor, bias: Out, eps: float, *, out: Outs = None, sink: Sink = None
) -> Tensor:
    """Run ``norm_linear``."""
    y = result(x, w.shape[0], out)
    o = Operands(op="norm_linear", x=x, w=w, bias=bias, gain=norm_weight, eps=eps)
    if sink is not None:
        sink.update(normed=x.new_empty(x.shape))
    multiply(o, Results(y=y, normed=sink and sink["normed"]))
    return y


def run_norm_swiglu(
    x: Tensor, norm_weight: Out, w: Tensor, bias: Out, eps: float, *, out: Outs = None, sink: Sink = None
) -> Tensor:
    """Run ``norm_linear_swiglu``."""
    y = result(x, w.shape[0] // 2, out)
    o = Operands(op="norm_linear_swiglu", x=x, w=w, bias=bias, gain=norm_weight, eps=eps, swiglu=True)
    if sink is not None:
        sink.update(
            normed=x.clone() if norm_weight is None else x.new_empty(x.shape),
            gate=torch.empty_like(y),
            up=torch.empty_like(y),
        )
    multiply(o, Results(y=y, normed=sink and sink["normed"], first=sink and sink["gate"], second=sink and sink["up"]))
    return y


def run_one_tiling(x: Tensor, w: Tensor, bias: Out, *, out: Outs = None) -> Tensor:
    """Run ``linear_one_tiling``: the tile of the largest number of rows, for every number."""
    y = result(x, w.shape[0], out)
    o = Operands(op="linear_one_tiling", x=x, w=w, bias=bias)
    multiply(o, Results(y=y), one_tiling(o.matrix, target_of(x.device)))
    return y


def one_tiling(matrix: Matrix, on: Target) -> Choice:
    """Return the one tile of a matrix."""
    tile = linear_choice.wide_tile(matrix, MAX_ROWS, on)
    constants = {name: size for name, size in tile.items() if name != "num_warps"}
    return Choice("tile", constants, tile["num_warps"], tile["STAGES"])


# ---- ahead of time

POINTERS = {
    "x_ptr": "x", "w_ptr": "w", "scale_ptr": "x", "minimum_ptr": "x", "gain_ptr": "x", "bias_ptr": "x",
    "residual_ptr": "x", "y_ptr": "x", "normed_ptr": "x", "first_ptr": "x", "second_ptr": "x", "best_ptr": "*fp32",
    "index_ptr": "*i32",
}  # fmt: skip
STRIDES = ("x_stride", "w_stride", "scale_stride", "minimum_stride", "residual_stride", "y_stride")


def case(
    matrix: Matrix, M: int, *present: str, w: str = "", group: int = 0, one_order: bool = False, tile: bool = False,
    on: Target = TARGETS["sm_90"],
) -> Compiled:  # fmt: skip
    """Return the case of a matrix with M rows as a target takes it; ``present``: the pointers besides x, w and y."""
    kind = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[matrix.dtype]
    choice = one_tiling(matrix, on) if tile else linear_choice.choose(matrix, M, on, "", one_order)
    types = {"x": kind, "w": w or kind}
    there = {"x_ptr", "w_ptr", *(f"{name}_ptr" for name in (*present, *(() if "best" in present else ("y",))))}
    signature = {name: types.get(of, of) for name, of in POINTERS.items() if name in there}
    constexprs = {name: None for name in POINTERS if name not in there}
    sizes = {"N": matrix.N, "K": matrix.K, "EPS": 1e-6, "SWIGLU": matrix.swiglu, "FORMAT": matrix.format}
    strides = dict.fromkeys(STRIDES, "i32:16")
    wgmma = choice.form == "tile" and matrix.dtype != torch.float32
    much = choice.form == "tile" and choice.constants["STAGES"] > 3
    uses = ("pdl", *("wgmma",) * wgmma, *("warps of 32",) * (choice.form == "mma"), *("much shared memory",) * much)
    if choice.form == "tile":
        signature |= {"parts_ptr": "*fp32", "done_ptr": "*i32"}
    return Compiled(
        KERNELS[choice.form], {**signature, "M": "i32", **strides},
        {**constexprs, **sizes, "GROUP": group, **choice.constants, "PDL": True}, choice.num_warps, choice.num_stages,
        uses,
    )  # fmt: skip


BF16, FP32 = torch.bfloat16, torch.float32


def _compiled() -> tuple[Compiled, ...]:
    qkv, o = Matrix("norm_linear", 1152, 896, BF16, normed=True), Matrix("linear_residual", 896, 896, BF16)
    gate_up = Matrix("norm_linear_swiglu", 9728, 896, BF16, swiglu=True, normed=True)
    down, long = Matrix("linear_residual", 896, 4864, BF16), Matrix("linear_residual", 1536, 8960, BF16)
    plain, wide = Matrix("linear", 896, 4864, BF16), Matrix("norm_linear", 4096, 1024, FP32, normed=True)
    return (
        *(case(qkv, M, "gain", "bias") for M in (1, 8, 32)),
        *(case(o, M, "residual") for M in (1, 8)),
        *(case(gate_up, M, "gain") for M in (1, 8, 64)),
        case(gate_up, 64, "gain", one_order=True),
        case(gate_up, 1, "gain", "normed", "first", "second"),
        *(case(down, M, "residual") for M in (1, 8, 32)),
        case(long, 1, "residual"),
        *(case(wide, M, "gain") for M in (1, 8)),
        case(gate_up, 8, "gain", on=TARGETS["gfx942"]),
        case(gate_up, 64, on=TARGETS["gfx942"]),
        case(gate_up, 64, on=TARGETS["sm_80"]),
        case(down, 64, "residual", on=TARGETS["sm_80"]),
        case(plain, 64, "bias"),
        case(plain, 512, "bias", tile=True),
        case(Matrix("linear", 896, 4864, FP32), 512, "bias", tile=True),
    )


COMPILED = _compiled()
