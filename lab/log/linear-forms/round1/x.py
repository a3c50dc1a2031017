"""Experiment no. 1, first call: correctness, search and tables on Qwen2.5-0.5B's shapes."""
import json, multiprocessing as mp, os, sys, time, traceback
T0 = time.time()
DEADLINE = float(os.environ.get("DEADLINE", "165"))
OUT = os.environ.get("OUT", "/tmp")
import torch, triton
import kernels as kn, ops, fake
left = lambda: DEADLINE - (time.time() - T0)
MODEL = "qwen2.5-0.5b"
OPS = ["head", "gu", "down", "qkv", "o"]
rows = []


def say(*a):
    print("[%5.1f]" % (time.time() - T0), *a, flush=True)


def keep(**r):
    rows.append(r)
    with open(OUT + "/rows.jsonl", "a") as f:
        f.write(json.dumps(r) + "\n")


def job(j):
    op, cfg, kw = j
    fake.on()
    try:
        ops.warm(op, MODEL, 1, cfg, **kw)
        return None
    except Exception as e:
        return (j, repr(e)[:200])


bad = set()


def precompile(jobs):
    jobs = [j for i, j in enumerate(jobs) if j not in jobs[:i]]
    t = time.time()
    for r in POOL.imap_unordered(job, jobs, chunksize=2):
        if r:
            bad.add((r[0][0], r[0][1]))
            say("compile failed", r)
    say("compiled", len(jobs), "in %.1f s" % (time.time() - t))


