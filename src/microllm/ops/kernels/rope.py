"""RoPE of q and k in one launch, alone or after a norm of each head.

A row is one head of one token; a program rotates a tile of rows of q or of k. What lies past the rotated extent is
copied. The tile follows from D and P alone, so that a row's bits do not depend on the number of rows.

Axes:    B = batch, T = tokens, H = query heads, G = KV heads, D = head dim, P = pairs, C = positions of a table
Bytes:   q and k read once and written once; the angles of a token are read from cache for all its heads
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from microllm.ops.contract import Out, Outs, Sink
from microllm.ops.kernels.launch import Compiled, overlapping, pdl

MAX_D = 1024
"""Widest head that a tile holds."""


@triton.jit
def _rotate(
    program, x_ptr, w_ptr, y_ptr, normed_ptr, x_b, x_t, x_h, y_b, y_t, y_h, cos_ptr, sin_ptr, positions_ptr,
    angle_b, angle_t, position_b, B, T, C, eps, HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate rows program * ROWS and on of x [B, T, HEADS, D] into y."""
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < B * T * HEADS
    token = row // HEADS
    head, b, t = (row % HEADS).to(tl.int64), (token // T).to(tl.int64), (token % T).to(tl.int64)
    x_row = x_ptr + b * x_b + t * x_t + head * x_h
    y_row = y_ptr + b * y_b + t * y_t + head * y_h
    p = tl.arange(0, PAIRS)[None, :]
    first = 2 * p if INTERLEAVED else p
    second = first + (1 if INTERLEAVED else P)
    ok = live & (p < P)
    a1 = tl.load(x_row + first, mask=ok, other=0.0).to(tl.float32)
    a2 = tl.load(x_row + second, mask=ok, other=0.0).to(tl.float32)
    if REST > 0:
        r = 2 * P + tl.arange(0, REST)[None, :]
        rest_ok = live & (r < D)
        rest = tl.load(x_row + r, mask=rest_ok, other=0.0)
    if w_ptr is not None:
        square = tl.sum(a1 * a1 + a2 * a2, axis=1, keep_dims=True)
        if REST > 0:
            rest32 = rest.to(tl.float32)
            square += tl.sum(rest32 * rest32, axis=1, keep_dims=True)
        scale = tl.rsqrt(square * (1.0 / D) + tl.cast(eps, tl.float32))
        a1 = _scaled(a1, scale, w_ptr + first, p < P, y_ptr)
        a2 = _scaled(a2, scale, w_ptr + second, p < P, y_ptr)
        if REST > 0:
            rest = _scaled(rest32, scale, w_ptr + r, r < D, y_ptr).to(y_ptr.dtype.element_ty)
        if normed_ptr is not None:
            normed_row = normed_ptr + row.to(tl.int64) * D
            tl.store(normed_row + first, a1.to(y_ptr.dtype.element_ty), mask=ok)
            tl.store(normed_row + second, a2.to(y_ptr.dtype.element_ty), mask=ok)
            if REST > 0:
                tl.store(normed_row + r, rest, mask=rest_ok)
    angle = _angle(positions_ptr, b, t, angle_b, angle_t, position_b, C, live)
    cos = tl.load(cos_ptr + angle + p, mask=ok, other=0.0)
    sin = tl.load(sin_ptr + angle + p, mask=ok, other=0.0)
    if INVERSE:
        sin = -sin
    tl.store(y_row + first, (a1 * cos - a2 * sin).to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(y_row + second, (a2 * cos + a1 * sin).to(y_ptr.dtype.element_ty), mask=ok)
    if REST > 0:
        tl.store(y_row + r, rest, mask=rest_ok)


@triton.jit
def _angle(positions_ptr, b, t, angle_b, angle_t, position_b, C, live):
    """Return where the angles of token t of row b begin; of a bad position, somewhere in the table all the same."""
    if positions_ptr is not None:
        at = tl.load(positions_ptr + b * position_b + t, mask=live, other=0)
        place = tl.minimum(tl.maximum(at, 0), C - 1) * angle_t
    else:
        place = b * angle_b + t * angle_t
    return place


@triton.jit
def _scaled(x, scale, w_ptr, ok, like_ptr):
    """Return x * scale, rounded, * w, rounded, in fp32."""
    w = tl.load(w_ptr, mask=ok, other=0.0).to(tl.float32)
    normed = (x * scale).to(like_ptr.dtype.element_ty).to(tl.float32)
    return (normed * w).to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["B", "T", "C"])
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, q_normed_ptr, k_normed_ptr,
    cos_ptr, sin_ptr, positions_ptr, q_b, q_t, q_h, k_b, k_t, k_h, qo_b, qo_t, qo_h, ko_b, ko_t, ko_h,
    angle_b, angle_t, position_b, B, T, C, eps, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """q_out, k_out = rope of q, k (normed where weights are given); grid (tiles of q's rows, then tiles of k's,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    of_q = tl.cdiv(B * T * H, ROWS)
    if program < of_q:
        _rotate(
            program, q_ptr, q_weight_ptr, q_out_ptr, q_normed_ptr, q_b, q_t, q_h, qo_b, qo_t, qo_h,
            cos_ptr, sin_ptr, positions_ptr, angle_b, angle_t, position_b, B, T, C, eps,
            H, D, P, INTERLEAVED, INVERSE, PAIRS, REST, ROWS,
        )  # fmt: skip
    else:
        _rotate(
            program - of_q, k_ptr, k_weight_ptr, k_out_ptr, k_normed_ptr, k_b, k_t, k_h, ko_b, ko_t, ko_h,
            cos_ptr, sin_ptr, positions_ptr, angle_b, angle_t, position_b, B, T, C, eps,
            G, D, P, INTERLEAVED, INVERSE, PAIRS, REST, ROWS,
        )  # fmt: skip


def _sizes(D: int, P: int) -> dict[str, int]:
    """Return a tile's padded pairs, padded rest, and rows."""
    pairs, rest = triton.next_power_of_2(P), D - 2 * P
    padded = triton.next_power_of_2(rest) if rest else 0
    return {"PAIRS": pairs, "REST": padded, "ROWS": 2048 // triton.next_power_of_2(2 * pairs + padded)}


def suits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object) -> tuple[bool, str]:
    """Say whether a head fits into a tile, and one pair of strides is that of both angles."""
    fits = q.shape[-1] <= MAX_D and cos.shape[-1] > 0 and max(q.numel(), k.numel()) < 2**31
    return fits and cos.stride() == sin.stride(), (
        f"heads of at most {MAX_D} with a pair or more, fewer than 2^31 elements, cos and sin laid out alike"
    )


def run(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Out, interleaved: bool, inverse: bool, *,
    out: Outs = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run ``rope``."""
    outs = _outs(q, k) if out is None else out
    _launch((q, k), outs, (None, None), (None, None), (cos, sin, positions), 0.0, (interleaved, inverse))
    return outs[0], outs[1]


def run_normed(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Out, q_weight: Tensor, k_weight: Tensor, eps: float,
    interleaved: bool, *, out: Outs = None, sink: Sink = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run ``qk_norm_rope``."""
    outs = _outs(q, k) if out is None else out
    normed: tuple[Any, Any] = (None, None)
    if sink is not None:
        normed = _outs(q, k)
        sink.update(q_normed=normed[0], k_normed=normed[1])
    _launch((q, k), outs, (q_weight, k_weight), normed, (cos, sin, positions), eps, (interleaved, False))
    return outs[0], outs[1]


def _outs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _launch(
    heads: tuple[Tensor, Tensor], outs: tuple[Tensor, ...], weights: tuple[Out, Out], normed: tuple[Out, Out],
    angles: tuple[Tensor, Tensor, Out], eps: float, flags: tuple[bool, bool],
) -> None:  # fmt: skip
    (q, k), (cos, sin, positions), (interleaved, inverse) = heads, angles, flags
    (B, T, H, D), G, P = q.shape, k.shape[2], cos.shape[-1]
    sizes = _sizes(D, P)
    tiles = sum(triton.cdiv(B * T * n, sizes["ROWS"]) for n in (H, G))
    if not tiles:
        return
    if positions is None:
        angle_strides, position_b, C = cos.stride()[:2], 0, 0
    else:
        angle_strides, position_b, C = (0, cos.stride(0)), positions.stride(0), cos.shape[0]
    overlap = pdl(q.device)
    rope_kernel[(tiles,)](
        q, k, *outs, *weights, *normed, cos, sin, positions, *q.stride()[:3], *k.stride()[:3],
        *outs[0].stride()[:3], *outs[1].stride()[:3], *angle_strides, position_b, B, T, C, eps,
        H=H, G=G, D=D, P=P, INTERLEAVED=interleaved, INVERSE=inverse, PDL=overlap, **sizes, **overlapping(overlap),
    )  # fmt: skip


def _case(dtype: str, D: int, P: int, *, norm: bool, table: bool, interleaved: bool = False) -> Compiled:
    weights = ("q_weight_ptr", "k_weight_ptr")
    absent = [f"{x}_normed_ptr" for x in "qk"] + [*(() if norm else weights)] + ["positions_ptr"] * (not table)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", *(weights if norm else ())), dtype)
    pointers |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"} | ({"positions_ptr": "*i64"} if table else {})
    strides = [f"{name}_{axis}" for name in ("q", "k", "qo", "ko") for axis in "bth"] + ["angle_b", "angle_t"]
    numbers = dict.fromkeys(strides, "i32:16") | dict.fromkeys(("position_b", "B", "T", "C"), "i32") | {"eps": "fp32"}
    sizes = {"H": 14, "G": 2, "D": D, "P": P, "INTERLEAVED": interleaved, "INVERSE": False, "PDL": True, **_sizes(D, P)}
    return Compiled(rope_kernel, pointers | numbers, dict.fromkeys(absent) | sizes, uses=("pdl",))


COMPILED = (
    _case("*bf16", 64, 32, norm=False, table=False),
    _case("*bf16", 128, 64, norm=False, table=True),
    _case("*bf16", 128, 64, norm=True, table=True),
    _case("*fp32", 128, 64, norm=True, table=False),
    _case("*bf16", 128, 32, norm=True, table=False, interleaved=True),
)
