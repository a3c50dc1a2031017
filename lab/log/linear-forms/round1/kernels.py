"""Decode linears of experiment no. 1: y[M, N] = x[M, K] . W[N, K]^T with everything a decode step folds into it."""
import triton
import triton.language as tl


@triton.jit
def _prefetch_l2(ptr, PF_CHUNKS: tl.constexpr, PF_PER: tl.constexpr, THREADS: tl.constexpr):
    # Each thread asks L2 for 2 KiB pieces of a later kernel's weights.
    pid = tl.program_id(0)
    lane = tl.arange(0, THREADS)
    for j in tl.static_range((PF_PER + THREADS - 1) // THREADS):
        at = j * THREADS + lane
        piece = pid * PF_PER + at
        ok = ((at < PF_PER) & (piece < PF_CHUNKS)).to(tl.int32)
        address = ptr.to(tl.int64) + piece.to(tl.int64) * 2048
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0; }",
            "=r,l,r", [address, ok], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _fragment_index(WK: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    # [t, g, warp, r, kb, e]: the order Triton lays over lanes (t, g), warps and registers
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None]
    wk = tl.arange(0, WK)[None, None, :, None, None, None]
    r = tl.arange(0, R)[None, None, None, :, None, None]
    kb = tl.arange(0, KB)[None, None, None, None, :, None]
    e = tl.arange(0, 8)[None, None, None, None, None, :]
    return r, g, (wk * KB + kb) * 32 + t * 8 + e


