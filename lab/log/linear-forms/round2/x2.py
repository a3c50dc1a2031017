"""Experiment no. 1, second call."""
import gc, json, multiprocessing as mp, os, sys, time, traceback
T0 = time.time()
DEADLINE = float(os.environ.get("DEADLINE", "150"))
OUT = os.environ.get("OUT", "/tmp")
import torch, triton
import kernels as kn, ops, fake
from ops import mma, fma, pipe, cdiv
left = lambda: DEADLINE - (time.time() - T0)
MODEL = "qwen2.5-0.5b"
OPS = ["head", "gu", "down", "qkv", "o"]
bad = set()
SEEN = {}


def say(*a):
    print("[%5.1f]" % (time.time() - T0), *a, flush=True)


def keep(**r):
    with open(OUT + "/rows.jsonl", "a") as f:
        f.write(json.dumps(r) + "\n")


def short(c):
    d = dict(c)
    if d["form"] == "mma":
        return "m%d n%d w%d k%d %s a%d p%d g%d r%d%s%s" % (d["BM"], d["BN"], d["WK"], d["KB"], "S" if d["SWAP"] else "-", d["ACCS"], d["PRE"], d["GX"], d["REGS"], "b" if d["BAR"] else "", d["CACHE"])
    if d["form"] == "fma":
        return "R%d n%d k%d w%d p%d%s%s r%d" % (d["ROWS"], d["BN"], d["BK"], d["NW"], d["PRE"], " s8" if d["SUM8"] else "", " b" if d["BAR"] else "", d["REGS"])
    return "P m%d n%d k%d w%d s%d st%d" % (d["BM"], d["BN"], d["BK"], d["NW"], d["SPLIT"], d["STAGES"])


def job(j):
    model, op, cfg, kw = j
    fake.on()
    try:
        ops.warm(op, model, 1, cfg, **dict(kw))
    except Exception as e:
        return (j, repr(e)[:300])


def J(op, cfg, model=None, **kw):
    return (model or MODEL, op, cfg, tuple(sorted(kw.items())))


def plan_jobs(plan, model=None, norm=False, **kw):
    model = model or MODEL
    return [J(op, plan[op], model, norm=norm, pin=ops.pin_of(op, model, plan) if norm and op in ("qkv", "gu", "head") else 0, **kw) for op in OPS]


