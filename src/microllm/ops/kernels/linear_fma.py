# ruff: noqa: RUF005 - Triton compiles no starred tuples
"""A linear with one row by fp32 multiply-adds, on the device: fastest for one, with sums that no other form has.

A program takes ROWS * REP outputs, REP of them to a thread, which share what is done to x. Tiles are
[ROWS, 1, BLOCK_K], one for each of the REP, so that x is loaded as weights are and needs no shared memory.

Place: launched by ``linear.multiply``; ``linear_forms`` has the form by matrix instructions, and says what is folded
in.

Axes:    M = rows, K = in, J = positions of a weight row (bytes of int4, else K), N = out, NY = N, or N / 2 with SwiGLU
PDL:     weights, scales, gain and bias are read before ``gdc_wait``, all else after; dependents start at once
"""

from __future__ import annotations

import triton
import triton.language as tl

from microllm.ops.kernels.codes import column, decoded
from microllm.ops.kernels.linear_forms import bias_of, finish, residual_of, row_scale, store_normed


@triton.jit
def _load_rows(at, stride, row, j, FIRST: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr, J: tl.constexpr,
               STEP: tl.constexpr, REP: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Return the tiles of steps FIRST to LAST, REP rows to a step, all in flight at once; EVEN: every row exists."""
    tiles = ()
    for i in tl.static_range(FIRST, LAST):
        for r in tl.static_range(REP):
            place, ok = at + r * stride + i * STEP, row + r < N
            if (i + 1) * STEP > J:
                ok = ok & (j + i * STEP < J)
                tiles = tiles + (tl.load(place, mask=ok, other=0, eviction_policy="evict_first"),)
            elif EVEN:
                tiles = tiles + (tl.load(place, eviction_policy="evict_first"),)
            else:
                tiles = tiles + (tl.load(place, mask=ok, other=0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_columns(at, j, J: tl.constexpr, STEP: tl.constexpr, PLANES: tl.constexpr):
    """Return the tiles of a row of x, or of the gain, PLANES of them to a step."""
    tiles = ()
    for i in tl.static_range((J + STEP - 1) // STEP):
        for plane in tl.static_range(PLANES):
            place = at + 16 * plane + i * STEP * PLANES
            if (i + 1) * STEP > J:
                tiles = tiles + (tl.load(place, mask=j + i * STEP < J, other=0),)
            else:
                tiles = tiles + (tl.load(place),)
    return tiles


@triton.jit
def _lane_sum(p, LANE: tl.constexpr):
    """Add the LANE neighbours that lie in one lane."""
    return tl.sum(tl.reshape(p, [p.shape[0], p.shape[1], p.shape[2] // LANE, LANE]), 3)


@triton.jit
def _of_groups(ptr, stride, first, i, N: tl.constexpr, J: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr,
               ROWS: tl.constexpr, REP: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return the scales (or minima) of step i's lanes, 16 positions each, [ROWS, 1, BLOCK_K / 16].

    There are as many as threads, and loaded in a line each thread loads its own.
    """
    LANES: tl.constexpr = BLOCK_K // 16
    thread = tl.arange(0, ROWS * LANES)
    row, block = first + thread // LANES * REP, i * LANES + thread % LANES
    at = ptr + row.to(tl.int64) * stride + block * (16 * PLANES) // GROUP
    value = tl.load(at, mask=(row < N) & (block * 16 < J), other=0).to(tl.float32)
    return tl.reshape(value, [ROWS, 1, LANES])


@triton.jit
def _added(sums, ws, xs, x_sum, first, scale_ptr, minimum_ptr, scale_stride, minimum_stride, i: tl.constexpr,
           N: tl.constexpr, J: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, REP: tl.constexpr):  # fmt: skip
    """Return REP sums with step i's products added, one for each LANE positions of a tile."""
    PLANES: tl.constexpr = len(xs)
    LANE: tl.constexpr = 8 if FORMAT == "plain" else 16
    ROWS: tl.constexpr = xs[0].shape[0]
    BLOCK_K: tl.constexpr = xs[0].shape[2]
    added = ()
    for r in tl.static_range(REP):
        p = _lane_sum(decoded(ws[i * REP + r], 0, FORMAT) * xs[0], LANE)
        if PLANES == 2:
            p += _lane_sum(decoded(ws[i * REP + r], 1, FORMAT) * xs[1], LANE)
        if GROUP > 0:
            p *= _of_groups(scale_ptr, scale_stride, first + r, i, N, J, GROUP, PLANES, ROWS, REP, BLOCK_K)
        if minimum_ptr is not None:
            p += x_sum * _of_groups(minimum_ptr, minimum_stride, first + r, i, N, J, GROUP, PLANES, ROWS, REP, BLOCK_K)
        added = added + (sums[r] + p,)
    return added


@triton.jit
def _fma_steps(ws, us, gs, x_at, jx, first, scale_ptr, minimum_ptr, scale_stride, minimum_stride, N: tl.constexpr,
               NY: tl.constexpr, J: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, REP: tl.constexpr,
               SWIGLU: tl.constexpr):  # fmt: skip
    """Return REP sums of w x, REP of u x, and those of x x, one for each LANE positions of a step's tile."""
    PLANES: tl.constexpr = 2 if FORMAT == "int4" else 1
    LANE: tl.constexpr = 8 if FORMAT == "plain" else 16
    BLOCK_K: tl.constexpr = jx.shape[2]
    squares = tl.zeros([jx.shape[0], 1, BLOCK_K // LANE], tl.float32)
    sums = ()
    for _ in tl.static_range(REP):
        sums = sums + (squares,)
    ups = sums
    loaded = _load_columns(x_at, jx, J, BLOCK_K, PLANES)
    for i in tl.static_range((J + BLOCK_K - 1) // BLOCK_K):
        xs = ()
        x_sum = 0.0
        for plane in tl.static_range(PLANES):
            x = loaded[i * PLANES + plane].to(tl.float32)
            if len(gs) > 0:
                squares += _lane_sum(x * x, LANE)
                x = x * gs[i * PLANES + plane].to(tl.float32)
            if minimum_ptr is not None:
                x_sum += _lane_sum(x, LANE)
            xs = xs + (x,)
        sums = _added(sums, ws, xs, x_sum, first, scale_ptr, minimum_ptr, scale_stride, minimum_stride, i, N, J,
                      FORMAT, GROUP, REP)  # fmt: skip
        if SWIGLU:
            ups = _added(ups, us, xs, x_sum, first + NY, scale_ptr, minimum_ptr, scale_stride, minimum_stride, i, N, J,
                         FORMAT, GROUP, REP)  # fmt: skip
    return sums, ups, squares


@triton.jit
def _side_by_side(sums, FIRST: tl.constexpr, REP: tl.constexpr):
    """Return the totals of REP sums from FIRST on, [ROWS, REP]: those of a thread's rows one after the other."""
    if REP == 1:
        return tl.sum(sums[FIRST], 2)
    else:
        even, odd = _side_by_side(sums, FIRST, REP // 2), _side_by_side(sums, FIRST + REP // 2, REP // 2)
        both = tl.permute(tl.join(even, odd), [0, 2, 1])
        return tl.reshape(both, [both.shape[0], REP])


@triton.jit(do_not_specialize=["M"])
def fma_kernel(
    x_ptr, w_ptr, scale_ptr, minimum_ptr, gain_ptr, bias_ptr, residual_ptr, y_ptr, normed_ptr, first_ptr, second_ptr,
    best_ptr, index_ptr, M, x_stride, w_stride, scale_stride, minimum_stride, residual_stride, y_stride,
    N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, SWIGLU: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, REP: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row of x a program of ROWS * REP outputs; grid (tiles of NY, M); ROWS = threads * lane width / BLOCK_K.

    Order:   lanes sum their columns step by step, then lanes, then warps
    """
    J: tl.constexpr = K // 2 if FORMAT == "int4" else K
    PLANES: tl.constexpr = 2 if FORMAT == "int4" else 1
    STEPS: tl.constexpr = (J + BLOCK_K - 1) // BLOCK_K
    NY: tl.constexpr = N // 2 if SWIGLU else N
    BY: tl.constexpr = ROWS * REP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BY
    jx = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, None, :], [ROWS, 1, BLOCK_K])
    row = (first + tl.arange(0, ROWS) * REP)[:, None, None]
    stride = tl.cast(w_stride, tl.int64)
    w_at = w_ptr + row.to(tl.int64) * stride + jx
    ws = _load_rows(w_at, stride, row, jx, 0, EARLY, N, J, BLOCK_K, REP, NY % BY == 0)
    us = ()
    if SWIGLU:
        us = _load_rows(w_at + stride * NY, stride, row + NY, jx, 0, EARLY, N, J, BLOCK_K, REP, NY % BY == 0)
    gs = ()
    if gain_ptr is not None:
        gs = _load_columns(gain_ptr + column(jx, FORMAT), jx, J, BLOCK_K, PLANES)
    m = tl.full([1, 1], 0, tl.int32) + tl.program_id(1)
    n = first + tl.arange(0, BY)[:, None]
    add, up_add = bias_of(bias_ptr, n, NY, SWIGLU)
    factor = row_scale(scale_ptr, scale_stride, n, N, GROUP)
    up_factor = row_scale(scale_ptr, scale_stride, n + NY, N, GROUP) if SWIGLU else 1.0
    if PDL:
        tl.extra.cuda.gdc_wait()
    ws = ws + _load_rows(w_at, stride, row, jx, EARLY, STEPS, N, J, BLOCK_K, REP, NY % BY == 0)
    if SWIGLU:
        us = us + _load_rows(w_at + stride * NY, stride, row + NY, jx, EARLY, STEPS, N, J, BLOCK_K, REP, NY % BY == 0)
    residual = residual_of(residual_ptr, residual_stride, m, n, M, NY)
    x_at = x_ptr + tl.program_id(1).to(tl.int64) * x_stride + column(jx, FORMAT)
    sums, ups, squares = _fma_steps(ws, us, gs, x_at, jx, first, scale_ptr, minimum_ptr, scale_stride, minimum_stride,
                                    N, NY, J, FORMAT, GROUP, REP, SWIGLU)  # fmt: skip
    if gain_ptr is not None:
        square = tl.max(tl.max(tl.sum(squares, 2), 1), 0)
        scale = tl.rsqrt(square * (1.0 / K) + EPS)
        factor, up_factor = factor * scale, up_factor * scale
        if normed_ptr is not None and first == 0:
            store_normed(normed_ptr, x_ptr, x_stride, gain_ptr, tl.full([1, 1], 0.0, tl.float32) + scale, m, M, K)
    y = tl.reshape(_side_by_side(sums, 0, REP), [BY, 1]) * factor + add
    other = tl.reshape(_side_by_side(ups, 0, REP), [BY, 1]) * up_factor + up_add if SWIGLU else None
    finish(y, other, residual, m, n, M, y_ptr, y_stride, first_ptr, second_ptr, best_ptr, index_ptr, NY,
            (NY + BY - 1) // BY, x_ptr.dtype.element_ty)  # fmt: skip
