# ruff: noqa: RUF005 - Triton compiles no starred tuples
"""A linear with few rows by matrix instructions, on the device: y[m, n] = epilogue(sum over k of x[m, k] * w[n, k]).

They are fed straight from global memory, weights on their first (M) side. A lane's 16-byte load of a weight row is its
operand fragment (K is permuted inside blocks, in x alike), so that weights see no shared memory and no barrier. The
warps of a program split K and are added in a fixed tree. One K order for every number of rows: a row's bits depend on
(WARPS_K, KB, SUMS) alone, not on its neighbours nor on BLOCK_M and BLOCK_N.

Place: launched by ``linear.multiply``, which has the choice of form and tiles; ``linear_fma`` is the other form, and
takes what both share from here. Measured as experiment no. 1.

RMSNorm is folded in: x times the gain is what is multiplied (rounded to x's dtype, which must hold it), each program
sums the squares of its rows, and outputs are scaled at the end. Weights of one byte or half a byte are decoded in
registers (``codes``): one scale a row is applied to the sum, scales of groups to each weight.

Axes:    M = rows, K = in, J = positions of a weight row (bytes of int4, else K), N = out, NY = N, or N / 2 with SwiGLU
PDL:     weights, scales, gain and bias are read before ``gdc_wait``, all else after; dependents start at once
"""

from __future__ import annotations

import triton
import triton.language as tl

from microllm.ops.kernels.codes import column, decoded


@triton.constexpr_function
def _least(a, b):
    return min(a, b)


@triton.constexpr_function
def _most(a, b):
    return max(a, b)


@triton.jit
def first_largest(v, n, AXIS: tl.constexpr):
    """Return the largest value along AXIS and the least n that has it; (inf, -1) where a value is NaN or inf."""
    good = v < float("inf")
    v = tl.where(good, v, float("-inf"))
    first = tl.min(tl.where(v == tl.max(v, AXIS, keep_dims=True), n, 2147483647), AXIS)
    bad = tl.min(good.to(tl.int32), AXIS) == 0
    return tl.where(bad, float("inf"), tl.max(v, AXIS)), tl.where(bad, -1, first)