def precompile(jobs):
    jobs = list(dict.fromkeys(jobs))
    t = time.time()
    nbad = 0
    for r in POOL.imap_unordered(job, jobs, chunksize=2):
        if r:
            bad.add((r[0][1], r[0][2])); nbad += 1
            if nbad < 4: say("compile failed", r)
    say("compiled", len(jobs), "in %.1f s, failed %d" % (time.time() - t, nbad))


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
    return sorted(ev[2 * i].elapsed_time(ev[2 * i + 1]) / inner * 1e3 for i in range(reps))[reps // 2]


def capture(fn):
    fn()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        fn()
    return g


def chain_us(ch, M, plan, reps=7, **kw):
    return time_graph(capture(lambda: ch.step(M, plan, **kw)), reps)


def tune(ch, M, plan, cands, passes=2, top=5, label="", reserve=12, **kw):
    plan, seen = dict(plan), {}
    SEEN[(ch.model, label, M)] = seen
    for p in range(passes):
        for op in OPS:
            if op not in cands or left() < reserve:
                continue
            lst = [c for c in cands[op] if (op, c) not in bad] if p == 0 else [c for _, c in sorted((t, c) for (o, c), t in seen.items() if o == op)[:top]]
            res = []
            for c in lst:
                try:
                    t = chain_us(ch, M, {**plan, op: c}, reps=5, **kw)
                except Exception as e:
                    bad.add((op, c)); say("failed", op, short(c), repr(e)[:150]); continue
                res.append((t, c)); seen[(op, c)] = t
                keep(kind="tune", model=ch.model, label=label, M=M, op=op, cfg=dict(c), us=t, npass=p)
            if res:
                res.sort()
                plan[op] = res[0][1]
                say(label, "M", M, op, len(res), " | ".join("%s = %.1f" % (short(c), t) for t, c in res[:3]), "| worst %.1f" % res[-1][0])
    return plan


def mma_cands(model, op, bm=8):
    N, K = ops.shapes(model)[op]
    nk = cdiv(K, 32)
    out = []
    for SWAP, BN in ((True, 16), (False, 8), (False, 16), (True, 32)):
        if op == "gu" and BN < 16: continue
        for WK, KB in ((1, 2), (2, 1), (2, 2), (4, 1), (8, 1), (16, 1)):
            steps = cdiv(nk, WK * KB)
            if nk % (WK * KB) and (WK < 8 and nk % WK == 0 or WK == 16 and op != "down" or KB > 1): continue
            w = BN // 8 * steps * KB * 4
            x = (2 if not SWAP else 1) * steps * KB * 4
            if steps < 2 or w > 125 or (N > 100000 and w < 50): 
                if not (op == "down" and 125 < w <= 160 and WK <= 8): continue
            for ACCS in (1, 2, 4):
                if ACCS > steps or (ACCS == 4 and op in ("head", "gu") and WK < 4) or (ACCS == 1 and steps * KB > 12): continue
                pre = 99 if w <= 125 else steps // 2
                for regs in ((0,) if op == "head" else (0, 1)):
                    cap = 0
                    if regs:
                        need = min(w, 125) + x + 40 + 4 * ACCS * BN * bm // 256
                        cap = min(255, cdiv(need, 8) * 8)
                        if 65536 // (cap * 32 * WK) == 0: continue
                    out.append(mma(bm if SWAP else max(16, bm), BN, WK, KB, SWAP, ACCS=ACCS, PRE=pre, REGS=cap))
    return out


def adapt(c, model, op):
    """The same tiles for another K: as many weight steps before the wait as 110 registers hold."""
    d = dict(c)
    K = ops.shapes(model)[op][1]
    if d["form"] == "mma":
        steps = cdiv(K, 32 * d["WK"] * d["KB"])
        w = d["BN"] // 8 * d["KB"] * 4
        x = (1 if d["SWAP"] else 2) * d["KB"] * 4
        d["PRE"] = 99 if steps * w <= 120 else max(1, 110 // w)
        d["GX"] = 99 if steps * x <= 80 else max(1, 64 // x)
        d["REGS"] = 0
    else:
        steps = cdiv(K, d["BK"])
        w = d["BN"] // max(1, d["NW"] * 256 // d["BK"]) * 4 * (2 if op == "gu" else 1)
        d["PRE"] = 99 if steps * w <= 120 else max(1, 110 // w)
        d["REGS"] = 0
    return tuple(sorted(d.items()))


def fma_cands(model, op, rows=1):
    N, K = ops.shapes(model)[op]
    NY = N // 2 if op == "gu" else N
    out = []
    for NW in (1, 2, 4, 8):
        for BK in (128, 256, 512, 1024):
            if NW * 256 < BK or (K < 4000 and BK == 512 and op != "gu"): continue
            XR = NW * 256 // BK
            for REP in (1, 2, 4):
                steps = cdiv(K, BK)
                w = REP * steps * 4 * (2 if op == "gu" else 1)
                P = NY // (XR * REP)
                if w > 112 or P < 100 or P > 20000 or (op == "head" and (w < 30 or BK > 256)): continue
                for s8 in (True, False):
                    out.append(fma(rows, XR * REP, BK, NW, SUM8=s8))
                    if op == "down" or (op == "gu" and s8): out.append(fma(rows, XR * REP, BK, NW, SUM8=s8, REGS=min(255, cdiv(w + 4 * steps + 56, 8) * 8)))
    return out


def pipe_cands(op, BM):
    out = []
    K = ops.shapes(MODEL)[op][1]
    for BN in (32, 64, 128):
        for BK in (64, 128):
            for SPLIT in ((1,) if op in ("gu", "head") else (2, 4) if op != "down" else (4, 8)):
                for ST in (3, 4, 6):
                    if op == "head" and BN == 32 and BK == 64: continue
                    smem = (BN * (2 if op == "gu" else 1) + BM) * BK * 2 * ST
                    if smem > 200000 or smem < 40000: continue
                    out.append(pipe(BM, BN, BK, 4, SPLIT, ST))
    return out


def check_chain(ch, M, plan, label):
    for norm in (False, True):
        for b in ch.xs + ch.hs + ch.ss + [ch.qkv, ch.ffn, ch.best]:
            b.fill_(float("nan"))
        ch.token.fill_(-9)
        ch.x0.normal_()
        ch.step(M, plan, norm=norm)
        rx, rl = ch.reference(M, norm)
        e = ((ch.last[:M].float() - rx.float()).norm() / rx.float().norm()).item()
        tok = ch.token[:M].long()
        gap = (rl.max(-1).values - rl.gather(1, tok[:, None].clamp(min=0))[:, 0]).max().item() / rl.std().item()
        say("check", label, "M", M, "norm", norm, "rel err %.2e, argmax gap %.3f sd, nan %d" % (e, gap, ch.last[:M].isnan().sum().item()), "" if e < 2e-2 and gap < 0.2 else "WRONG")
        keep(kind="check", model=ch.model, label=label, M=M, norm=norm, err=e, gap_sd=gap)


def bits(ch, plans, norm, label, ms):
    c, w = ch.c, ch.w[5]
    gen = torch.Generator(device="cuda").manual_seed(99)
    top = max(ms)
    out = {}
    for op, (N, K) in ops.shapes(ch.model).items():
        x = torch.randn(top, c["qkv"] if op == "o" else K, device="cuda", generator=gen).to(torch.bfloat16)
        NY = N // 2 if op == "gu" else N
        res = torch.randn(top, NY, device="cuda", generator=gen).to(torch.bfloat16)
        b, r, s, e = ops.flags(op, ch.model, norm)
        pin = ops.pin_of(op, ch.model, plans[top]) if s else 0
        ss = torch.rand(top, max(1, pin), device="cuda", generator=gen) * 8 if s else None
        W = w[op] if op != "head" else ch.head
        full, fails = None, []
        for M in sorted(ms, reverse=True):
            for first in ((0,) if M > 7 else (0, 5, top - M)):
                y = torch.full((top, NY), float("nan"), device="cuda", dtype=torch.bfloat16)
                h = torch.full_like(y, float("nan")) if e else None
                so = torch.full((top, ops.tiles(op, ch.model, plans[M][op])), float("nan"), device="cuda") if e else None
                ch.launch(op, W, x[first:], y, M, plans[M][op], bias=w["bias"] if b else None, residual=res[first:] if r else None, ss=ss[first:] if s else None, pin=pin,
                          gain=w["g2"] if e else None, h=h, ss_out=so, store=True)
                got = [y, h, so] if e else [y]
                if full is None:
                    full = [t.clone() for t in got]
                for name, a, f in zip("yhs", got, full):
                    if a.shape != f.shape or not torch.equal(a[:M], f[first:first + M]):
                        fails.append((M, first, name))
                if M < top and not y[M:].isnan().all(): fails.append((M, "wrote past"))
        out[op] = fails or "equal"
    say("bits", label, "norm", norm, ms, out)
    keep(kind="bits", model=ch.model, label=label, norm=norm, ms=list(ms), result={k: str(v) for k, v in out.items()})


def section(name, need):
    ok = left() >= need
    say("==" if ok else "skipped", name, "" if ok else "left %.0f" % left())
    return ok


F0 = {"qkv": fma(1, 4, 1024, 8, SUM8=False), "o": fma(1, 4, 256, 4, SUM8=False), "gu": fma(1, 4, 256, 2, SUM8=False), "down": fma(1, 1, 256, 1, SUM8=False), "head": fma(1, 32, 128, 4, SUM8=False)}
M0 = {"qkv": mma(8, 16, 4, 1, True, ACCS=2, REGS=128), "o": mma(8, 16, 4, 1, True, ACCS=2, REGS=128), "gu": mma(8, 16, 4, 1, True, ACCS=2, REGS=128),
      "down": mma(16, 8, 8, 1, False, ACCS=2), "head": mma(8, 16, 2, 2, True)}
P0 = lambda BM: {"qkv": pipe(BM, 64, 128, 4, 4, 4), "o": pipe(BM, 64, 128, 4, 4, 4), "gu": pipe(BM, 64, 128, 4, 1, 4), "down": pipe(BM, 64, 128, 4, 4, 6), "head": pipe(BM, 32, 128, 4, 1, 5)}


def main():
    global POOL
    POOL = mp.get_context("fork").Pool(15)
    CM = {op: mma_cands(MODEL, op) for op in OPS}
    CF = {op: fma_cands(MODEL, op) for op in OPS}
    for op in ("qkv", "o"):
        CM[op] = [c for c in CM[op] if dict(c)["BN"] < 32 and not (dict(c)["ACCS"] == 4 and dict(c)["REGS"] == 0)]
    g = lambda c: dict(c)
    for op in ("qkv", "o"):
        CM[op] = [c for c in CM[op] if g(c)["WK"] in (2, 4) and g(c)["ACCS"] > 1 and (g(c)["REGS"] or g(c)["ACCS"] == 2) and not (g(c)["BN"] == 16 and not g(c)["SWAP"])]
        CF[op] = [c for c in CF[op] if g(c)["BK"] >= 256 and g(c)["NW"] > 1 and g(c)["BN"] < 8]
    CM["gu"] = [c for c in CM["gu"] if g(c)["SWAP"] and (g(c)["REGS"] or g(c)["ACCS"] == 2)]
    CM["head"] = [c for c in CM["head"] if g(c)["ACCS"] < 4]
    CF["head"] = [c for c in CF["head"] if g(c)["NW"] in (2, 4)]
    CF["down"] = [c for c in CF["down"] if g(c)["BN"] <= 4 and g(c)["BK"] > 128]
    CF["gu"] = [c for c in CF["gu"] if g(c)["NW"] < 8 and g(c)["BN"] <= 8]
    CF["gu"] = [c for c in CF["gu"] if dict(c)["BK"] < 1024 and (dict(c)["SUM8"] or not dict(c)["REGS"])]
    CP = {BM: {op: pipe_cands(op, BM) for op in OPS} for BM in (16, 64)}
    say("candidates", {o: (len(CM[o]), len(CF[o]), len(CP[64][o])) for o in OPS})
    jobs = [J(op, c) for op in OPS for c in CM[op] + CF[op]]
    for p in (F0, M0): jobs += plan_jobs(p) + plan_jobs(p, norm=True)
    precompile(jobs)
    p = torch.cuda.get_device_properties(0)
    env = dict(device=p.name, sms=p.multi_processor_count, torch=torch.__version__, triton=triton.__version__, python=sys.version.split()[0], date=time.strftime("%Y-%m-%d"))
    keep(kind="env", **env); say(env)
    buf = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    yb = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    for n, name in ((1 << 28, "1 GiB"), (1 << 29, "2 GiB")):
        g = capture(lambda: kn.read_kernel[(n // 16384,)](buf, yb, 2048, 8, num_warps=8))
        t = time_graph(g, 7, 2); say("read", name, "%.3f TB/s" % (n * 4 / t / 1e6)); keep(kind="read", size=name, tbps=n * 4 / t / 1e6)
    half = lambda: (kn.read_kernel[((1 << 28) // 16384,)](buf, yb, 2048, 8, num_warps=8), kn.read_kernel[((1 << 28) // 16384,)](buf[1 << 28:], yb, 2048, 8, num_warps=8))
    t = time_graph(capture(half), 7, 2) / 2; say("read 1 GiB, two buffers in turn %.3f TB/s" % ((1 << 30) / t / 1e6)); keep(kind="read", size="1 GiB alternating", tbps=(1 << 30) / t / 1e6)
    del buf
    ch = ops.Chain(MODEL)
    gc.collect(); gc.freeze()
    limit = ch.nbytes() / 4.0e6

    def report(label, M, plan, reps=15, **kw):
        t = chain_us(ch, M, plan, reps=reps, **kw)
        say("CHAIN %-40s M %2d %7.1f us %5.1f%% of 4.0 TB/s %8.0f tok/s" % (label, M, t, 100 * limit / t, M * 1e6 / t))
        keep(kind="chain", model=MODEL, label=label, M=M, us=t, limit_us=limit, plan={k: dict(v) for k, v in plan.items()}, opts={k: str(v) for k, v in kw.items()})
        return t

    report("fma start (round one's best)", 1, F0); report("mma start", 1, M0)
    best = {"mma": tune(ch, 1, M0, CM, label="mma"), "fma": tune(ch, 1, F0, CF, label="fma")}
    for f in best:
        report(f + " tuned", 1, best[f])
        for op in OPS: say("   ", op, short(best[f][op]))
    keep(kind="best", M=1, plans={f: {k: dict(v) for k, v in best[f].items()} for f in best})
    m = best["mma"]
    if section("knobs", 60):
        kws = [dict(trig=1), dict(norm=True), dict(progress=True)]
        pfs = {"o>gu tail": {"o": ("gu", (1064, 1064))}, "o>gu all": {"o": ("gu", (0, 2127))}, "qkv>gu tail": {"qkv": ("gu", (1064, 1064))}, "qkv>gu qtr": {"qkv": ("gu", (1596, 531))},
               "gu>down": {"gu": ("down", (0, 1063))}}
        jobs = []
        for f in best:
            jobs += plan_jobs(best[f], norm=True) + plan_jobs(best[f], trig=1) + plan_jobs(best[f], progress=True)
            jobs += [J(op, best[f][op], pf=v[op][1]) for v in pfs.values() for op in v]
        precompile(jobs)
        side = torch.cuda.Stream()
        for f in best:
            b = best[f]
            check_chain(ch, 1, b, f)
            report(f + " shared layer (weights in L2)", 1, b, shared=True)
            if f == "mma":
                cg = {op: tuple(sorted({**dict(c), "CACHE": ".cg", "EVICT": ""}.items())) for op, c in b.items()}
                precompile(plan_jobs(cg)); report(f + " .cg", 1, cg)
                nb = {op: tuple(sorted({**dict(c), "BAR": False, "REGS": 0}.items())) for op, c in b.items()}
                precompile(plan_jobs(nb)); report(f + " no barrier, no register cap", 1, nb)
            report(f + " norm", 1, b, norm=True); report(f + " trig 1", 1, b, trig=1)
            report(f + " without head", 1, b, skip=("head",))
            for k, v in pfs.items(): report(f + " pf " + k, 1, b, pf=v, reps=7)
            res = {}
            for S in (8, 32, 96):
                for D in (1, 2, 3, 5):
                    if left() < 45: break
                    ch.progress.fill_(-1)
                    res["%d/%d" % (S, D)] = "%.0f" % chain_us(ch, 1, b, reps=5, stream=(S, D, side))
            say(f, "streamer programs/distance", res); keep(kind="streamer", form=f, us=res)
            report(f + " stub attention", 1, b, stub=6, reps=7)
            report(f + " stub attention, gu into L2", 1, b, stub=6, stub_pf=2127, reps=7); report(f + " stub attention, half gu into L2", 1, b, stub=6, stub_pf=1063, reps=7)
    plans = {M: m for M in (1, 2, 7, 8)}
    report("mma tuned", 8, m)
    if section("mma rows", 60):
        cand = {}
        for op in OPS:
            d = dict(m[op])
            K = ops.shapes(MODEL)[op][1]
            steps = cdiv(K, 32 * d["WK"] * d["KB"])
            for BM in (64, 16):
                l = []
                for sw in (True, False):
                    for BN in ((d["BN"],) if op in ("o", "down") else (16, 32)):
                        if sw and BN < 16: continue
                        acc = BN * BM // 32 * d["ACCS"]
                        xg = d["KB"] * 4 * (BM // 8)
                        wg = d["KB"] * 4 * (BN // 8)
                        for GX in (1, 2):
                            for pre in {min(steps, max(GX, 60 // wg)), GX}:
                                need = acc + 2 * GX * xg + max(pre, 2 * GX) * wg
                                if need > 230 or GX * xg > 70: continue
                                for cache in (("", "evict_first"), (".cg", "")):
                                    if cache[0] and (BM == 16 or GX == 2): continue
                                    l.append(mma(BM, BN, d["WK"], d["KB"], sw, ACCS=d["ACCS"], PRE=pre, GX=GX, REGS=min(255, cdiv(need + 48, 8) * 8), CACHE=cache[0], EVICT=cache[1]))
                if not l:
                    l = [mma(BM, d["BN"], d["WK"], d["KB"], True if d["BN"] >= 16 else False, ACCS=d["ACCS"], PRE=1, GX=1)]
                cand[(op, BM)] = l
        say({k: len(v) for k, v in cand.items()})
        precompile([J(op, c) for (op, BM), l in cand.items() for c in l])
        for BM in (64, 16):
            if left() < 16: break
            start = {op: next(c for c in cand[(op, BM)] if (op, c) not in bad) for op in OPS}
            pl = tune(ch, BM, start, {op: cand[(op, BM)] for op in OPS}, passes=1, label="mma", reserve=14)
            plans[BM] = pl
            report("mma tuned", BM, pl)
            for op in OPS: say("   ", op, short(pl[op]))
            if BM == 64:
                p32 = {op: tuple(sorted({**dict(c), "BM": 32}.items())) for op, c in pl.items()}
                precompile(plan_jobs(p32))
                plans[32] = p32
                report("mma, M 64's tiles", 32, p32)
        keep(kind="plans", plans={str(k): {o: dict(c) for o, c in v.items()} for k, v in plans.items()})
    if 64 in plans and section("bits", 30):
        for k in (65, 256): plans[k] = plans[64]
        ms = [k for k in (1, 2, 7, 16, 32, 64, 65, 256) if k in plans]
        seen = {}
        jobs = [j for M in ms for n in (False, True) for j in plan_jobs(plans[M], norm=n, store=True)]
        precompile(jobs)
        for n in (False, True):
            if left() > 3: bits(ch, plans, n, "mma", ms)
    if section("pipe, M 64 and 16", 45):
        precompile([J(op, c) for BM in CP for op in OPS for c in CP[BM][op]] + [j for BM in (16, 32, 64) for j in plan_jobs(P0(BM))])
        for BM in (64, 16):
            if left() < 30: break
            pl = tune(ch, BM, P0(BM), CP[BM], passes=1, label="pipe", reserve=28)
            report("pipe tuned", BM, pl)
            for op in OPS: say("   ", op, short(pl[op]))
            if BM == 64:
                p32 = {op: tuple(sorted({**dict(c), "BM": 32}.items())) for op, c in pl.items()}
                report("pipe tuned", 32, p32)
            else:
                report("pipe tuned", 1, pl); report("pipe tuned", 8, pl)
    if section("fma rows", 14):
        for R in (2, 4):
            if left() < 9: break
            own = {op: tuple(sorted({**dict(c), "ROWS": R}.items())) for op, c in best["fma"].items()}
            precompile(plan_jobs(own))
            report("fma, M 1's tiles", R, own)
    del ch
    for model in ("r1-1.5b", "smollm2-135m"):
        if not section(model, 22): break
        ch = ops.Chain(model)
        lim = ch.nbytes() / 4.0e6
        plan, cands = {"mma": {}, "fma": {}}, {"mma": {}, "fma": {}}
        for f in plan:
            seen = SEEN[(MODEL, f, 1)]
            for op in OPS:
                top = [c for _, c in sorted((t, c) for (o, c), t in seen.items() if o == op)[:24]]
                l = list(dict.fromkeys(adapt(c, model, op) for c in top))[:8]
                cands[f][op], plan[f][op] = l, l[0]
        precompile([J(op, c, model) for f in cands for op in OPS for c in cands[f][op]])
        for f in plan:
            if left() < 8: break
            pl = tune(ch, 1, plan[f], cands[f], passes=1, label=f, reserve=6)
            for M in ((1, 8) if f == "mma" else (1,)):
                t = chain_us(ch, M, pl, reps=11)
                say("CHAIN %s %s M %d %.1f us, %.1f%% of 4.0 TB/s, %.0f tok/s" % (model, f, M, t, 100 * lim / t, M * 1e6 / t))
                keep(kind="chain", model=model, label=f + " tuned", M=M, us=t, limit_us=lim, plan={k: dict(v) for k, v in pl.items()})
            if left() > 8:
                precompile(plan_jobs(pl, model, norm=True)); t = chain_us(ch, 1, pl, reps=11, norm=True)
                say("CHAIN %s %s norm M 1 %.1f us" % (model, f, t)); keep(kind="chain", model=model, label=f + " norm", M=1, us=t, limit_us=lim)
        del ch


try:
    main()
except BaseException:
    traceback.print_exc()
finally:
    POOL.terminate()
    say("end")
    os._exit(0)
