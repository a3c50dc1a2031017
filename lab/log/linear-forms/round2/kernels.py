"""Experiment no. 1, second round: direct-to-register matrix-instruction form, FMA form, weight streamer."""
import triton
import triton.language as tl


@triton.jit
def _prefetch(address, ok):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 8192; mov.u32 $0, 0; }",
        "=r,l,r", [address, ok.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _prefetch_part(ptr, FIRST: tl.constexpr, PIECES: tl.constexpr, P: tl.constexpr, THREADS: tl.constexpr):
    # pieces FIRST .. FIRST + PIECES of 8 KiB, shared by P programs
    PER: tl.constexpr = (PIECES + P - 1) // P
    lane = tl.arange(0, THREADS)
    for j in tl.static_range((PER + THREADS - 1) // THREADS):
        at = j * THREADS + lane
        piece = tl.program_id(0) * PER + at
        _prefetch(ptr.to(tl.int64) + (FIRST + piece).to(tl.int64) * 8192, (at < PER) & (piece < PIECES))


@triton.jit
def streamer(table_ptr, progress_ptr, COUNT, DIST, S: tl.constexpr):
    # walks all weights in order, at most DIST kernels ahead of the kernel that runs
    lane = tl.arange(0, 32)
    for j in range(COUNT):
        base = tl.load(table_ptr + 2 * j)
        pieces = tl.load(table_ptr + 2 * j + 1)
        p = tl.load(progress_ptr, volatile=True)
        while p < j - DIST:
            p = tl.load(progress_ptr, volatile=True)
        for c in range(tl.program_id(0) * 32, pieces, S * 32):
            at = c + lane
            _prefetch(base + at.to(tl.int64) * 8192, at < pieces)


@triton.jit
def _index(WK: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    # [t, g, warp, r, kb, e]: lanes are (g, t), then warps, then registers
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None]
    wk = tl.arange(0, WK)[None, None, :, None, None, None]
    r = tl.arange(0, R)[None, None, None, :, None, None]
    kb = tl.arange(0, KB)[None, None, None, None, :, None]
    e = tl.arange(0, 8)[None, None, None, None, None, :]
    return r, g, (wk * KB + kb) * 32 + t * 8 + e


@triton.jit
def _rows(w, WK: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    w = tl.reshape(w, [4, 8, WK, R, KB, 2, 2, 2])
    return tl.reshape(tl.permute(w, [2, 3, 1, 4, 5, 6, 0, 7]), [WK, R * 8, KB * 32])


@triton.jit
def _columns(w, WK: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    w = tl.reshape(w, [4, 8, WK, R, KB, 2, 2, 2])
    return tl.reshape(tl.permute(w, [2, 4, 5, 6, 0, 7, 3, 1]), [WK, KB * 32, R * 8])


@triton.constexpr_function
def _least(a, b):
    return min(a, b)


@triton.constexpr_function
def _most(a, b):
    return max(a, b)


@triton.jit
def _mma_w(base, ok, k, FIRST: tl.constexpr, LAST: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, CACHE: tl.constexpr,
           EVICT: tl.constexpr):
    ws = ()
    for i in tl.static_range(FIRST, LAST):
        if (i + 1) * STEP > K:
            ws = ws + (tl.load(base + i * STEP, mask=ok & (k + i * STEP < K), other=0.0, cache_modifier=CACHE, eviction_policy=EVICT),)
        elif EVEN:
            ws = ws + (tl.load(base + i * STEP, cache_modifier=CACHE, eviction_policy=EVICT),)
        else:
            ws = ws + (tl.load(base + i * STEP, mask=ok, other=0.0, cache_modifier=CACHE, eviction_policy=EVICT),)
    return ws


@triton.jit
def _mma_x(base, ok, k, FIRST: tl.constexpr, LAST: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr):
    xs = ()
    for i in tl.static_range(FIRST, LAST):
        if (i + 1) * STEP > K:
            xs = xs + (tl.load(base + i * STEP, mask=ok & (k + i * STEP < K), other=0.0),)
        else:
            xs = xs + (tl.load(base + i * STEP, mask=ok, other=0.0),)
    return xs


@triton.jit
def _row_scale(ss_ptr, m, M, K: tl.constexpr, PIN: tl.constexpr, PB: tl.constexpr, eps):
    p = tl.arange(0, PB)
    part = tl.load(ss_ptr + m[:, None] * PIN + p[None, :], mask=(m < M)[:, None] & (p < PIN)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(part, 1) * (1.0 / K) + eps)


@triton.jit(do_not_specialize=["M", "number"])
def mma_linear(x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, ss_ptr, gain_ptr, h_ptr, ss_out_ptr, best_ptr, index_ptr, pf_ptr, progress_ptr, M, number, eps,
               N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WK: tl.constexpr, KB: tl.constexpr,
               PRE: tl.constexpr, ACCS: tl.constexpr, SWAP: tl.constexpr, GX: tl.constexpr, BAR: tl.constexpr, SWIGLU: tl.constexpr,
               ARGMAX: tl.constexpr, STORE: tl.constexpr, P: tl.constexpr, PIN: tl.constexpr, PB: tl.constexpr, PDL: tl.constexpr, TRIG: tl.constexpr,
               CACHE: tl.constexpr, EVICT: tl.constexpr, PF_FIRST: tl.constexpr, PF_PIECES: tl.constexpr):
    pid = tl.program_id(0)
    m0 = tl.program_id(1) * BM
    STEP: tl.constexpr = 32 * WK * KB
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    NY: tl.constexpr = N // 2 if SWIGLU else N
    BY: tl.constexpr = BN // 2 if SWIGLU else BN
    EVEN: tl.constexpr = NY % BY == 0
    if PDL and TRIG == 0:
        tl.extra.cuda.gdc_launch_dependents()
    r, g, k = _index(WK, BN // 8, KB)
    if SWIGLU:
        row = pid * BY + (r // 2) * 8 + g
        w_base = w_ptr + ((r % 2) * NY + row).to(tl.int64) * K + k
    else:
        row = pid * BN + r * 8 + g
        w_base = w_ptr + row.to(tl.int64) * K + k
    ws = _mma_w(w_base, row < NY, k, 0, PRE, K, STEP, EVEN, CACHE, EVICT)
    rm, gm, kx = _index(WK, BM // 8, KB)
    m = m0 + rm * 8 + gm
    on = pid * BY + tl.arange(0, BY)
    om = m0 + tl.arange(0, BM)
    if SWAP:
        n2 = on[:, None]
        m2 = om[None, :]
    else:
        n2 = on[None, :]
        m2 = om[:, None]
    ok = (m2 < M) & (n2 < NY)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n2, mask=n2 < NY, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        gain = tl.load(gain_ptr + n2, mask=n2 < NY, other=0.0).to(tl.float32)
    if PF_PIECES > 0:
        _prefetch_part(pf_ptr, PF_FIRST, PF_PIECES, P, 32 * WK)
    if PDL and TRIG == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_base = x_ptr + m * XS + kx
    ws = ws + _mma_w(w_base, row < NY, k, PRE, _most(GX, PRE), K, STEP, EVEN, CACHE, EVICT)
    xs = _mma_x(x_base, m < M, kx, 0, GX, K, STEP)
    if residual_ptr is not None:
        res = tl.load(residual_ptr + m2 * NY + n2, mask=ok, other=0.0).to(tl.float32)
    if ss_ptr is not None:
        scale = _row_scale(ss_ptr, om, M, K, PIN, PB, eps)
    if progress_ptr is not None:
        if pid == 0:
            tl.store(progress_ptr, number)
    accs = ()
    for j in tl.static_range(ACCS):
        if SWAP:
            accs = accs + (tl.zeros([WK, BN, BM], tl.float32),)
        else:
            accs = accs + (tl.zeros([WK, BM, BN], tl.float32),)
    for c in tl.static_range(0, STEPS, GX):
        ws = ws + _mma_w(w_base, row < NY, k, _most(_least(c + GX, STEPS), PRE), _most(_least(c + 2 * GX, STEPS), PRE), K, STEP, EVEN, CACHE, EVICT)
        nx = _mma_x(x_base, m < M, kx, _least(c + GX, STEPS), _least(c + 2 * GX, STEPS), K, STEP)
        if BAR:
            tl.debug_barrier()
        for i in tl.static_range(c, _least(c + GX, STEPS)):
            if SWAP:
                a = _rows(ws[i], WK, BN // 8, KB)
                b = _columns(xs[i - c], WK, BM // 8, KB)
            else:
                a = _rows(xs[i - c], WK, BM // 8, KB)
                b = _columns(ws[i], WK, BN // 8, KB)
            new = ()
            for j in tl.static_range(ACCS):
                if i % ACCS == j:
                    new = new + (tl.dot(a, b, accs[j], input_precision="ieee"),)
                else:
                    new = new + (accs[j],)
            accs = new
        xs = nx
    if ACCS == 4:
        acc = (accs[0] + accs[1]) + (accs[2] + accs[3])
    elif ACCS == 2:
        acc = accs[0] + accs[1]
    else:
        acc = accs[0]
    y = tl.sum(acc, 0)
    if ss_ptr is not None:
        if SWAP:
            y = y * scale[None, :]
        else:
            y = y * scale[:, None]
    if SWIGLU:
        if SWAP:
            gate, up = tl.split(tl.permute(tl.reshape(y, [BN // 16, 2, 8, BM]), [0, 2, 3, 1]))
            y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [BY, BM])
        else:
            gate, up = tl.split(tl.permute(tl.reshape(y, [BM, BN // 16, 2, 8]), [0, 1, 3, 2]))
            y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [BM, BY])
    if bias_ptr is not None:
        y += bias
    if residual_ptr is not None:
        y += res
    out = y.to(x_ptr.dtype.element_ty)
    if STORE:
        tl.store(y_ptr + m2.to(tl.int64) * NY + n2, out, mask=ok)
    v = out.to(tl.float32)
    if gain_ptr is not None:
        tl.store(h_ptr + m2.to(tl.int64) * NY + n2, (v * gain).to(x_ptr.dtype.element_ty), mask=ok)
        if not EVEN:
            v = tl.where(n2 < NY, v, 0.0)
        tl.store(ss_out_ptr + om * P + pid, tl.sum(v * v, 0 if SWAP else 1), mask=om < M)
    if ARGMAX:
        if not EVEN:
            v = tl.where(n2 < NY, v, float("-inf"))
        AX: tl.constexpr = 0 if SWAP else 1
        top = tl.max(v, AX)
        if SWAP:
            i = tl.min(tl.where(v == top[None, :], n2, 2147483647), AX)
        else:
            i = tl.min(tl.where(v == top[:, None], n2, 2147483647), AX)
        bad = tl.max(1 - (v < float("inf")).to(tl.int32), AX)
        tl.store(best_ptr + om * P + pid, tl.where(bad > 0, float("inf"), top), mask=om < M)
        tl.store(index_ptr + om * P + pid, tl.where(bad > 0, -1, i), mask=om < M)
    if PDL and TRIG == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _fma_w(base, ok, k, FIRST: tl.constexpr, LAST: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr):
    ws = ()
    for i in tl.static_range(FIRST, LAST):
        if (i + 1) * BK > K:
            ws = ws + (tl.load(base + i * BK, mask=ok & (k + i * BK < K), other=0.0, eviction_policy=EVICT),)
        elif EVEN:
            ws = ws + (tl.load(base + i * BK, eviction_policy=EVICT),)
        else:
            ws = ws + (tl.load(base + i * BK, mask=ok, other=0.0, eviction_policy=EVICT),)
    return ws


@triton.jit
def _lane_sum(p, XR: tl.constexpr, REP: tl.constexpr, BK: tl.constexpr):
    return tl.sum(tl.reshape(p, [XR, REP, BK // 8, 8]), 3)


@triton.jit(do_not_specialize=["M", "number"])
def fma_linear(x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, ss_ptr, gain_ptr, h_ptr, ss_out_ptr, best_ptr, index_ptr, pf_ptr, progress_ptr, M, number, eps,
               N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, ROWS: tl.constexpr, XR: tl.constexpr, REP: tl.constexpr, BK: tl.constexpr,
               PRE: tl.constexpr, SUM8: tl.constexpr, BAR: tl.constexpr, SWIGLU: tl.constexpr, ARGMAX: tl.constexpr, STORE: tl.constexpr,
               P: tl.constexpr, PIN: tl.constexpr, PB: tl.constexpr, PDL: tl.constexpr, TRIG: tl.constexpr, EVICT: tl.constexpr,
               PF_FIRST: tl.constexpr, PF_PIECES: tl.constexpr, NW: tl.constexpr):
    BN: tl.constexpr = XR * REP
    pid = tl.program_id(0)
    m0 = tl.program_id(1) * ROWS
    STEPS: tl.constexpr = (K + BK - 1) // BK
    NY: tl.constexpr = N // 2 if SWIGLU else N
    EVEN: tl.constexpr = NY % BN == 0
    if PDL and TRIG == 0:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BK)[None, None, :]
    kx = tl.broadcast_to(k, [XR, 1, BK])
    n = pid * BN + (tl.arange(0, XR) * REP)[:, None] + tl.arange(0, REP)[None, :]
    n3 = n[:, :, None]
    ws = _fma_w(w_ptr + n3.to(tl.int64) * K + k, n3 < NY, k, 0, PRE, K, BK, EVEN, EVICT)
    if SWIGLU:
        us = _fma_w(w_ptr + (n3 + NY).to(tl.int64) * K + k, n3 < NY, k, 0, PRE, K, BK, EVEN, EVICT)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        gain = tl.load(gain_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
    if PF_PIECES > 0:
        _prefetch_part(pf_ptr, PF_FIRST, PF_PIECES, P, 32 * NW)
    if PDL and TRIG == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if progress_ptr is not None:
        if pid == 0:
            tl.store(progress_ptr, number)
    if PRE < STEPS:
        ws = ws + _fma_w(w_ptr + n3.to(tl.int64) * K + k, n3 < NY, k, PRE, STEPS, K, BK, EVEN, EVICT)
        if SWIGLU:
            us = us + _fma_w(w_ptr + (n3 + NY).to(tl.int64) * K + k, n3 < NY, k, PRE, STEPS, K, BK, EVEN, EVICT)
    for j in tl.static_range(ROWS):
        m = m0 + j
        ok = (n < NY) & (m < M)
        xs = _fma_w(x_ptr + m * XS + kx, m < M, kx, 0, STEPS, K, BK, False, "")
        if residual_ptr is not None:
            res = tl.load(residual_ptr + m * NY + n, mask=ok, other=0.0).to(tl.float32)
        if ss_ptr is not None:
            p = tl.arange(0, PB)
            ss = tl.load(ss_ptr + m * PIN + p, mask=p < PIN, other=0.0)
        if BAR:
            tl.debug_barrier()
        if SUM8:
            acc = tl.zeros([XR, REP, BK // 8], tl.float32)
            up = tl.zeros([XR, REP, BK // 8], tl.float32)
        else:
            acc = tl.zeros([XR, REP, BK], tl.float32)
            up = tl.zeros([XR, REP, BK], tl.float32)
        for i in tl.static_range(STEPS):
            x = xs[i].to(tl.float32)
            if SUM8:
                acc += _lane_sum(ws[i].to(tl.float32) * x, XR, REP, BK)
                if SWIGLU:
                    up += _lane_sum(us[i].to(tl.float32) * x, XR, REP, BK)
            else:
                acc += ws[i].to(tl.float32) * x
                if SWIGLU:
                    up += us[i].to(tl.float32) * x
        y = tl.sum(acc, 2)
        if SWIGLU:
            u = tl.sum(up, 2)
        if ss_ptr is not None:
            scale = tl.rsqrt(tl.sum(ss, 0) * (1.0 / K) + eps)
            y = y * scale
            if SWIGLU:
                u = u * scale
        if SWIGLU:
            y = y / (1.0 + tl.exp(-y)) * u
        if bias_ptr is not None:
            y += bias
        if residual_ptr is not None:
            y += res
        out = y.to(x_ptr.dtype.element_ty)
        if STORE:
            tl.store(y_ptr + m.to(tl.int64) * NY + n, out, mask=ok)
        v = out.to(tl.float32)
        if gain_ptr is not None:
            tl.store(h_ptr + m.to(tl.int64) * NY + n, (v * gain).to(x_ptr.dtype.element_ty), mask=ok)
            if not EVEN:
                v = tl.where(n < NY, v, 0.0)
            tl.store(ss_out_ptr + m * P + pid, tl.sum(tl.sum(v * v, 1), 0), mask=m < M)
        if ARGMAX:
            if not EVEN:
                v = tl.where(n < NY, v, float("-inf"))
            top = tl.max(tl.max(v, 1), 0)
            i = tl.min(tl.min(tl.where(v == top, n, 2147483647), 1), 0)
            bad = tl.max(tl.max(1 - (v < float("inf")).to(tl.int32), 1), 0)
            tl.store(best_ptr + m * P + pid, tl.where(bad > 0, float("inf"), top), mask=m < M)
            tl.store(index_ptr + m * P + pid, tl.where(bad > 0, -1, i), mask=m < M)
    if PDL and TRIG == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def argmax_partials(best_ptr, index_ptr, token_ptr, progress_ptr, P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.full([BLOCK], 2147483647, tl.int32)
    for p in range(0, P, BLOCK):
        at = p + tl.arange(0, BLOCK)
        v = tl.load(best_ptr + m * P + at, mask=at < P, other=float("-inf"))
        i = tl.load(index_ptr + m * P + at, mask=at < P, other=2147483647)
        take = (v > best) | ((v == best) & (i < index))
        best = tl.where(take, v, best)
        index = tl.where(take, i, index)
    top = tl.max(best, 0)
    tl.store(token_ptr + m, tl.min(tl.where(best == top, index, 2147483647), 0))
    if progress_ptr is not None:
        if m == 0:
            tl.store(progress_ptr, -1)


@triton.jit
def gain_square(x_ptr, g_ptr, h_ptr, ss_ptr, K: tl.constexpr, KP: tl.constexpr, PIN: tl.constexpr, PB: tl.constexpr, PDL: tl.constexpr):
    # what the embedding step does: h = x * gain, and the row's sum of squares in the first of PIN places
    m = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    k = tl.arange(0, KP)
    x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(h_ptr + m * K + k, (x * g).to(h_ptr.dtype.element_ty), mask=k < K)
    p = tl.arange(0, PB)
    tl.store(ss_ptr + m * PIN + p, tl.where(p == 0, tl.sum(x * x, 0), 0.0), mask=p < PIN)


# wgmma form: cp.async pipeline, W on the M side ----------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["M"])
def pipe_linear(x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, M, N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr):
    pid = tl.program_id(0)
    NY: tl.constexpr = N // 2 if SWIGLU else N
    KS: tl.constexpr = K // SPLIT
    k0 = tl.program_id(1) * KS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BM)
    n = pid * BN + tl.arange(0, BN)
    acc = tl.zeros([BN, BM], tl.float32)
    acc1 = tl.zeros([BN, BM], tl.float32)
    for kk in tl.range(0, KS, BK, num_stages=STAGES):
        k = k0 + kk + tl.arange(0, BK)
        if KS % BK == 0:
            w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :])
        else:
            w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=(k < k0 + KS)[None, :], other=0.0)
        x = tl.load(x_ptr + m[None, :] * XS + k[:, None], mask=(m < M)[None, :] & (k < k0 + KS)[:, None], other=0.0)
        acc = tl.dot(w, x, acc)
        if SWIGLU:
            u = tl.load(w_ptr + (n + NY).to(tl.int64)[:, None] * K + k[None, :])
            acc1 = tl.dot(u, x, acc1)
    ok = (n < NY)[:, None] & (m < M)[None, :]
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * acc1
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + m[None, :] * NY + n[:, None], mask=ok, other=0.0).to(tl.float32)
    if SPLIT > 1:
        tl.store(y_ptr + (tl.program_id(1) * M + m[None, :]) * NY + n[:, None], acc, mask=ok)
    else:
        tl.store(y_ptr + m[None, :] * NY + n[:, None], acc.to(x_ptr.dtype.element_ty), mask=ok)


@triton.jit
def stub(x_ptr, y_ptr, pf_ptr, LOOPS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr, PF_PIECES: tl.constexpr, P: tl.constexpr):
    # a stand-in for attention: a chain of dependent loads; copies its input
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PF_PIECES > 0:
        _prefetch_part(pf_ptr, 0, PF_PIECES, P, 128)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    v = tl.load(x_ptr + at, mask=at < COUNT, other=0.0)
    j = at
    for _ in range(LOOPS):
        z = tl.load(x_ptr + j, mask=j < COUNT, other=0.0, volatile=True)
        j = at + tl.where(z.to(tl.float32) > 1e30, 1, 0)
    tl.store(y_ptr + j, v, mask=j < COUNT)


@triton.jit
def read_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, ITERS: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    at = pid * (BLOCK * ITERS) + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(ITERS):
        acc ^= tl.load(x_ptr + at + i * BLOCK, eviction_policy="evict_first")
    s = tl.xor_sum(acc, 0)
    if s == 123456789:
        tl.store(y_ptr + pid, s)