def time_graph(g, reps=7, inner=3):
    for _ in range(2):
        g.replay()
    ev = [torch.cuda.Event(enable_timing=True) for _ in range(2 * reps)]
    for i in range(reps):
        ev[2 * i].record()
        for _ in range(inner):
            g.replay()
        ev[2 * i + 1].record()
    torch.cuda.synchronize()
    t = sorted(ev[2 * i].elapsed_time(ev[2 * i + 1]) / inner * 1e3 for i in range(reps))
    return t[reps // 2]


def capture(fn):
    fn()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        fn()
    return g


def chain_us(ch, M, plan, reps=7, **kw):
    g = capture(lambda: ch.step(M, plan, **kw))
    return time_graph(g, reps)


def tune(ch, M, plan, cands, passes=2, top=5, label="", **kw):
    """Coordinate descent in the chain itself."""
    plan = dict(plan)
    seen = {}
    for p in range(passes):
        for op in OPS:
            if op not in cands:
                continue
            if left() < 12:
                return plan
            lst = [c for c in cands[op] if (op, c) not in bad] if p == 0 else [c for _, c in sorted((t, c) for (o, c), t in seen.items() if o == op)[:top]]
            res = []
            for c in lst:
                try:
                    t = chain_us(ch, M, {**plan, op: c}, reps=5, **kw)
                except Exception as e:
                    bad.add((op, c)); say("failed", op, c, repr(e)[:150]); continue
                res.append((t, c)); seen[(op, c)] = t
                keep(kind="tune", label=label, M=M, op=op, cfg=c, us=t, base=plan[op], npass=p)
            if res:
                res.sort()
                plan[op] = res[0][1]
                say(label, "M", M, op, " ".join("%s=%.1f" % (",".join(str(int(v)) for v in c[1:]), t) for t, c in res[:4]), "worst %.1f" % res[-1][0])
    return plan


def fma_cands(op, rows_=1, limit=112):
    N, K = ops.shapes(MODEL)[op]
    NY = N // 2 if op == "gu" else N
    out = []
    for NW in (1, 2, 4, 8):
        for BK in (128, 256, 512, 1024):
            if NW * 256 < BK or (K < 4000 and BK == 512 and op != "gu"):
                continue
            XR = NW * 256 // BK
            for REP in (1, 2, 4):
                steps = ops.cdiv(K, BK)
                regs = REP * steps * 4 * (2 if op == "gu" else 1)
                acc = REP * 8 * rows_ * (2 if op == "gu" else 1)
                P = NY // (XR * REP)
                if regs > (160 if op == "down" and regs > limit else limit) or acc > 130 or P < 100 or P > 40000:
                    continue
                pre = 99 if regs <= limit else steps // 2
                if op == "head" and (P > 20000 or (BK == 1024 and REP == 1)):
                    continue
                out.append(("fma", rows_, XR * REP, BK, NW, 1, pre, 0))
                if op == "head" and NW in (4, 8) and BK < 512 and regs <= 60 and rows_ == 1:
                    out += [("fma", rows_, XR * REP, BK, NW, 1, pre, 132 * g) for g in ((2, 3) if NW == 4 else (1, 2))]
    return out


def mma_cands(op):
    N, K = ops.shapes(MODEL)[op]
    nk = K // 32
    out = []
    for SWAP, BN in ((True, 16), (True, 32), (False, 8), (False, 16), (False, 32)):
        if op == "gu" and BN < 16:
            continue
        for WK in ((1, 2, 4, 8, 16) if op == "down" else (1, 2, 4, 8)):
            for KB in (1, 2, 4):
                if nk % (WK * KB) and not (WK * KB in (8, 16) and KB == 1):
                    continue
                steps = ops.cdiv(nk, WK * KB)
                if steps < 2 or steps > 40:
                    continue
                regs = BN // 8 * steps * KB * 4
                if regs > 160 or (regs > 120 and op != "down"):
                    continue
                for ACCS in ((1, 2) if op in ("qkv", "o", "down") else (1,)):
                    out.append(("mma", 8 if SWAP else 16, BN, WK, KB, 99 if regs <= 120 else steps // 2, ACCS, SWAP, 0))
                if op == "head" and WK in (2, 4, 8) and regs <= 60:
                    out += [("mma", 8 if SWAP else 16, BN, WK, KB, 99, 1, SWAP, 132 * g) for g in {2: (4, 6), 4: (2, 3), 8: (1, 2)}[WK]]
    return out


OLD = {"qkv": ("old", 2, 1024, 4, 1), "o": ("old", 2, 1024, 4, 1), "gu": ("old", 4, 512, 2, 1), "down": ("old", 4, 1024, 4, 2), "head": ("old", 4, 512, 2, 1)}
OLD8 = {**OLD, "gu": ("old", 8, 512, 2, 1)}
pipe = lambda BM: {"qkv": ("pipe", BM, 64, 128, 4, 4, 4, False, 0), "o": ("pipe", BM, 64, 128, 4, 4, 4, False, 0), "gu": ("pipe", BM, 64, 128, 4, 1, 5 if BM < 32 else 4, False, 0),
                   "down": ("pipe", BM, 64, 128, 4, 4, 6, False, 0), "head": ("pipe", BM, 32, 128, 4, 1, 5, False, 0)}
TMA = {"head": [("pipe", 16, 64, 128, 4, 1, 4, True, 264), ("pipe", 16, 128, 128, 4, 1, 5, True, 132), ("pipe", 16, 64, 128, 4, 1, 6, True, 0)],
       "gu": [("pipe", 16, 64, 128, 4, 1, 3, True, 0), ("pipe", 16, 64, 128, 4, 1, 6, True, 0)]}
F0 = {"qkv": ("fma", 1, 4, 256, 4, 1, 99, 0), "o": ("fma", 1, 4, 256, 4, 1, 99, 0), "gu": ("fma", 1, 8, 256, 4, 1, 99, 0), "down": ("fma", 1, 2, 1024, 4, 1, 99, 0),
      "head": ("fma", 1, 16, 256, 4, 1, 99, 0)}
M0 = {"qkv": ("mma", 8, 16, 4, 1, 99, 1, True, 0), "o": ("mma", 8, 16, 4, 1, 99, 1, True, 0), "gu": ("mma", 8, 16, 4, 1, 99, 1, True, 0),
      "down": ("mma", 16, 8, 8, 1, 99, 1, False, 0), "head": ("mma", 8, 16, 4, 1, 99, 1, True, 0)}


def rebm(plan, BM, bns=None):
    """The same K order with another number of rows; SWAP takes multiples of 8, else of 16."""
    out = {}
    for op, c in plan.items():
        bm = BM if c[7] else max(16, BM)
        out[op] = (c[0], bm) + c[2:]
    return out


def check_plan(ch, M, plan, norm, label):
    """Each linear against fp32 on fresh inputs; outputs poisoned."""
    worst = {}
    c = ch.c
    w = ch.w[3]
    gen = torch.Generator(device="cuda").manual_seed(M * 7 + norm)
    for op, (N, K) in ops.shapes(MODEL).items():
        xs = c["qkv"] if op == "o" else K
        x = torch.randn(64, xs, device="cuda", generator=gen).to(torch.bfloat16)
        res = torch.randn(64, N, device="cuda", generator=gen).to(torch.bfloat16)
        NY = N // 2 if op == "gu" else N
        y = torch.full((64, NY), float("nan"), device="cuda", dtype=torch.bfloat16)
        b, r, g = ops.flags(op, MODEL, norm)
        gain = (w["g1"] if op != "head" else ch.gf) if g else None
        W = w[op] if op != "head" else ch.head
        ch.best.fill_(float("nan")); ch.index.fill_(-5); ch.token.fill_(-9)
        P = ch.launch(op, W, x, y, M, plan[op], bias=w["bias"] if b else None, residual=res if r else None, gain=gain, store=True)
        xf = x[:M, :K].float()
        if g:
            xf = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6) * gain.float()
        ref = xf @ W.float().T
        if b: ref += w["bias"].float()
        if r: ref += res[:M].float()
        if op == "gu":
            a, u = ref.chunk(2, -1); ref = torch.nn.functional.silu(a) * u
        e = ((y[:M].float() - ref).norm() / ref.norm()).item()
        if not (e < 6e-3) or (M < 64 and not y[M:].isnan().all()):
            say("WRONG", label, op, M, norm, e)
        worst[op] = e
        if op == "head":
            kn.argmax_partials[(M,)](ch.best, ch.index, ch.token, P, min(4096, max(256, 1 << (P - 1).bit_length())), True, num_warps=8, launch_pdl=True)
            if not torch.equal(ch.token[:M].long(), y[:M].float().argmax(-1)):
                vals = y[:M].float().max(-1)
                tok = ch.token[:M].long()
                first = (y[:M].float() == vals.values[:, None]).float().argmax(-1)
                if not torch.equal(tok, first):
                    say("ARGMAX WRONG", label, M, tok[:4].tolist(), first[:4].tolist())
    say("check", label, "M", M, "norm", norm, {k: "%.1e" % v for k, v in worst.items()})


def bits(ch, plans, norm, label, ms=(1, 2, 7, 8, 16, 32, 64)):
    """Row bits: every M against M = 64."""
    c, w = ch.c, ch.w[5]
    gen = torch.Generator(device="cuda").manual_seed(99)
    res_ok = {}
    for op, (N, K) in ops.shapes(MODEL).items():
        xs = c["qkv"] if op == "o" else K
        x = torch.randn(64, xs, device="cuda", generator=gen).to(torch.bfloat16)
        res = torch.randn(64, N, device="cuda", generator=gen).to(torch.bfloat16)
        NY = N // 2 if op == "gu" else N
        b, r, g = ops.flags(op, MODEL, norm)
        gain = (w["g1"] if op != "head" else ch.gf) if g else None
        W = w[op] if op != "head" else ch.head
        full = None
        fails = []
        for M in sorted(ms, reverse=True):
            for first in ((0,) if M > 7 else (0, 5, 31)):
                y = torch.full((64, NY), float("nan"), device="cuda", dtype=torch.bfloat16)
                ch.launch(op, W, x[first:], y, M, plans[M][op], bias=w["bias"] if b else None, residual=res[first:] if r else None, gain=gain, store=True)
                if full is None:
                    full = y.clone()
                elif not torch.equal(y[:M].view(torch.int16), full[first:first + M].view(torch.int16)):
                    d = (y[:M].float() - full[first:first + M].float()).ne(0).float().mean().item()
                    fails.append((M, first, "%.4f" % d))
        res_ok[op] = fails or "equal"
    say("bits", label, "norm", norm, res_ok)
    keep(kind="bits", label=label, norm=norm, result=res_ok)


def cublas(ch, M):
    F = torch.nn.functional.linear
    x = ch.x0[:M]
    at, ff = ch.c["attn"], ch.c["ffn"]

    def fn():
        h = x
        for w in ch.w:
            h = F(F(h, w["qkv"], w["bias"])[:, :at], w["o"])
            h = F(F(h, w["gu"])[:, :ff], w["down"])
        return F(h, ch.head)
    g = capture(fn)
    return time_graph(g)


def section(name, need):
    if left() < need:
        say("skipped", name, "left %.0f" % left())
        return False
    say("==", name)
    return True


def main():
    global POOL
    POOL = mp.get_context("fork").Pool(15)
    C = {"fma": {op: fma_cands(op) for op in OPS}, "mma": {op: mma_cands(op) for op in OPS}}
    say({f: {o: len(v) for o, v in d.items()} for f, d in C.items()})
    jobs = [(op, c, {}) for f in ("fma", "mma") for op in OPS for c in C[f][op]]
    jobs += [(op, p[op], {}) for p in (OLD, OLD8, pipe(16), pipe(32), pipe(64), F0, M0) for op in OPS]
    jobs += [(op, c, {}) for op in TMA for c in TMA[op]]
    jobs += [(op, p[op], dict(norm=n, store=True)) for p in (F0, M0, rebm(M0, 64)) for op in OPS for n in (False, True)]
    precompile(jobs)
    p = torch.cuda.get_device_properties(0)
    env = dict(device=p.name, sms=p.multi_processor_count, torch=torch.__version__, triton=triton.__version__, python=sys.version.split()[0], date=time.strftime("%Y-%m-%d"))
    keep(kind="env", **env); say(env)
    buf = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    yb = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    bw = {}
    for BLOCK, IT, NW in ((2048, 8, 8), (1024, 8, 4), (4096, 4, 8), (2048, 16, 4), (4096, 8, 4)):
        g = capture(lambda: kn.read_kernel[((1 << 28) // (BLOCK * IT),)](buf, yb, 1 << 28, BLOCK, IT, num_warps=NW))
        bw[(BLOCK, IT, NW)] = (1 << 30) / time_graph(g, 5, 2) / 1e6
    del buf
    read = max(bw.values())
    keep(kind="read", tbps=read, all={str(k): v for k, v in bw.items()}); say("read 1 GiB TB/s", {k: "%.2f" % v for k, v in bw.items()})
    ch = ops.Chain(MODEL)
    import gc; gc.collect(); gc.freeze()
    nb = ch.nbytes()
    limit = nb / read / 1e6
    say("bytes %.1f MB limit %.1f us" % (nb / 1e6, limit), "spec limit at 4.0: %.1f" % (nb / 4e6))
    keep(kind="limit", bytes=nb, us=limit)

    def report(label, M, plan, **kw):
        t = chain_us(ch, M, plan, reps=15, **kw)
        say("CHAIN %-34s M %2d %7.1f us %5.1f%% of limit %8.0f tok/s" % (label, M, t, 100 * limit / t, M * 1e6 / t))
        keep(kind="chain", label=label, M=M, us=t, limit_us=limit, plan=plan, opts={k: str(v) for k, v in kw.items()})
        return t

    if section("baselines", 100):
        t = time.time(); report("old FMA", 1, OLD); say("first chain took %.1f s" % (time.time() - t))
        report("old FMA gu8", 1, OLD8)
        for BM, Ms in ((16, (1, 8)), (32, (32,)), (64, (64,))):
            for M in Ms:
                report("old TC (cp.async wgmma)", M, pipe(BM))
        for M in (1, 8, 32, 64):
            t = cublas(ch, M); say("CHAIN cuBLAS M %d %.1f us" % (M, t)); keep(kind="chain", label="cublas", M=M, us=t, limit_us=limit)
        base = pipe(16)
        for op in TMA:
            for c in TMA[op]:
                report("old TC, TMA %s %s" % (op, c[2:]), 1, {**base, op: c})
    if section("correct", 90):
        check_plan(ch, 1, F0, False, "fma"); check_plan(ch, 1, F0, True, "fma")
        for M in (1, 7):
            check_plan(ch, M, M0, False, "mma"); check_plan(ch, M, M0, True, "mma")
        check_plan(ch, 64, rebm(M0, 64), False, "mma"); check_plan(ch, 64, rebm(M0, 64), True, "mma")
    best = {}
    if section("tune", 60):
        report("fma start", 1, F0); report("mma start", 1, M0)
        best["fma"] = tune(ch, 1, F0, C["fma"], label="fma")
        best["mma"] = tune(ch, 1, M0, C["mma"], label="mma")
        tf = report("FMA tuned", 1, best["fma"]); tm = report("MMA tuned", 1, best["mma"])
        say("fma", best["fma"]); say("mma", best["mma"])
    # knobs: where dependents start, cache hint, norm, L2 prefetch
    if best and section("knobs", 45):
        gu_b, down_b = 2 * 4864 * 896 * 2 // 2048, 896 * 4864 * 2 // 2048
        pfs = {"a": {"qkv": ("gu", gu_b)}, "b": {"qkv": ("gu", gu_b), "gu": ("down", down_b)}, "c": {"o": ("gu", gu_b // 2)}, "d": {"gu": ("down", down_b)}}
        kws = [dict(trig=1), dict(trig=2), dict(trig=3), dict(evict=""), dict(norm=True)]
        jobs = [(op, best[f][op], kw) for f in ("fma", "mma") for op in OPS for kw in kws]
        jobs += [(op, best[f][op], dict(pf=v[op][1])) for f in ("fma", "mma") for v in pfs.values() for op in v]
        jobs += [(op, best["mma"][op], dict(norm=True, store=True)) for op in OPS]
        precompile(jobs)
        for f in ("fma", "mma"):
            for kw in kws:
                if left() > 30: report(f + " " + str(kw), 1, best[f], **kw)
            for k, v in pfs.items():
                if left() > 30: report(f + " pf " + k, 1, best[f], pf=v)
            for s in (0, -1):
                for pfn in (0, gu_b):
                    if left() > 30 and s: report(f + " stub attention, prefetch %d" % pfn, 1, best[f], stub=6, stub_pf=pfn)
    if best and section("mma rows", 28):
        m = best["mma"]
        cand = {}
        for op in OPS:
            c = m[op]
            N, K = ops.shapes(MODEL)[op]
            steps = ops.cdiv(K, 32 * c[3] * c[4])
            for BM in (16, 32, 64):
                l = []
                for sw in (True, False):
                    for BN in (8, 16, 32):
                        if (sw or op == "gu") and BN < 16: continue
                        regs = BN // 8 * steps * c[4] * 4
                        acc = BN * BM // 32
                        if acc > 64 or regs > 240: continue
                        for pre in {99 if regs <= 112 else max(1, steps * 100 // regs), max(1, steps // 3)}:
                            if regs * min(pre, steps) / steps + acc > 190: continue
                            l.append(("mma", BM, BN, c[3], c[4], pre, c[6], sw, 0))
                cand[(op, BM)] = l
        say({k: len(v) for k, v in cand.items()})
        precompile([(op, c, {}) for (op, BM), l in cand.items() for c in l])
        plans = {M: m for M in (1, 2, 7, 8)}
        for BM in (16, 32, 64):
            if left() < 14: break
            start = {op: cand[(op, BM)][0] for op in OPS}
            pl = tune(ch, BM, start, {op: cand[(op, BM)] for op in OPS}, passes=1, label="mma")
            plans[BM] = pl
            report("MMA tuned", BM, pl); say(pl)
        report("MMA tuned", 8, m)
        keep(kind="plans", plans={str(k): v for k, v in plans.items()})
        if 64 in plans and left() > 10:
            bits(ch, plans, False, "mma", ms=[k for k in (1, 2, 7, 8, 16, 32, 64) if k in plans])
    if best and section("fma rows", 20):
        for R in (2, 4, 8):
            if left() < 16: break
            cands = {op: [c for c in fma_cands(op, R, 80)][:14] for op in OPS}
            cands = {op: [c for c in l if c[2] * 0 == 0] for op, l in cands.items()}
            own = {op: (c[0], R) + c[2:7] + (0,) for op, c in best["fma"].items()}
            for op in OPS:
                if own[op] not in cands[op] and R < 8: cands[op].append(own[op])
            precompile([(op, c, {}) for op, l in cands.items() for c in l])
            start = {op: cands[op][0] for op in OPS}
            pl = tune(ch, R, start, cands, passes=1, label="fma")
            report("FMA tuned", R, pl); say(pl)
    if best and section("left out", 8):
        for f in ("fma", "mma"):
            t = chain_us(ch, 1, best[f], reps=11)
            for op in OPS:
                d = t - chain_us(ch, 1, best[f], reps=11, skip=(op,))
                n = 1 if op == "head" else ch.layers
                N, K = ops.shapes(MODEL)[op]
                say("leave out %s %s %.2f us a call, %.2f TB/s" % (f, op, d / n, N * K * 2 / (d / n) / 1e6))
                keep(kind="leave_out", form=f, op=op, us=d / n, tbps=N * K * 2 / (d / n) / 1e6)


try:
    main()
except BaseException:
    traceback.print_exc()
finally:
    POOL.terminate()
    say("end")
    sys.stdout.flush()
    os._exit(0)
