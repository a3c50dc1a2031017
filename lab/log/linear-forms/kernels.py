"""Small-M linears of the decode step as Triton kernels, and the tiles each (op, N, K) takes.

    y[m, n] = epilogue(scale[m] * sum_k x[m, k] * W[n, k])

Place: experiment no. 1 of the decode engine. Two forms of one operator, with the same arguments:

* ``linear_mma_kernel``: matrix instructions fed straight from global memory. A lane's 16-byte load of a weight row *is*
  its operand fragment (K is permuted inside blocks of 32, in x alike), so weights see no shared memory, no barrier and no
  copy; the warps of a program split K and are summed in a fixed tree. One K order for every M: a row's bits do not depend
  on its neighbours nor on BLOCK_M, BLOCK_N or W_FIRST, only on (WARPS_K, KB, SUMS), which are keyed by (op, N, K).
* ``linear_fma_kernel``: fp32 multiply-adds, one row a program. Fastest at M = 1; its sums never equal the other form's.

RMSNorm around a linear is split in two: the kernel that writes the residual stream also writes the rows times the norm's
gain (rounded to x's dtype) and each program's sum of squares; the next linear adds those sums in a fixed order and scales
its outputs by rsqrt(mean + eps). No program reads a row twice, no kernel is added, and the normed row is never rounded.

Axes:    M = rows, K = in, N = out (gate·up: N = 2F, gate rows first), P = programs along N
Numbers: products and sums fp32; one rounding to x's dtype an output; argmax compares the rounded logits
Cost:    N * K * itemsize bytes a call (every weight read once); x, y, bias are noise up to M = 16
PDL:     weights, bias and gain are read before ``gdc_wait``, everything else after; dependents start at once. PDL is a
         constexpr: false below sm_90 and on AMD, where the instructions do not assemble.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@triton.constexpr_function
def _least(a, b):
    return min(a, b)


@triton.constexpr_function
def _most(a, b):
    return max(a, b)


@triton.jit
def _fragment(WARPS_K: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    """Return row-block r, row g and column k of each element of a fragment tile [t4, g8, WARPS_K, R, KB, e8].

    This order of dimensions is the one Triton spreads over lanes (t, g), then warps, then registers, with e contiguous:
    lane (g, t) loads columns 8t..8t+7 of row g. Another order computes the same and costs a trip through shared memory.
    """
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None]
    warp = tl.arange(0, WARPS_K)[None, None, :, None, None, None]
    r = tl.arange(0, R)[None, None, None, :, None, None]
    kb = tl.arange(0, KB)[None, None, None, None, :, None]
    e = tl.arange(0, 8)[None, None, None, None, None, :]
    return r, g, (warp * KB + kb) * 32 + t * 8 + e


@triton.jit
def _as_rows(tile, WARPS_K: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    """Fragment tile -> first operand [WARPS_K, 8R, 32KB]; e = (k16 step, k half, pair). Moves registers only."""
    tile = tl.reshape(tile, [4, 8, WARPS_K, R, KB, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 3, 1, 4, 5, 6, 0, 7]), [WARPS_K, R * 8, KB * 32])


@triton.jit
def _as_columns(tile, WARPS_K: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    """Fragment tile -> second operand [WARPS_K, 32KB, 8R], the same order of K."""
    tile = tl.reshape(tile, [4, 8, WARPS_K, R, KB, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 4, 5, 6, 0, 7, 3, 1]), [WARPS_K, KB * 32, R * 8])


@triton.jit
def _load_steps(base, ok, k, FIRST: tl.constexpr, LAST: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
                EVICT: tl.constexpr):  # fmt: skip
    """Return the tiles of K steps FIRST..LAST as a tuple, all in flight at once. EVEN: every row exists."""
    tiles = ()
    for i in tl.static_range(FIRST, LAST):
        if (i + 1) * STEP > K:
            tiles = tiles + (tl.load(base + i * STEP, mask=ok & (k + i * STEP < K), other=0.0, eviction_policy=EVICT),)
        elif EVEN:
            tiles = tiles + (tl.load(base + i * STEP, eviction_policy=EVICT),)
        else:
            tiles = tiles + (tl.load(base + i * STEP, mask=ok, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def _row_scale(sums_ptr, m, M, K: tl.constexpr, NUM_SUMS: tl.constexpr, SUMS_BLOCK: tl.constexpr, EPS: tl.constexpr):
    """Return rsqrt(mean square + eps) of rows m from the NUM_SUMS partial sums of squares of each."""
    p = tl.arange(0, SUMS_BLOCK)
    ok = (m < M)[:, None] & (p < NUM_SUMS)[None, :]
    part = tl.load(sums_ptr + m[:, None] * NUM_SUMS + p[None, :], mask=ok, other=0.0)
    return tl.rsqrt(tl.sum(part, 1) * (1.0 / K) + EPS)


@triton.jit(do_not_specialize=["M"])
def linear_mma_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, sums_ptr, gain_ptr, gained_ptr, sums_out_ptr, best_ptr, index_ptr, M,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, EPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS_K: tl.constexpr, KB: tl.constexpr, SUMS: tl.constexpr,
    EARLY: tl.constexpr, GROUP: tl.constexpr, W_FIRST: tl.constexpr,
    SWIGLU: tl.constexpr, ARGMAX: tl.constexpr, STORE: tl.constexpr,
    NUM_TILES: tl.constexpr, NUM_SUMS: tl.constexpr, SUMS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = x W^T on matrix instructions, weights straight to registers; grid (NUM_TILES, ceil(M / BLOCK_M)), WARPS_K warps.

    Axes:    x [M, K] rows X_STRIDE apart, w [N, K], y [M, N] ([M, N/2] with SWIGLU), bias [N], residual as y;
             sums [M, NUM_SUMS]; gain [N], gained as y, sums_out [M, NUM_TILES]; best, index [M, NUM_TILES]
    Blocks:  BLOCK_N weight rows a program (with SWIGLU half gate, half up; a multiple of 16, else of 8); BLOCK_M a
             multiple of 8 with W_FIRST (weights are the first operand), else of 16 and BLOCK_N of 8
    Order:   K step i belongs to sum i % SUMS, ((0+1)+(2+3)), then warps; the same for every M
    Numbers: fp32 sums; scale, bias, residual added in fp32; one rounding
    Latency: EARLY weight steps are loaded before the wait; x comes in groups of GROUP steps, one group ahead. Give the
             launch a register cap (maxnreg) above the default: without one ptxas saves registers by loading x step by step.
    """
    STEP: tl.constexpr = 32 * WARPS_K * KB
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    NY: tl.constexpr = N // 2 if SWIGLU else N
    BY: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    EVEN: tl.constexpr = NY % BY == 0
    AXIS: tl.constexpr = 0 if W_FIRST else 1
    pid = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    r, g, k = _fragment(WARPS_K, BLOCK_N // 8, KB)
    if SWIGLU:  # row-blocks alternate gate and up, so that both halves of an output meet in one lane
        row = pid * BY + (r // 2) * 8 + g
        w_base = w_ptr + ((r % 2) * NY + row).to(tl.int64) * K + k
    else:
        row = pid * BY + r * 8 + g
        w_base = w_ptr + row.to(tl.int64) * K + k
    ws = _load_steps(w_base, row < NY, k, 0, EARLY, K, STEP, EVEN, "evict_first")
    rm, gm, kx = _fragment(WARPS_K, BLOCK_M // 8, KB)
    mx = tl.program_id(1) * BLOCK_M + rm * 8 + gm
    x_base = x_ptr + mx.to(tl.int64) * X_STRIDE + kx
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid * BY + tl.arange(0, BY)
    if W_FIRST:
        m = rows[None, :]
        n = columns[:, None]
    else:
        m = rows[:, None]
        n = columns[None, :]
    ok = (m < M) & (n < NY)
    at = m.to(tl.int64) * NY + n
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        gain = tl.load(gain_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ws = ws + _load_steps(w_base, row < NY, k, EARLY, _most(GROUP, EARLY), K, STEP, EVEN, "evict_first")
    xs = _load_steps(x_base, mx < M, kx, 0, GROUP, K, STEP, False, "")
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
    if sums_ptr is not None:
        scale = _row_scale(sums_ptr, rows, M, K, NUM_SUMS, SUMS_BLOCK, EPS)
    accs = ()
    for j in tl.static_range(SUMS):
        if W_FIRST:
            accs = accs + (tl.zeros([WARPS_K, BLOCK_N, BLOCK_M], tl.float32),)
        else:
            accs = accs + (tl.zeros([WARPS_K, BLOCK_M, BLOCK_N], tl.float32),)
    for c in tl.static_range(0, STEPS, GROUP):
        ws = ws + _load_steps(w_base, row < NY, k, _most(_least(c + GROUP, STEPS), EARLY),
                              _most(_least(c + 2 * GROUP, STEPS), EARLY), K, STEP, EVEN, "evict_first")  # fmt: skip
        ahead = _load_steps(x_base, mx < M, kx, _least(c + GROUP, STEPS), _least(c + 2 * GROUP, STEPS), K, STEP, False, "")
        for i in tl.static_range(c, _least(c + GROUP, STEPS)):
            if W_FIRST:
                a = _as_rows(ws[i], WARPS_K, BLOCK_N // 8, KB)
                b = _as_columns(xs[i - c], WARPS_K, BLOCK_M // 8, KB)
            else:
                a = _as_rows(xs[i - c], WARPS_K, BLOCK_M // 8, KB)
                b = _as_columns(ws[i], WARPS_K, BLOCK_N // 8, KB)
            new = ()
            for j in tl.static_range(SUMS):
                if i % SUMS == j:
                    new = new + (tl.dot(a, b, accs[j], input_precision="ieee"),)
                else:
                    new = new + (accs[j],)
            accs = new
        xs = ahead
    acc = accs[0]
    if SUMS == 2:
        acc = accs[0] + accs[1]
    if SUMS == 4:
        acc = (accs[0] + accs[1]) + (accs[2] + accs[3])
    y = tl.sum(acc, 0)
    if sums_ptr is not None:
        if W_FIRST:
            y = y * scale[None, :]
        else:
            y = y * scale[:, None]
    if SWIGLU:
        if W_FIRST:
            gate, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1]))
            y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [BY, BLOCK_M])
        else:
            gate, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_M, BLOCK_N // 16, 2, 8]), [0, 1, 3, 2]))
            y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [BLOCK_M, BY])
    if bias_ptr is not None:
        y += bias
    if residual_ptr is not None:
        y += residual
    out = y.to(x_ptr.dtype.element_ty)
    if STORE:
        tl.store(y_ptr + at, out, mask=ok)
    v = out.to(tl.float32)
    if gain_ptr is not None:
        tl.store(gained_ptr + at, (v * gain).to(x_ptr.dtype.element_ty), mask=ok)
        square = tl.where(n < NY, v * v, 0.0)
        tl.store(sums_out_ptr + rows * NUM_TILES + pid, tl.sum(square, AXIS), mask=rows < M)
    if ARGMAX:  # lowest index wins a tie; NaN or +inf gives (+inf, -1), which wins every later comparison
        v = tl.where(n < NY, v, float("-inf"))
        top = tl.max(v, AXIS)
        if W_FIRST:
            first = tl.min(tl.where(v == top[None, :], n, 2147483647), AXIS)
        else:
            first = tl.min(tl.where(v == top[:, None], n, 2147483647), AXIS)
        bad = tl.max((v < float("inf")).to(tl.int32) ^ 1, AXIS)
        tl.store(best_ptr + rows * NUM_TILES + pid, tl.where(bad > 0, float("inf"), top), mask=rows < M)
        tl.store(index_ptr + rows * NUM_TILES + pid, tl.where(bad > 0, -1, first), mask=rows < M)


@triton.jit(do_not_specialize=["M"])
def linear_fma_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, sums_ptr, gain_ptr, gained_ptr, sums_out_ptr, best_ptr, index_ptr, M,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, REP: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
    SWIGLU: tl.constexpr, ARGMAX: tl.constexpr, STORE: tl.constexpr,
    NUM_TILES: tl.constexpr, NUM_SUMS: tl.constexpr, SUMS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = x W^T by fp32 multiply-adds, weights straight to registers; grid (NUM_TILES, M): one row a program, for M = 1.

    Axes:    as ``linear_mma_kernel``
    Blocks:  tiles [ROWS, REP, BLOCK_K]: ROWS = threads * 8 / BLOCK_K weight rows over threads, REP more in registers; x is
             loaded as [ROWS, 1, BLOCK_K], so that it lies as the weights do and needs no shared memory. ROWS * REP outputs
             a program; with SWIGLU as many gate rows and as many up rows
    Order:   each lane sums its columns over the K steps, then lanes, then warps
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    NY: tl.constexpr = N // 2 if SWIGLU else N
    BY: tl.constexpr = ROWS * REP
    EVEN: tl.constexpr = NY % BY == 0
    pid = tl.program_id(0)
    m = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)[None, None, :]
    kx = tl.broadcast_to(k, [ROWS, 1, BLOCK_K])
    n = pid * BY + (tl.arange(0, ROWS) * REP)[:, None] + tl.arange(0, REP)[None, :]
    row = n[:, :, None]
    w_base = w_ptr + row.to(tl.int64) * K + k
    ws = _load_steps(w_base, row < NY, k, 0, EARLY, K, BLOCK_K, EVEN, "evict_first")
    if SWIGLU:
        u_base = w_ptr + (row + NY).to(tl.int64) * K + k
        us = _load_steps(u_base, row < NY, k, 0, EARLY, K, BLOCK_K, EVEN, "evict_first")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        gain = tl.load(gain_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    xs = _load_steps(x_ptr + m.to(tl.int64) * X_STRIDE + kx, kx < K, kx, 0, STEPS, K, BLOCK_K, True, "")
    ws = ws + _load_steps(w_base, row < NY, k, EARLY, STEPS, K, BLOCK_K, EVEN, "evict_first")
    if SWIGLU:
        us = us + _load_steps(u_base, row < NY, k, EARLY, STEPS, K, BLOCK_K, EVEN, "evict_first")
    at = m.to(tl.int64) * NY + n
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=n < NY, other=0.0).to(tl.float32)
    if sums_ptr is not None:
        p = tl.arange(0, SUMS_BLOCK)
        part = tl.load(sums_ptr + m * NUM_SUMS + p, mask=p < NUM_SUMS, other=0.0)
    acc = tl.zeros([ROWS, REP, BLOCK_K], tl.float32)
    acc_up = tl.zeros([ROWS, REP, BLOCK_K], tl.float32)
    for i in tl.static_range(STEPS):
        x = xs[i].to(tl.float32)
        acc += ws[i].to(tl.float32) * x
        if SWIGLU:
            acc_up += us[i].to(tl.float32) * x
    y = tl.sum(acc, 2)
    if sums_ptr is not None:
        scale = tl.rsqrt(tl.sum(part, 0) * (1.0 / K) + EPS)
        y = y * scale
    if SWIGLU:
        up = tl.sum(acc_up, 2)
        if sums_ptr is not None:
            up = up * scale
        y = y / (1.0 + tl.exp(-y)) * up
    if bias_ptr is not None:
        y += bias
    if residual_ptr is not None:
        y += residual
    out = y.to(x_ptr.dtype.element_ty)
    if STORE:
        tl.store(y_ptr + at, out, mask=n < NY)
    v = out.to(tl.float32)
    if gain_ptr is not None:
        tl.store(gained_ptr + at, (v * gain).to(x_ptr.dtype.element_ty), mask=n < NY)
        square = tl.where(n < NY, v * v, 0.0)
        tl.store(sums_out_ptr + m * NUM_TILES + pid, tl.sum(tl.sum(square, 1), 0))
    if ARGMAX:
        v = tl.where(n < NY, v, float("-inf"))
        top = tl.max(tl.max(v, 1), 0)
        first = tl.min(tl.min(tl.where(v == top, n, 2147483647), 1), 0)
        bad = tl.max(tl.max((v < float("inf")).to(tl.int32) ^ 1, 1), 0)
        tl.store(best_ptr + m * NUM_TILES + pid, tl.where(bad > 0, float("inf"), top))
        tl.store(index_ptr + m * NUM_TILES + pid, tl.where(bad > 0, -1, first))


@triton.jit
def argmax_partials_kernel(best_ptr, index_ptr, token_ptr, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """token[m] = index of the best of NUM_TILES (value, index) pairs; grid (M,). Lowest index wins; a bad row gives -1."""
    m = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.full([BLOCK], 2147483647, tl.int32)
    for p in range(0, NUM_TILES, BLOCK):
        at = p + tl.arange(0, BLOCK)
        v = tl.load(best_ptr + m * NUM_TILES + at, mask=at < NUM_TILES, other=float("-inf"))
        i = tl.load(index_ptr + m * NUM_TILES + at, mask=at < NUM_TILES, other=2147483647)
        take = (v > best) | ((v == best) & (i < index))
        best = tl.where(take, v, best)
        index = tl.where(take, i, index)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, index, 2147483647), 0)
    tl.store(token_ptr + m, tl.where(top == float("-inf"), -1, token))


@triton.jit
def gain_squares_kernel(x_ptr, gain_ptr, gained_ptr, sums_ptr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gained[m] = x[m] * gain, sums[m] = sum of x[m]^2 (one partial sum a row); grid (M,). Where a norm has no linear before it."""
    m = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    gain = tl.load(gain_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + m.to(tl.int64) * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(gained_ptr + m.to(tl.int64) * K + k, (x * gain).to(gained_ptr.dtype.element_ty), mask=k < K)
    tl.store(sums_ptr + m, tl.sum(x * x, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MmaTiles:
    """Launch choice of ``linear_mma_kernel``. ``order`` decides the bits and is keyed by (op, N, K); the rest may follow M."""

    warps_k: int
    kb: int
    sums: int
    block_m: int
    block_n: int
    w_first: bool
    early: int = 99  # clamped to the number of K steps
    group: int = 99
    max_registers: int = 0  # maxnreg launch option; 0 leaves it to ptxas

    @property
    def order(self) -> tuple[int, int, int]:
        """What fixes the order of the sum over K."""
        return self.warps_k, self.kb, self.sums


@dataclass(frozen=True, slots=True, kw_only=True)
class FmaTiles:
    """Launch choice of ``linear_fma_kernel``: outputs a program, columns a step, warps."""

    block_n: int
    block_k: int
    num_warps: int
    early: int = 99

    @property
    def rows(self) -> int:
        """Weight rows spread over threads."""
        return max(1, self.num_warps * 256 // self.block_k)


def _mma(order: tuple[int, int, int], **by_rows: tuple[int, int, bool, int]) -> dict[int, MmaTiles]:
    # m8=(block_m, block_n, w_first, early), ...
    return {
        int(rows[1:]): MmaTiles(
            warps_k=order[0], kb=order[1], sums=order[2], block_m=t[0], block_n=t[1], w_first=t[2], early=t[3]
        )
        for rows, t in by_rows.items()
    }


# H200, torch 2.11, triton 3.6, bf16, Qwen2.5-0.5B: the tiles that were measured (rows up to the key, 311 us and 369 / 428 /
# 497 / 727 / 1249 us a chain at M = 1 and 1 / 8 / 16 / 32 / 64). No register cap: the capped variants are not measured yet.
FMA_TILES: dict[tuple[str, int, int], FmaTiles] = {
    ("qkv", 1152, 896): FmaTiles(block_n=4, block_k=1024, num_warps=8),
    ("o", 896, 896): FmaTiles(block_n=4, block_k=256, num_warps=4),
    ("gate_up", 9728, 896): FmaTiles(block_n=4, block_k=256, num_warps=2),
    ("down", 896, 4864): FmaTiles(block_n=1, block_k=256, num_warps=1),
    ("head", 151936, 896): FmaTiles(block_n=32, block_k=128, num_warps=4),
}
MMA_TILES: dict[tuple[str, int, int], dict[int, MmaTiles]] = {
    ("qkv", 1152, 896): _mma(
        (2, 2, 2), m8=(8, 16, True, 99), m16=(16, 16, False, 99), m32=(32, 16, False, 99), m64=(64, 8, False, 99)
    ),
    ("o", 896, 896): _mma(
        (2, 1, 2), m8=(8, 16, True, 99), m16=(16, 16, True, 99), m32=(32, 16, True, 99), m64=(64, 8, False, 99)
    ),
    ("gate_up", 9728, 896): _mma(
        (2, 2, 1), m8=(8, 16, True, 99), m16=(16, 16, False, 99), m32=(32, 16, True, 99), m64=(64, 32, True, 3)
    ),
    ("down", 896, 4864): _mma(
        (8, 1, 1), m8=(16, 8, False, 99), m16=(16, 16, True, 12), m32=(32, 16, True, 12), m64=(64, 8, False, 99)
    ),
    ("head", 151936, 896): _mma(
        (2, 2, 1), m8=(16, 16, False, 99), m16=(16, 32, False, 3), m32=(32, 32, False, 2), m64=(64, 32, False, 3)
    ),
}