@triton.jit
def _fragment_rows(w, WK: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    w = tl.reshape(w, [4, 8, WK, R, KB, 2, 2, 2])
    return tl.reshape(tl.permute(w, [2, 3, 1, 4, 5, 6, 0, 7]), [WK, R * 8, KB * 32])


@triton.jit
def _fragment_columns(w, WK: tl.constexpr, R: tl.constexpr, KB: tl.constexpr):
    w = tl.reshape(w, [4, 8, WK, R, KB, 2, 2, 2])
    return tl.reshape(tl.permute(w, [2, 4, 5, 6, 0, 7, 3, 1]), [WK, KB * 32, R * 8])


@triton.jit
def _mma_weights(w_ptr, tile, k, r, g, FIRST: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
                 STEP: tl.constexpr, SWIGLU: tl.constexpr, EVICT: tl.constexpr):
    if SWIGLU:
        row = (r % 2) * (N // 2) + tile * (BN // 2) + (r // 2) * 8 + g
        ok = tile * (BN // 2) + (r // 2) * 8 + g < N // 2
    else:
        row = tile * BN + r * 8 + g
        ok = row < N
    base = w_ptr + row.to(tl.int64) * K + k
    EVEN: tl.constexpr = N % BN == 0
    ws = ()
    for i in tl.static_range(FIRST, LAST):
        if (i + 1) * STEP > K:
            ws = ws + (tl.load(base + i * STEP, mask=ok & (k + i * STEP < K), other=0.0, eviction_policy=EVICT),)
        elif EVEN:
            ws = ws + (tl.load(base + i * STEP, eviction_policy=EVICT),)
        else:
            ws = ws + (tl.load(base + i * STEP, mask=ok, other=0.0, eviction_policy=EVICT),)
    return ws


@triton.jit
def _mma_x(x_ptr, gain_ptr, m, k, M, i: tl.constexpr, XS: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr):
    ok = m < M
    if (i + 1) * STEP > K:
        ok = ok & (k + i * STEP < K)
    return tl.load(x_ptr + m * XS + k + i * STEP, mask=ok, other=0.0)


@triton.jit
def _mma_gain(gain_ptr, k, K: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, WK: tl.constexpr, KB: tl.constexpr):
    k = tl.broadcast_to(k, [4, 8, WK, 1, KB, 8])
    gs = ()
    for i in tl.static_range(STEPS):
        if (i + 1) * STEP > K:
            gs = gs + (tl.load(gain_ptr + k + i * STEP, mask=k + i * STEP < K, other=0.0),)
        else:
            gs = gs + (tl.load(gain_ptr + k + i * STEP),)
    return gs


@triton.jit(do_not_specialize=["M"])
def mma_linear(x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, gain_ptr, best_ptr, index_ptr, pf_ptr, M, eps,
               N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WK: tl.constexpr, KB: tl.constexpr,
               PRE: tl.constexpr, ACCS: tl.constexpr, SWAP: tl.constexpr, SWIGLU: tl.constexpr, ARGMAX: tl.constexpr, STORE: tl.constexpr,
               PERSIST: tl.constexpr, NT: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr, TRIG: tl.constexpr, EVICT: tl.constexpr,
               PF_CHUNKS: tl.constexpr, PF_PER: tl.constexpr):
    pid = tl.program_id(0)
    m0 = tl.program_id(1) * BM
    STEP: tl.constexpr = 32 * WK * KB
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    NORM: tl.constexpr = gain_ptr is not None
    if PDL and TRIG == 0:
        tl.extra.cuda.gdc_launch_dependents()
    r, g, k = _fragment_index(WK, BN // 8, KB)
    ws = _mma_weights(w_ptr, pid, k, r, g, 0, PRE, N, K, BN, STEP, SWIGLU, EVICT)
    rm, gm, kx = _fragment_index(WK, BM // 8, KB)
    m = m0 + rm * 8 + gm
    on = tl.arange(0, BN // 2 if SWIGLU else BN)
    om = m0 + tl.arange(0, BM)
    if SWAP:
        n2 = on[:, None]
        m2 = om[None, :]
    else:
        n2 = on[None, :]
        m2 = om[:, None]
    NY: tl.constexpr = N // 2 if SWIGLU else N
    BY: tl.constexpr = BN // 2 if SWIGLU else BN
    if NORM:
        gs = _mma_gain(gain_ptr, kx, K, STEP, STEPS, WK, KB)
    if PF_CHUNKS > 0:
        _prefetch_l2(pf_ptr, PF_CHUNKS, PF_PER, 32 * WK)
    if PDL and TRIG == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL and TRIG == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if ARGMAX:
        if SWAP:
            best = tl.full([BN, BM], float("-inf"), tl.float32)
            where = tl.full([BN, BM], 0, tl.int32)
            bad = tl.full([BN, BM], 0, tl.int32)
        else:
            best = tl.full([BM, BN], float("-inf"), tl.float32)
            where = tl.full([BM, BN], 0, tl.int32)
            bad = tl.full([BM, BN], 0, tl.int32)
    for j in range(TILES):
        tile = tl.minimum(pid + j * P, NT - 1)
        if PERSIST:
            nxt = _mma_weights(w_ptr, tl.minimum(pid + (j + 1) * P, NT - 1), k, r, g, 0, PRE, N, K, BN, STEP, SWIGLU, EVICT)
        if PRE < STEPS:
            rest = _mma_weights(w_ptr, tile, k, r, g, PRE, STEPS, N, K, BN, STEP, SWIGLU, EVICT)
        if residual_ptr is not None:
            res = tl.load(residual_ptr + m2 * NY + tile * BY + n2, mask=(m2 < M) & (tile * BY + n2 < NY), other=0.0).to(tl.float32)
        if SWAP:
            acc = tl.zeros([WK, BN, BM], tl.float32)
            acc1 = tl.zeros([WK, BN, BM], tl.float32)
        else:
            acc = tl.zeros([WK, BM, BN], tl.float32)
            acc1 = tl.zeros([WK, BM, BN], tl.float32)
        if NORM:
            ss = tl.zeros([4, 8, WK, BM // 8, KB, 8], tl.float32)
        for i in tl.static_range(STEPS):
            x = _mma_x(x_ptr, gain_ptr, m, kx, M, i, XS, K, STEP)
            if NORM:
                xf = x.to(tl.float32)
                ss += xf * xf
                x = (xf * gs[i].to(tl.float32)).to(x.dtype)
            if i < PRE:
                w = ws[i]
            else:
                w = rest[i - PRE]
            if SWAP:
                a = _fragment_rows(w, WK, BN // 8, KB)
                b = _fragment_columns(x, WK, BM // 8, KB)
            else:
                a = _fragment_rows(x, WK, BM // 8, KB)
                b = _fragment_columns(w, WK, BN // 8, KB)
            if i % ACCS == 0:
                acc = tl.dot(a, b, acc, input_precision="ieee")
            else:
                acc1 = tl.dot(a, b, acc1, input_precision="ieee")
        if ACCS == 2:
            acc += acc1
        y = tl.sum(acc, 0)
        if NORM:
            s = tl.sum(tl.sum(tl.sum(tl.sum(ss, 5), 4), 0), 1)  # [g, r]
            s = tl.reshape(tl.permute(s, [1, 0]), [BM])
            scale = tl.rsqrt(s * (1.0 / K) + eps)
            if SWAP:
                y = y * scale[None, :]
            else:
                y = y * scale[:, None]
        if SWIGLU:
            if SWAP:
                gate, up = tl.split(tl.permute(tl.reshape(y, [BN // 16, 2, 8, BM]), [0, 2, 3, 1]))
                y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [BN // 2, BM])
            else:
                gate, up = tl.split(tl.permute(tl.reshape(y, [BM, BN // 16, 2, 8]), [0, 1, 3, 2]))
                y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [BM, BN // 2])
        n = tile * BY + n2
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            y += res
        out = y.to(x_ptr.dtype.element_ty)
        if STORE:
            tl.store(y_ptr + m2.to(tl.int64) * NY + n, out, mask=(m2 < M) & (n < NY))
        if ARGMAX:
            v = out.to(tl.float32)
            if N % BN != 0:
                v = tl.where(n < N, v, float("-inf"))
            bad = bad | (1 - (v < float("inf")).to(tl.int32))
            better = v > best
            best = tl.where(better, v, best)
            where = tl.where(better, tile, where)
        if PERSIST:
            ws = nxt
    if ARGMAX:
        AX: tl.constexpr = 0 if SWAP else 1
        top = tl.max(best, AX)
        if SWAP:
            i = tl.where(best == top[None, :], where * BN + n2, 2147483647)
        else:
            i = tl.where(best == top[:, None], where * BN + n2, 2147483647)
        i = tl.min(i, AX)
        b = tl.max(bad, AX)
        at = om * P + pid
        tl.store(best_ptr + at, tl.where(b > 0, float("inf"), top), mask=om < M)
        tl.store(index_ptr + at, tl.where(b > 0, -1, i), mask=om < M)
    if PDL and TRIG == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _fma_weights(w_ptr, n, k, FIRST: tl.constexpr, LAST: tl.constexpr, NY: tl.constexpr, K: tl.constexpr, KEND, BK: tl.constexpr, EVENK: tl.constexpr,
                 EVEN: tl.constexpr, EVICT: tl.constexpr):
    base = w_ptr + n.to(tl.int64) * K + k
    ws = ()
    for i in tl.static_range(FIRST, LAST):
        if not EVENK:
            ws = ws + (tl.load(base + i * BK, mask=(n < NY) & (k + i * BK < KEND), other=0.0, eviction_policy=EVICT),)
        elif EVEN:
            ws = ws + (tl.load(base + i * BK, eviction_policy=EVICT),)
        else:
            ws = ws + (tl.load(base + i * BK, mask=n < NY, other=0.0, eviction_policy=EVICT),)
    return ws


@triton.jit(do_not_specialize=["M"])
def fma_linear(x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, gain_ptr, best_ptr, index_ptr, pf_ptr, M, eps,
               N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, ROWS: tl.constexpr, XR: tl.constexpr, REP: tl.constexpr, BK: tl.constexpr,
               SPLIT: tl.constexpr, PRE: tl.constexpr, SWIGLU: tl.constexpr, ARGMAX: tl.constexpr, STORE: tl.constexpr,
               PERSIST: tl.constexpr, NT: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr, TRIG: tl.constexpr,
               EVICT: tl.constexpr, PF_CHUNKS: tl.constexpr, PF_PER: tl.constexpr, NW: tl.constexpr):
    # tiles are [XR, REP, BK]: XR rows over threads, REP rows in registers. BN counts outputs: a SwiGLU program reads BN gate rows and BN up rows
    BN: tl.constexpr = XR * REP
    pid = tl.program_id(0)
    m0 = tl.program_id(1) * ROWS
    KS: tl.constexpr = K // SPLIT
    STEPS: tl.constexpr = (KS + BK - 1) // BK
    EVENK: tl.constexpr = KS % BK == 0
    NORM: tl.constexpr = gain_ptr is not None
    NY: tl.constexpr = N // 2 if SWIGLU else N
    EVEN: tl.constexpr = NY % BN == 0
    k0 = tl.program_id(2) * KS
    if PDL and TRIG == 0:
        tl.extra.cuda.gdc_launch_dependents()
    k = (k0 + tl.arange(0, BK))[None, None, :]
    kx = tl.broadcast_to(k, [XR, 1, BK])
    rows = (tl.arange(0, XR) * REP)[:, None] + tl.arange(0, REP)[None, :]
    ws = _fma_weights(w_ptr, (pid * BN + rows)[:, :, None], k, 0, PRE, NY, K, k0 + KS, BK, EVENK, EVEN, EVICT)
    if SWIGLU:
        us = _fma_weights(w_ptr + NY * K, (pid * BN + rows)[:, :, None], k, 0, PRE, NY, K, k0 + KS, BK, EVENK, EVEN, EVICT)
    if NORM:
        gs = ()
        for i in tl.static_range(STEPS):
            gs = gs + (tl.load(gain_ptr + kx + i * BK, mask=kx + i * BK < k0 + KS, other=0.0),)
    if PF_CHUNKS > 0:
        _prefetch_l2(pf_ptr, PF_CHUNKS, PF_PER, 32 * NW)
    if PDL and TRIG == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL and TRIG == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if ARGMAX:
        bests = ()
        wheres = ()
        bads = ()
        for j in tl.static_range(ROWS):
            bests = bests + (tl.full([XR, REP], float("-inf"), tl.float32),)
            wheres = wheres + (tl.full([XR, REP], 0, tl.int32),)
            bads = bads + (tl.full([XR, REP], 0, tl.int32),)
    for t in range(TILES):
        tile = tl.minimum(pid + t * P, NT - 1)
        n = tile * BN + rows
        if PERSIST:
            nn = tl.minimum(pid + (t + 1) * P, NT - 1) * BN + rows
            nxt = _fma_weights(w_ptr, nn[:, :, None], k, 0, PRE, NY, K, k0 + KS, BK, EVENK, EVEN, EVICT)
        if PRE < STEPS:
            rest = _fma_weights(w_ptr, n[:, :, None], k, PRE, STEPS, NY, K, k0 + KS, BK, EVENK, EVEN, EVICT)
            if SWIGLU:
                urest = _fma_weights(w_ptr + NY * K, n[:, :, None], k, PRE, STEPS, NY, K, k0 + KS, BK, EVENK, EVEN, EVICT)
        accs = ()
        ups = ()
        sums = ()
        for j in tl.static_range(ROWS):
            accs = accs + (tl.zeros([XR, REP, BK], tl.float32),)
            ups = ups + (tl.zeros([XR, REP, BK], tl.float32),)
            sums = sums + (tl.zeros([XR, 1, BK], tl.float32),)
        for i in tl.static_range(STEPS):
            if i < PRE:
                w = ws[i].to(tl.float32)
            else:
                w = rest[i - PRE].to(tl.float32)
            if SWIGLU:
                if i < PRE:
                    u = us[i].to(tl.float32)
                else:
                    u = urest[i - PRE].to(tl.float32)
            new = ()
            newu = ()
            news = ()
            for j in tl.static_range(ROWS):
                ok = m0 + j < M
                if not EVENK:
                    ok = ok & (kx + i * BK < k0 + KS)
                x = tl.load(x_ptr + (m0 + j) * XS + kx + i * BK, mask=ok, other=0.0).to(tl.float32)
                if NORM:
                    news = news + (sums[j] + x * x,)
                    x = x * gs[i].to(tl.float32)
                new = new + (accs[j] + w * x,)
                if SWIGLU:
                    newu = newu + (ups[j] + u * x,)
            accs = new
            ups = newu
            sums = news
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + n, mask=n < NY, other=0.0).to(tl.float32)
        nb = ()
        nwh = ()
        nbad = ()
        for j in tl.static_range(ROWS):
            ok = (n < NY) & (m0 + j < M)
            y = tl.sum(accs[j], 2)
            if NORM:
                scale = tl.rsqrt(tl.sum(sums[j], 2) * (1.0 / K) + eps)
                y = y * scale
            if SWIGLU:
                up = tl.sum(ups[j], 2)
                if NORM:
                    up = up * scale
                y = y / (1.0 + tl.exp(-y)) * up
            if bias_ptr is not None:
                y += bias
            if residual_ptr is not None:
                y += tl.load(residual_ptr + (m0 + j) * NY + n, mask=ok, other=0.0).to(tl.float32)
            out = y.to(x_ptr.dtype.element_ty)
            if STORE:
                if SPLIT > 1:
                    tl.store(y_ptr + (tl.program_id(2) * M + m0 + j) * NY + n, y, mask=ok)
                else:
                    tl.store(y_ptr + (m0 + j).to(tl.int64) * NY + n, out, mask=ok)
            if ARGMAX:
                v = out.to(tl.float32)
                if N % BN != 0:
                    v = tl.where(n < N, v, float("-inf"))
                better = v > bests[j]
                nb = nb + (tl.where(better, v, bests[j]),)
                nwh = nwh + (tl.where(better, n, wheres[j]),)
                nbad = nbad + (bads[j] | (1 - (v < float("inf")).to(tl.int32)),)
        if ARGMAX:
            bests = nb
            wheres = nwh
            bads = nbad
        if PERSIST:
            ws = nxt
    if ARGMAX:
        for j in tl.static_range(ROWS):
            top = tl.max(tl.max(bests[j], 1), 0)
            i = tl.min(tl.min(tl.where(bests[j] == top, wheres[j], 2147483647), 1), 0)
            b = tl.max(tl.max(bads[j], 1), 0)
            at = (m0 + j) * P + pid
            tl.store(best_ptr + at, tl.where(b > 0, float("inf"), top), mask=m0 + j < M)
            tl.store(index_ptr + at, tl.where(b > 0, -1, i), mask=m0 + j < M)
    if PDL and TRIG == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def argmax_partials(best_ptr, index_ptr, token_ptr, P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
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


# ---- the earlier form and its TMA variant, as the baseline -------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["M"])
def pipe_linear(x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, M, N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, SWIGLU: tl.constexpr, TMA: tl.constexpr, PERSIST: tl.constexpr,
                NT: tl.constexpr, PDL: tl.constexpr, TRIG: tl.constexpr):
    pid = tl.program_id(0)
    NY: tl.constexpr = N // 2 if SWIGLU else N
    KS: tl.constexpr = K // SPLIT
    k0 = tl.program_id(1) * KS
    if PDL and TRIG == 0:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL and TRIG == 2:
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.arange(0, BM)
    for tile in tl.range(pid, NT if PERSIST else pid + 1, tl.num_programs(0), flatten=PERSIST):
        n = tile * BN + tl.arange(0, BN)
        acc = tl.zeros([BN, BM], tl.float32)
        acc1 = tl.zeros([BN, BM], tl.float32)
        for kk in tl.range(0, KS, BK, num_stages=STAGES):
            k = k0 + kk + tl.arange(0, BK)
            if TMA:
                w = w_ptr.load([tile * BN, k0 + kk])
            elif KS % BK == 0:
                w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :])
            else:
                w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=(k < k0 + KS)[None, :], other=0.0)
            x = tl.load(x_ptr + m[None, :] * XS + k[:, None], mask=(m < M)[None, :] & (k < k0 + KS)[:, None], other=0.0)
            acc = tl.dot(w, x, acc)
            if SWIGLU:
                if TMA:
                    u = w_ptr.load([NY + tile * BN, k0 + kk])
                else:
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
    if PDL and TRIG == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def stub(x_ptr, y_ptr, LOOPS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr, pf_ptr, PF_CHUNKS: tl.constexpr, PF_PER: tl.constexpr):
    # a stand-in for attention: a few programs, a chain of dependent loads; copies its input (COUNT elements)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PF_CHUNKS > 0:
        _prefetch_l2(pf_ptr, PF_CHUNKS, PF_PER, 128)
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
def read_kernel(x_ptr, y_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr, ITERS: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    at = pid * (BLOCK * ITERS) + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(ITERS):
        acc ^= tl.load(x_ptr + at + i * BLOCK, eviction_policy="evict_first")
    s = tl.xor_sum(acc, 0)
    if s == 123456789:
        tl.store(y_ptr + pid, s)


@triton.jit(do_not_specialize=["M"])
def fma_old(x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, M, N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            SPLIT: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr):
    # the form measured before: [BN, BK] tiles, x as a vector, first tile before the wait
    NY: tl.constexpr = N // 2 if SWIGLU else N
    KS: tl.constexpr = K // SPLIT
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    wp = w_ptr + n.to(tl.int64)[:, None] * K + tl.program_id(1) * KS + k[None, :]
    w = tl.load(wp, mask=(k < KS)[None, :], other=0.0)
    if SWIGLU:
        u = tl.load(wp + NY * K, mask=(k < KS)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BN], tl.float32)
    acc1 = tl.zeros([BN], tl.float32)
    for k0 in tl.static_range(0, KS, BK):
        if k0 > 0:
            w = tl.load(wp + k0, mask=(k + k0 < KS)[None, :], other=0.0)
            if SWIGLU:
                u = tl.load(wp + NY * K + k0, mask=(k + k0 < KS)[None, :], other=0.0)
        x = tl.load(x_ptr + tl.program_id(1) * KS + k0 + k, mask=k + k0 < KS, other=0.0).to(tl.float32)
        acc += tl.sum(w.to(tl.float32) * x[None, :], 1)
        if SWIGLU:
            acc1 += tl.sum(u.to(tl.float32) * x[None, :], 1)
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * acc1
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n).to(tl.float32)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + n).to(tl.float32)
    if SPLIT > 1:
        tl.store(y_ptr + tl.program_id(1) * NY + n, acc)
    else:
        tl.store(y_ptr + n, acc.to(x_ptr.dtype.element_ty))