@triton.jit
def _load_steps(at, ok, j, FIRST: tl.constexpr, LAST: tl.constexpr, J: tl.constexpr, STEP: tl.constexpr,
                STRIDE: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """Return the tiles of steps FIRST to LAST as a tuple, all in flight at once; EVEN: every row exists."""
    tiles = ()
    for i in tl.static_range(FIRST, LAST):
        if (i + 1) * STEP > J:
            ok_j = ok & (j + i * STEP < J)
            tiles = tiles + (tl.load(at + i * STRIDE, mask=ok_j, other=0, eviction_policy=EVICT),)
        elif EVEN:
            tiles = tiles + (tl.load(at + i * STRIDE, eviction_policy=EVICT),)
        else:
            tiles = tiles + (tl.load(at + i * STRIDE, mask=ok, other=0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def bias_of(bias_ptr, n, NY: tl.constexpr, SWIGLU: tl.constexpr):
    """Return what is added to the products of rows n, and to those of rows NY + n."""
    add = 0.0
    up_add = 0.0
    if bias_ptr is not None:
        add = tl.load(bias_ptr + n, mask=n < NY, other=0).to(tl.float32)
        if SWIGLU:
            up_add = tl.load(bias_ptr + NY + n, mask=n < NY, other=0).to(tl.float32)
    return add, up_add


@triton.jit
def row_scale(scale_ptr, scale_stride, n, NY: tl.constexpr, GROUP: tl.constexpr):
    """Return what the sums of rows n are multiplied by: their scale, where each has one."""
    factor = 1.0
    if scale_ptr is not None and GROUP == 0:
        factor = tl.load(scale_ptr + n.to(tl.int64) * scale_stride, mask=n < NY, other=0).to(tl.float32)
    return factor


@triton.jit
def residual_of(residual_ptr, residual_stride, m, n, M, NY: tl.constexpr):
    """Return the residual of outputs (n, m), or zero."""
    residual = 0.0
    if residual_ptr is not None:
        at = residual_ptr + m.to(tl.int64) * residual_stride + n
        residual = tl.load(at, mask=(m < M) & (n < NY), other=0).to(tl.float32)
    return residual


@triton.jit
def finish(y, up, residual, m, n, M, y_ptr, y_stride, first_ptr, second_ptr, best_ptr, index_ptr,
            NY: tl.constexpr, NUM_TILES: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Activate, add the residual, round once and store; y [n, m], the sinks [M, NY], best and index [M, NUM_TILES]."""
    ok = (m < M) & (n < NY)
    at = m.to(tl.int64) * NY + n
    if first_ptr is not None:
        tl.store(first_ptr + at, y.to(DTYPE), mask=ok)
    if up is not None:
        if second_ptr is not None:
            tl.store(second_ptr + at, up.to(DTYPE), mask=ok)
        y = y / (1.0 + tl.exp(-y)) * up
    out = (y + residual).to(DTYPE)
    if y_ptr is not None:
        tl.store(y_ptr + m.to(tl.int64) * y_stride + n, out, mask=ok)
    if best_ptr is not None:
        best, index = first_largest(tl.where(n < NY, out.to(tl.float32), float("-inf")), n, 0)
        rows = tl.reshape(m, [m.shape[1]])
        at = rows.to(tl.int64) * NUM_TILES + tl.program_id(0)
        tl.store(best_ptr + at, best, mask=rows < M)
        tl.store(index_ptr + at, index, mask=rows < M)


@triton.jit
def store_normed(normed_ptr, x_ptr, x_stride, gain_ptr, scale, m, M, K: tl.constexpr):
    """Write the normed rows m: what the first program of a row does for the diagnostic form."""
    for k0 in tl.static_range(0, K, 128):
        k = k0 + tl.arange(0, 128)[:, None]
        ok = (k < K) & (m < M)
        x = tl.load(x_ptr + m.to(tl.int64) * x_stride + k, mask=ok, other=0).to(tl.float32)
        gain = tl.load(gain_ptr + k, mask=k < K, other=0).to(tl.float32)
        tl.store(normed_ptr + m.to(tl.int64) * K + k, (x * scale * gain).to(x_ptr.dtype.element_ty), mask=ok)


# ---- matrix instructions


@triton.jit
def _fragment(WARPS_K: tl.constexpr, KB: tl.constexpr, LANE: tl.constexpr):
    """Return row g of a row-block, a lane's first position and all of them, over [t4, g8, WARPS_K, R, KB, LANE].

    This order of dimensions is the one that Triton spreads over lanes (t, g), then warps, then registers, the last one
    contiguous: lane (g, t) loads LANE neighbours of row g. Another order is as right, by way of shared memory.
    """
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None]
    warp = tl.arange(0, WARPS_K)[None, None, :, None, None, None]
    kb = tl.arange(0, KB)[None, None, None, None, :, None]
    first = ((warp * KB + kb) * 4 + t) * LANE
    return g, first, first + tl.arange(0, LANE)[None, None, None, None, None, :]


@triton.jit
def _as_rows(tile, WARPS_K: tl.constexpr, R: tl.constexpr, KB: tl.constexpr, LANE: tl.constexpr):
    """Fragment tile -> first operand [WARPS_K, 8 R, 4 LANE KB]; a lane's elements are (k16 step, k half, pair)."""
    tile = tl.reshape(tile, [4, 8, WARPS_K, R, KB, LANE // 4, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 3, 1, 4, 5, 6, 0, 7]), [WARPS_K, R * 8, KB * 4 * LANE])


@triton.jit
def _as_columns(tile, WARPS_K: tl.constexpr, R: tl.constexpr, KB: tl.constexpr, LANE: tl.constexpr):
    """Fragment tile -> second operand [WARPS_K, 4 LANE KB, 8 R], the same order of K."""
    tile = tl.reshape(tile, [4, 8, WARPS_K, R, KB, LANE // 4, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 4, 5, 6, 0, 7, 3, 1]), [WARPS_K, KB * 4 * LANE, R * 8])


@triton.jit
def _load_x(x_at, ok, j, FIRST: tl.constexpr, LAST: tl.constexpr, J: tl.constexpr, STEP: tl.constexpr,
            PLANES: tl.constexpr):  # fmt: skip
    """Return x's tiles of steps FIRST to LAST, PLANES to a step."""
    tiles = ()
    for i in tl.static_range(FIRST, LAST):
        for plane in tl.static_range(PLANES):
            at = x_at + i * STEP * PLANES + 16 * plane
            tiles = tiles + (tl.load(at, mask=ok & (j + i * STEP < J), other=0),)
    return tiles


@triton.jit
def _weights(raw, plane: tl.constexpr, scale_at, minimum_at, ok, block, i: tl.constexpr, J: tl.constexpr,
             STEP: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Return step i's weights in x's dtype: as they are, codes, or with groups codes * scale (+ minimum) rounded."""
    if FORMAT == "plain":
        return raw
    PLANES: tl.constexpr = 2 if FORMAT == "int4" else 1
    w = decoded(raw, plane, FORMAT)
    if GROUP > 0:
        group = (block + i * STEP) * PLANES // GROUP
        exists = ok & (block + i * STEP < J)
        w = w * tl.load(scale_at + group, mask=exists, other=0).to(tl.float32)
        if minimum_at is not None:
            w = w + tl.load(minimum_at + group, mask=exists, other=0).to(tl.float32)
    return w.to(DTYPE)


@triton.jit
def _mma_steps(ws, w_at, ok_w, x_at, ok_x, block, j, gain_ptr, scale_at, minimum_at, J: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS_K: tl.constexpr, KB: tl.constexpr,
               SUMS: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
               FORMAT: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Return the products [BLOCK_N, BLOCK_M] and the squares of x's rows [8, BLOCK_M / 8]; x is loaded AHEAD steps on.

    Order:   step i belongs to sum i % SUMS, then (0 + 1) + (2 + 3), then warps
    """
    PLANES: tl.constexpr = 2 if FORMAT == "int4" else 1
    LANE: tl.constexpr = 8 if FORMAT == "plain" else 16
    STEP: tl.constexpr = 4 * LANE * WARPS_K * KB
    STEPS: tl.constexpr = (J + STEP - 1) // STEP
    ws = ws + _load_steps(w_at, ok_w, j, EARLY, _most(AHEAD, EARLY), J, STEP, STEP, EVEN, "evict_first")
    xs = _load_x(x_at, ok_x, j, 0, AHEAD, J, STEP, PLANES)
    accs = ()
    for _ in tl.static_range(SUMS):
        accs = accs + (tl.zeros([WARPS_K, BLOCK_N, BLOCK_M], tl.float32),)
    squares = tl.zeros([4, 8, WARPS_K, BLOCK_M // 8], tl.float32)
    for c in tl.static_range(0, STEPS, AHEAD):
        ws = ws + _load_steps(w_at, ok_w, j, _most(_least(c + AHEAD, STEPS), EARLY),
                              _most(_least(c + 2 * AHEAD, STEPS), EARLY), J, STEP, STEP, EVEN,
                              "evict_first")  # fmt: skip
        later = _load_x(x_at, ok_x, j, _least(c + AHEAD, STEPS), _least(c + 2 * AHEAD, STEPS), J, STEP, PLANES)
        for i in tl.static_range(c, _least(c + AHEAD, STEPS)):
            for plane in tl.static_range(PLANES):
                x = xs[(i - c) * PLANES + plane]
                if gain_ptr is not None:
                    wide = x.to(tl.float32)
                    squares += tl.sum(tl.sum(wide * wide, 5), 4)
                    at = gain_ptr + column(j, FORMAT) + i * STEP * PLANES + 16 * plane
                    gain = tl.load(at, mask=j + i * STEP < J, other=0).to(tl.float32)
                    x = (wide * gain).to(DTYPE)
                w = _weights(ws[i], plane, scale_at, minimum_at, ok_w, block, i, J, STEP, FORMAT, GROUP, DTYPE)
                a = _as_rows(w, WARPS_K, BLOCK_N // 8, KB, LANE)
                b = _as_columns(x, WARPS_K, BLOCK_M // 8, KB, LANE)
                added = ()
                for s in tl.static_range(SUMS):
                    if i % SUMS == s:
                        added = added + (tl.dot(a, b, accs[s], input_precision="ieee"),)
                    else:
                        added = added + (accs[s],)
                accs = added
        xs = later
    acc = accs[0]
    if SUMS == 2:
        acc = accs[0] + accs[1]
    if SUMS == 4:
        acc = (accs[0] + accs[1]) + (accs[2] + accs[3])
    return tl.sum(acc, 0), tl.sum(tl.sum(squares, 2), 0)


@triton.jit(do_not_specialize=["M"])
def mma_kernel(
    x_ptr, w_ptr, scale_ptr, minimum_ptr, gain_ptr, bias_ptr, residual_ptr, y_ptr, normed_ptr, first_ptr, second_ptr,
    best_ptr, index_ptr, M, x_stride, w_stride, scale_stride, minimum_stride, residual_stride, y_stride,
    N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, SWIGLU: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS_K: tl.constexpr, KB: tl.constexpr,
    SUMS: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N weight rows (with SwiGLU half gate, half up) by BLOCK_M rows of x; grid (tiles of NY, tiles of M).

    WARPS_K warps. EARLY steps of weights are loaded before the wait.
    """
    LANE: tl.constexpr = 8 if FORMAT == "plain" else 16
    J: tl.constexpr = K // 2 if FORMAT == "int4" else K
    NY: tl.constexpr = N // 2 if SWIGLU else N
    BY: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    STEP: tl.constexpr = 4 * LANE * WARPS_K * KB
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BY
    g, block, j = _fragment(WARPS_K, KB, LANE)
    r = tl.arange(0, BLOCK_N // 8)[None, None, None, :, None, None]
    # with SwiGLU row-blocks are gate and up in turn, so that both halves of an output meet in one lane
    own = first + (r // 2 if SWIGLU else r) * 8 + g
    row = own + (r % 2) * NY if SWIGLU else own
    w_at = w_ptr + row.to(tl.int64) * w_stride + j
    ws = _load_steps(w_at, own < NY, j, 0, EARLY, J, STEP, STEP, NY % BY == 0, "evict_first")
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M // 8)[None, None, None, :, None, None] * 8 + g
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    n = first + tl.arange(0, BY)[:, None]
    add, up_add = bias_of(bias_ptr, n, NY, SWIGLU)
    factor = row_scale(scale_ptr, scale_stride, n, N, GROUP)
    up_factor = row_scale(scale_ptr, scale_stride, n + NY, N, GROUP) if SWIGLU else 1.0
    scale_at = scale_ptr + row.to(tl.int64) * scale_stride if GROUP > 0 else None
    minimum_at = minimum_ptr + row.to(tl.int64) * minimum_stride if minimum_ptr is not None else None
    if PDL:
        tl.extra.cuda.gdc_wait()
    residual = residual_of(residual_ptr, residual_stride, m, n, M, NY)
    x_at = x_ptr + rows.to(tl.int64) * x_stride + column(j, FORMAT)
    y, squares = _mma_steps(ws, w_at, own < NY, x_at, rows < M, block, j, gain_ptr, scale_at, minimum_at, J, BLOCK_M,
                            BLOCK_N, WARPS_K, KB, SUMS, EARLY, AHEAD, NY % BY == 0, FORMAT, GROUP,
                            x_ptr.dtype.element_ty)  # fmt: skip
    if gain_ptr is not None:
        scale = tl.rsqrt(tl.reshape(tl.permute(squares, [1, 0]), [1, BLOCK_M]) * (1.0 / K) + EPS)
        factor, up_factor = factor * scale, up_factor * scale
        if normed_ptr is not None and first == 0:
            store_normed(normed_ptr, x_ptr, x_stride, gain_ptr, scale, m, M, K)
    up = None
    if SWIGLU:
        y, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1]))
        y, up = tl.reshape(y, [BY, BLOCK_M]), tl.reshape(up, [BY, BLOCK_M]) * up_factor + up_add
    finish(y * factor + add, up, residual, m, n, M, y_ptr, y_stride, first_ptr, second_ptr, best_ptr, index_ptr, NY,
            (NY + BY - 1) // BY, x_ptr.dtype.element_ty)  # fmt: skip
