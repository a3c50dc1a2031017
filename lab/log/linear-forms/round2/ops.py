"""Launch wrappers and chains, second round."""
import torch
import kernels as kn

BF = torch.bfloat16
MODELS = {
    "qwen2.5-0.5b": dict(layers=24, hidden=896, attn=896, qkv=1152, ffn=4864, vocab=151936, bias=True),
    "r1-1.5b": dict(layers=28, hidden=1536, attn=1536, qkv=2048, ffn=8960, vocab=151936, bias=True),
    "smollm2-135m": dict(layers=30, hidden=576, attn=576, qkv=960, ffn=1536, vocab=49152, bias=False),
}
cdiv = lambda a, b: -(-a // b)
pow2 = lambda n: 1 << max(0, n - 1).bit_length()


def shapes(model):
    c = MODELS[model]
    return {"qkv": (c["qkv"], c["hidden"]), "o": (c["hidden"], c["attn"]), "gu": (2 * c["ffn"], c["hidden"]), "down": (c["hidden"], c["ffn"]),
            "head": (c["vocab"], c["hidden"])}


def tiles(op, model, cfg):
    N, _ = shapes(model)[op]
    d = dict(cfg)
    if op == "gu":
        N //= 2
    return cdiv(N, d["BN"] // 2 if op == "gu" and d["form"] == "mma" else d["BN"])


def C(form, **kw):
    """A config is a sorted tuple of pairs (hashable)."""
    return tuple(sorted(dict(form=form, **kw).items()))


def mma(BM, BN, WK, KB, SWAP, ACCS=1, PRE=99, GX=99, BAR=False, CACHE="", EVICT="evict_first", REGS=0):
    return C("mma", BM=BM, BN=BN, WK=WK, KB=KB, PRE=PRE, ACCS=ACCS, SWAP=SWAP, GX=GX, BAR=BAR, CACHE=CACHE, EVICT=EVICT, REGS=REGS)


def fma(ROWS, BN, BK, NW, PRE=99, SUM8=True, BAR=False, EVICT="evict_first", REGS=0):
    return C("fma", ROWS=ROWS, BN=BN, BK=BK, NW=NW, PRE=PRE, SUM8=SUM8, BAR=BAR, EVICT=EVICT, REGS=REGS)


def pipe(BM, BN, BK, NW, SPLIT, STAGES):
    return C("pipe", BM=BM, BN=BN, BK=BK, NW=NW, SPLIT=SPLIT, STAGES=STAGES)


def spec(op, model, M, cfg, pdl=True, trig=0, pf=(0, 0), store=None, pin=0):
    c = MODELS[model]
    N, K = shapes(model)[op]
    XS = c["qkv"] if op == "o" else K
    d = dict(cfg)
    form = d.pop("form")
    regs = d.pop("REGS", 0)
    swiglu, head = op == "gu", op == "head"
    P = tiles(op, model, cfg)
    common = dict(N=N, K=K, XS=XS, SWIGLU=swiglu, PDL=pdl)
    opt = {}
    if pdl: opt["launch_pdl"] = True
    if regs: opt["maxnreg"] = regs
    if form == "pipe":
        opt["num_warps"] = d.pop("NW")
        return kn.pipe_linear, (P, d["SPLIT"], 1), dict(common, **d), opt, P
    more = dict(ARGMAX=head, STORE=(not head) if store is None else store, P=P, TRIG=trig, PF_FIRST=pf[0], PF_PIECES=pf[1], PIN=pin, PB=pow2(max(1, pin)))
    if form == "mma":
        steps = cdiv(K, 32 * d["WK"] * d["KB"])
        d["PRE"], d["GX"] = min(d["PRE"], steps), min(d["GX"], steps)
        opt["num_warps"] = d["WK"]
        return kn.mma_linear, (P, cdiv(M, d["BM"]), 1), dict(common, **d, **more), opt, P
    d["PRE"] = min(d["PRE"], cdiv(K, d["BK"]))
    d["XR"] = max(1, d["NW"] * 256 // d["BK"])
    BN = d.pop("BN")
    d["REP"] = BN // d["XR"]
    assert d["XR"] * d["REP"] == BN, cfg
    opt["num_warps"] = d["NW"]
    return kn.fma_linear, (P, cdiv(M, d["ROWS"]), 1), dict(common, **d, **more), opt, P


def flags(op, model, norm):
    """bias, residual, scaled input, emits gained rows."""
    return op == "qkv" and MODELS[model]["bias"], op in ("o", "down"), norm and op in ("qkv", "gu", "head"), norm and op in ("o", "down")


def warm(op, model, M, cfg, norm=False, progress=False, pin=0, **kw):
    kernel, grid, const, opt, P = spec(op, model, M, cfg, pin=pin if norm and op in ("qkv", "gu", "head") else 0, **kw)
    b, r, s, e = flags(op, model, norm)
    f32, i32 = torch.float32, torch.int32
    p = lambda t, on: t if on else None
    if dict(cfg)["form"] == "pipe":
        y = BF
        if const["SPLIT"] > 1:
            y, b, r = f32, False, False
        return kernel.warmup(BF, BF, y, p(BF, b), p(BF, r), M, **const, **opt, grid=grid)
    head = op == "head"
    return kernel.warmup(BF, BF, BF, p(BF, b), p(BF, r), p(f32, s), p(BF, e), p(BF, e), p(f32, e), p(f32, head), p(i32, head), p(BF, const["PF_PIECES"] > 0),
                         p(i32, progress), M, 0, 1e-6, **const, **opt, grid=grid)


def pin_of(op, model, plan):
    """Partial sums of squares a row that op reads: the tiles of the op before it."""
    return tiles("o" if op == "gu" else "down", model, plan["o" if op == "gu" else "down"])


class Chain:
    def __init__(self, model, dtype=BF, device="cuda", layers=None, maxm=64):
        self.model, self.c = model, MODELS[model]
        c = self.c
        self.layers = layers or c["layers"]
        gen = torch.Generator(device=device).manual_seed(0)
        rnd = lambda *s, scale: torch.empty(*s, dtype=dtype, device=device).normal_(0, scale, generator=gen)
        self.w = []
        for _ in range(self.layers):
            w = {op: rnd(n, k, scale=k ** -0.5) for op, (n, k) in shapes(model).items() if op != "head"}
            w["bias"] = rnd(c["qkv"], scale=0.1) if c["bias"] else None
            w["g1"], w["g2"] = rnd(c["hidden"], scale=0.1) + 1, rnd(c["hidden"], scale=0.1) + 1
            self.w.append(w)
        self.head = rnd(*shapes(model)["head"], scale=c["hidden"] ** -0.5)
        self.gf = rnd(c["hidden"], scale=0.1) + 1
        e = lambda *s, dt=dtype: torch.full(s, float("nan"), dtype=dt, device=device)
        self.x0 = rnd(maxm, c["hidden"], scale=1.0)
        self.xs = [e(maxm, c["hidden"]) for _ in range(3)]
        self.hs = [e(maxm, c["hidden"]) for _ in range(3)]
        self.ss = [e(maxm, 2048, dt=torch.float32) for _ in range(3)]
        self.qkv, self.ffn, self.att = e(maxm, c["qkv"]), e(maxm, c["ffn"]), e(maxm, c["qkv"])
        self.part = e(8, maxm, max(c["qkv"], c["ffn"]), dt=torch.float32)
        self.best = e(maxm, 40000, dt=torch.float32)
        self.index = torch.zeros(maxm, 40000, dtype=torch.int32, device=device)
        self.token = torch.zeros(maxm, dtype=torch.int32, device=device)
        self.logits = e(maxm, c["vocab"])
        self.progress = torch.full((1,), -1, dtype=torch.int32, device=device)
        order = [w[op] for w in self.w for op in ("qkv", "o", "gu", "down")] + [self.head]
        self.table = torch.tensor([[t.data_ptr(), t.numel() * t.element_size() // 8192] for t in order], dtype=torch.int64, device=device)

    def nbytes(self):
        return (sum(w[k].numel() for w in self.w for k in ("qkv", "o", "gu", "down")) + self.head.numel()) * 2

    def launch(self, op, w, x, y, M, cfg, bias=None, residual=None, ss=None, pin=0, gain=None, h=None, ss_out=None, pf_w=None, pf=(0, 0), number=0,
               progress=False, **kw):
        kernel, grid, const, opt, P = spec(op, self.model, M, cfg, pf=pf, pin=pin, **kw)
        if const.get("SPLIT", 1) > 1:
            y, residual, bias = self.part, None, None
        if dict(cfg)["form"] == "pipe":
            kernel[grid](x, w, y, bias, residual, M, **const, **opt)
        else:
            head = op == "head"
            kernel[grid](x, w, y, bias, residual, ss, gain, h, ss_out, self.best if head else None, self.index if head else None, pf_w if pf[1] else None,
                         self.progress if progress else None, M, number, 1e-6, **const, **opt)
        return P

    def step(self, M, plan, norm=False, skip=(), pf=None, stub=0, stub_pf=0, shared=False, stream=None, **kw):
        """One decode step without attention. pf: op -> (op ahead, (first piece, pieces)); stream: (programs, distance, side stream)."""
        pf = pf or {}
        seq = ["qkv", "o", "gu", "down"]
        pdl = kw.get("pdl", True)
        popt = dict(launch_pdl=True) if pdl else {}
        if stream:
            S, dist, side = stream
            kw["progress"] = True
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kn.streamer[(S,)](self.table, self.progress, len(self.table), dist, S, num_warps=1)
        x, t = self.x0, 0
        h, ss, pin = x, None, 0
        if norm:
            h, ss, pin = self.hs[2], self.ss[2], pin_of("qkv", self.model, plan)
            kn.gain_square[(M,)](x, self.w[0]["g1"], h, ss, self.c["hidden"], pow2(self.c["hidden"]), pin, pow2(pin), pdl, num_warps=4, **popt)
        num = 0
        for li in range(self.layers):
            w = self.w[0 if shared else li]
            last = li + 1 == self.layers
            nxt = None if last else self.w[0 if shared else li + 1]

            def opts(op):
                o = dict(number=num, **kw)
                if op in pf:
                    target, pieces = pf[op]
                    o["pf_w"] = w[target] if seq.index(target) > seq.index(op) else (self.head if last else nxt[target])
                    o["pf"] = pieces
                if norm and op in ("qkv", "gu"):
                    o.update(ss=ss, pin=pin_of(op, self.model, plan))
                if norm and op in ("o", "down"):
                    o.update(gain=w["g2"] if op == "o" else (self.gf if last else nxt["g1"]), h=self.hs[t], ss_out=self.ss[t])
                return o

            if "qkv" not in skip:
                self.launch("qkv", w["qkv"], h, self.qkv, M, plan["qkv"], bias=w["bias"], **opts("qkv"))
            num += 1
            a = self.qkv
            if stub:
                n = M * self.c["qkv"]
                kn.stub[(cdiv(n, 128),)](self.qkv, self.att, w["gu"] if stub_pf else None, stub, n, pdl, stub_pf, cdiv(n, 128), num_warps=4, **popt)
                a = self.att
            if "o" not in skip:
                self.launch("o", w["o"], a, self.xs[t], M, plan["o"], residual=x, **opts("o"))
                x, t = self.xs[t], (t + 1) % 3
                h, ss = (self.hs[t - 1], self.ss[t - 1]) if norm else (x, None)
            num += 1
            if "gu" not in skip:
                self.launch("gu", w["gu"], h, self.ffn, M, plan["gu"], **opts("gu"))
            num += 1
            if "down" not in skip:
                self.launch("down", w["down"], self.ffn, self.xs[t], M, plan["down"], residual=x, **opts("down"))
                x, t = self.xs[t], (t + 1) % 3
                h, ss = (self.hs[t - 1], self.ss[t - 1]) if norm else (x, None)
            num += 1
        self.last = x
        if "head" not in skip:
            P = self.launch("head", self.head, h, self.logits, M, plan["head"], number=num, **(dict(ss=ss, pin=pin_of("head", self.model, plan)) if norm else {}), **kw)
            if dict(plan["head"])["form"] != "pipe":
                kn.argmax_partials[(M,)](self.best, self.index, self.token, self.progress if stream else None, P, min(4096, max(256, pow2(P))), pdl, num_warps=8, **popt)
        if stream:
            torch.cuda.current_stream().wait_stream(side)

    def reference(self, M, norm=False):
        rms = lambda x, g: x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * g.float()
        x = self.x0[:M]
        dt = x.dtype
        for w in self.w:
            h = rms(x, w["g1"]) if norm else x.float()
            q = h @ w["qkv"].float().T + (w["bias"].float() if w["bias"] is not None else 0)
            x = (x.float() + q.to(dt)[:, : self.c["attn"]].float() @ w["o"].float().T).to(dt)
            h = rms(x, w["g2"]) if norm else x.float()
            g, u = (h @ w["gu"].float().T).chunk(2, -1)
            h = (torch.nn.functional.silu(g) * u).to(dt)
            x = (x.float() + h.float() @ w["down"].float().T).to(dt)
        h = rms(x, self.gf) if norm else x.float()
        return x, h @ self.head.float().T
