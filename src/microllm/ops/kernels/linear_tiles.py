"""The form of a linear with many rows, on the device: tiles through shared memory, weights on the first (M) side.

Place: mode B's prefill (one tile for any number of rows), prefill rows of quantised weights, and wide matrices from 17
rows on, and narrow ones, whose K programs then share: who ends last adds their parts, always in one order. Launched by
``linear.multiply``.

Axes:    M = rows, K = in, J = positions of a weight row (bytes of int4, else K), N = out, NY = N, or N / 2 with SwiGLU
Numbers: operands in x's dtype (codes are exact in it; of groups codes * scale + minimum is rounded to it), fp32 sums
"""

from __future__ import annotations

import triton
import triton.language as tl

from microllm.ops.kernels.codes import column, decoded
from microllm.ops.kernels.linear_forms import bias_of, finish, residual_of, row_scale, store_normed


@triton.jit
def _group_values(ptr, stride, row, ok, j0, J: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
                  BLOCK_K: tl.constexpr):  # fmt: skip
    """Return scales (or minima) of the positions from j0 on: one load for each 16, [rows, BLOCK_K]."""
    block = j0 // 16 + tl.arange(0, BLOCK_K // 16)[None, :]
    at = ptr + row.to(tl.int64) * stride + block * (16 * PLANES) // GROUP
    value = tl.load(at, mask=ok & (block * 16 < J), other=0).to(tl.float32)
    wide = tl.broadcast_to(value[:, :, None], [value.shape[0], value.shape[1], 16])
    return tl.reshape(wide, [value.shape[0], BLOCK_K])


@triton.jit
def _tile_weights(raw, plane: tl.constexpr, scale_ptr, scale_stride, minimum_ptr, minimum_stride, row, ok, j0,
                  J: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Return a tile of weights in x's dtype."""
    if FORMAT == "plain":
        w = raw
    else:
        PLANES: tl.constexpr = 2 if FORMAT == "int4" else 1
        BLOCK_K: tl.constexpr = raw.shape[1]
        wide = decoded(raw, plane, FORMAT)
        if GROUP > 0:
            wide = wide * _group_values(scale_ptr, scale_stride, row, ok, j0, J, PLANES, GROUP, BLOCK_K)
            if minimum_ptr is not None:
                wide += _group_values(minimum_ptr, minimum_stride, row, ok, j0, J, PLANES, GROUP, BLOCK_K)
        w = wide.to(DTYPE)
    return w


@triton.jit
def _joined(acc, parts_ptr, done_ptr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Leave this program's part; return the sum of all in their order, and whether this program uses it."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    at = parts_ptr + tile * SPLIT * BLOCK_N * BLOCK_M + place
    tl.store(at + tl.program_id(2) * BLOCK_N * BLOCK_M, acc)
    tl.debug_barrier()  # every thread's part before the one that tells the others
    last = tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        acc = tl.load(at)
        for part in tl.static_range(1, SPLIT):
            acc += tl.load(at + part * BLOCK_N * BLOCK_M)
        tl.store(done_ptr + tile, 0)
    return acc, last


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x_ptr, w_ptr, scale_ptr, minimum_ptr, gain_ptr, bias_ptr, residual_ptr, y_ptr, normed_ptr, first_ptr, second_ptr,
    best_ptr, index_ptr, parts_ptr, done_ptr, M, x_stride, w_stride, scale_stride, minimum_stride, residual_stride,
    y_stride,
    N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, SWIGLU: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs by BLOCK_M rows; grid (tiles of NY, of M, SPLIT). With SwiGLU the gate's and up's rows in turn.

    Parts:   [tiles, SPLIT, BLOCK_N, BLOCK_M] where SPLIT is above 1 (no gain, no SwiGLU); ``done`` is 0 before, after
    """
    J: tl.constexpr = K // 2 if FORMAT == "int4" else K
    NY: tl.constexpr = N // 2 if SWIGLU else N
    PLANES: tl.constexpr = 2 if FORMAT == "int4" else 1
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    j = tl.arange(0, BLOCK_K)
    w_at = w_ptr + n.to(tl.int64) * w_stride + j[None, :]
    u_at = w_at + tl.cast(w_stride, tl.int64) * NY
    x_at = x_ptr + m.to(tl.int64) * x_stride + column(j, FORMAT)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = acc
    squares = tl.zeros([BLOCK_M], tl.float32)
    SPAN: tl.constexpr = ((J + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    begin = tl.program_id(2) * SPAN
    for j0 in tl.range(begin, tl.minimum(begin + SPAN, J), BLOCK_K, num_stages=STAGES):
        ok_w = (n < NY) & (j0 + j < J)[None, :]
        raw = tl.load(w_at + j0, mask=ok_w, other=0)
        up_raw = tl.load(u_at + j0, mask=ok_w, other=0) if SWIGLU else raw
        for plane in tl.static_range(PLANES):
            ok_x = (m < M) & (j0 + j < J)[:, None]
            x = tl.load(x_at + j0 * PLANES + 16 * plane, mask=ok_x, other=0)
            if gain_ptr is not None:
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, 0)
                gain_at = gain_ptr + column(j, FORMAT) + j0 * PLANES + 16 * plane
                gain = tl.load(gain_at, mask=j0 + j < J, other=0).to(tl.float32)
                x = (wide * gain[:, None]).to(DTYPE)
            w = _tile_weights(raw, plane, scale_ptr, scale_stride, minimum_ptr, minimum_stride, n, n < NY, j0, J,
                              FORMAT, GROUP, DTYPE)  # fmt: skip
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if SWIGLU:
                u = _tile_weights(up_raw, plane, scale_ptr, scale_stride, minimum_ptr, minimum_stride, n + NY, n < NY,
                                  j0, J, FORMAT, GROUP, DTYPE)  # fmt: skip
                up_acc = tl.dot(u, x, up_acc, input_precision="ieee")
    last = True
    if SPLIT > 1:
        acc, last = _joined(acc, parts_ptr, done_ptr, SPLIT, BLOCK_N, BLOCK_M)
    if last:
        factor = row_scale(scale_ptr, scale_stride, n, N, GROUP)
        up_factor = row_scale(scale_ptr, scale_stride, n + NY, N, GROUP) if SWIGLU else 1.0
        if gain_ptr is not None:
            scale = tl.rsqrt(squares[None, :] * (1.0 / K) + EPS)
            factor, up_factor = factor * scale, up_factor * scale
            if normed_ptr is not None and tl.program_id(0) == 0:
                store_normed(normed_ptr, x_ptr, x_stride, gain_ptr, scale, m, M, K)
        add, up_add = bias_of(bias_ptr, n, NY, SWIGLU)
        finish(acc * factor + add, up_acc * up_factor + up_add if SWIGLU else None,
               residual_of(residual_ptr, residual_stride, m, n, M, NY), m, n, M, y_ptr, y_stride, first_ptr,
               second_ptr, best_ptr, index_ptr, NY, (NY + BLOCK_N - 1) // BLOCK_N, DTYPE)  # fmt: skip
