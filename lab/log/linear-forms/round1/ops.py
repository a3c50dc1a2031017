"""Launch wrappers and chains for experiment no. 1."""
import os
import torch
import kernels as kn

BF = torch.bfloat16
MODELS = {
    "qwen2.5-0.5b": dict(layers=24, hidden=896, attn=896, qkv=1152, ffn=4864, vocab=151936, bias=True),
    "r1-1.5b": dict(layers=28, hidden=1536, attn=1536, qkv=2048, ffn=8960, vocab=151936, bias=True),
    "smollm2-135m": dict(layers=30, hidden=576, attn=576, qkv=960, ffn=1536, vocab=49152, bias=False),
}


def shapes(model):
    c = MODELS[model]
    return {"qkv": (c["qkv"], c["hidden"]), "o": (c["hidden"], c["attn"]), "gu": (2 * c["ffn"], c["hidden"]), "down": (c["hidden"], c["ffn"]),
            "head": (c["vocab"], c["hidden"])}


def cdiv(a, b):
    return -(-a // b)


def spec(op, model, M, cfg, norm=False, pdl=True, trig=0, pf=0, evict="evict_first", store=None):
    """Return (kernel, grid, constexprs, num_warps, programs) of one linear."""
    c = MODELS[model]
    N, K = shapes(model)[op]
    XS = c["qkv"] if op == "o" else K
    form = cfg[0]
    swiglu, head = op == "gu", op == "head"
    NY = N // 2 if swiglu else N
    store = (not head) if store is None else store
    if form == "mma":
        _, BM, BN, WK, KB, PRE, ACCS, SWAP, G = cfg
        STEPS = cdiv(K, 32 * WK * KB)
        PRE = min(PRE, STEPS)
        NT = cdiv(NY, BN // 2 if swiglu else BN)
        P = min(G, NT) if G else NT
        const = dict(N=N, K=K, XS=XS, BM=BM, BN=BN, WK=WK, KB=KB, PRE=PRE, ACCS=ACCS, SWAP=SWAP, SWIGLU=swiglu, ARGMAX=head, STORE=store,
                     PERSIST=bool(G), NT=NT, P=P, TILES=cdiv(NT, P), PDL=pdl, TRIG=trig, EVICT=evict, PF_CHUNKS=pf, PF_PER=cdiv(pf, P))
        return kn.mma_linear, (P, cdiv(M, BM), 1), const, WK, P
    if form == "fma":
        _, ROWS, BN, BK, NW, SPLIT, PRE, G = cfg
        NT = cdiv(NY, BN)
        P = min(G, NT) if G else NT
        STEPS = cdiv(K // SPLIT, BK)
        XR = max(1, NW * 256 // BK)
        REP = BN // XR
        assert XR * REP == BN, cfg
        const = dict(N=N, K=K, XS=XS, ROWS=ROWS, XR=XR, REP=REP, BK=BK, SPLIT=SPLIT, PRE=min(PRE, STEPS), SWIGLU=swiglu, ARGMAX=head, STORE=store,
                     PERSIST=bool(G), NT=NT, P=P, TILES=cdiv(NT, P), PDL=pdl, TRIG=trig, EVICT=evict, PF_CHUNKS=pf, PF_PER=cdiv(pf, P), NW=NW)
        return kn.fma_linear, (P, cdiv(M, ROWS), SPLIT), const, NW, P
    if form == "old":
        _, BN, BK, NW, SPLIT = cfg
        P = cdiv(NY, BN)
        return kn.fma_old, (P, SPLIT, 1), dict(N=N, K=K, XS=XS, BN=BN, BK=BK, SPLIT=SPLIT, SWIGLU=swiglu, PDL=pdl), NW, P
    _, BM, BN, BK, NW, SPLIT, STAGES, TMA, G = cfg
    NT = cdiv(NY, BN)
    P = min(G, NT) if G else NT
    const = dict(N=N, K=K, XS=XS, BM=BM, BN=BN, BK=BK, SPLIT=SPLIT, STAGES=STAGES, SWIGLU=swiglu, TMA=TMA, PERSIST=bool(G), NT=NT, PDL=pdl, TRIG=trig)
    return kn.pipe_linear, (P, SPLIT, 1), const, NW, P


def flags(op, model, norm):
    """bias, residual, gain present?"""
    return op == "qkv" and MODELS[model]["bias"], op in ("o", "down"), norm and op in ("qkv", "gu", "head")


def warm(op, model, M, cfg, norm=False, **kw):
    """Compile one linear without a GPU (a fake driver is active)."""
    kernel, grid, const, nw, P = spec(op, model, M, cfg, norm, **kw)
    b, r, g = flags(op, model, norm)
    opt = dict(num_warps=nw, launch_pdl=True) if const["PDL"] else dict(num_warps=nw)
    f32, i32 = torch.float32, torch.int32
    if cfg[0] in ("pipe", "old"):
        y, w = BF, BF
        if const["SPLIT"] > 1:
            y, b, r = f32, False, False
        if const.get("TMA"):
            from triton.tools.tensor_descriptor import TensorDescriptor
            w = TensorDescriptor.from_tensor(torch.empty(*shapes(model)[op], dtype=BF), [const["BN"], const["BK"]])
        return kernel.warmup(BF, w, y, BF if b else None, BF if r else None, M, **const, **opt, grid=grid)
    y = BF
    if const.get("SPLIT", 1) > 1:
        y, b, r = f32, False, False
    head = op == "head"
    return kernel.warmup(BF, BF, y, BF if b else None, BF if r else None, BF if g else None, f32 if head else None, i32 if head else None,
                         BF if const["PF_CHUNKS"] else None, M, 1e-6, **const, **opt, grid=grid)


class Chain:
    """Weights and buffers of one model; launches its linears."""

    def __init__(self, model, dtype=BF, device="cuda", layers=None, maxm=64):
        self.model, self.c = model, MODELS[model]
        c = self.c
        self.layers = layers or c["layers"]
        gen = torch.Generator(device=device).manual_seed(0)
        self.w = []
        rnd = lambda *s, scale: torch.empty(*s, dtype=dtype, device=device).normal_(0, scale, generator=gen)
        for _ in range(self.layers):
            w = {op: rnd(n, k, scale=k ** -0.5) for op, (n, k) in shapes(model).items() if op != "head"}
            w["bias"] = rnd(c["qkv"], scale=0.1) if c["bias"] else None
            w["g1"], w["g2"] = rnd(c["hidden"], scale=0.1) + 1, rnd(c["hidden"], scale=0.1) + 1
            self.w.append(w)
        self.head = rnd(*shapes(model)["head"], scale=c["hidden"] ** -0.5)
        self.gf = rnd(c["hidden"], scale=0.1) + 1
        e = lambda *s, dt=dtype: torch.full(s, float("nan"), dtype=dt, device=device)
        self.x0 = rnd(maxm, c["hidden"], scale=1.0)
        self.xa, self.xb = e(maxm, c["hidden"]), e(maxm, c["hidden"])
        self.qkv, self.ffn = e(maxm, c["qkv"]), e(maxm, c["ffn"])
        self.att = e(maxm, c["qkv"])
        self.part = e(8, maxm, max(c["qkv"], c["ffn"]), dt=torch.float32)
        self.best = e(maxm, 40000, dt=torch.float32)
        self.index = torch.zeros(maxm, 40000, dtype=torch.int32, device=device)
        self.token = torch.zeros(maxm, dtype=torch.int32, device=device)
        self.logits = e(maxm, c["vocab"])
        self.desc = {}

    def nbytes(self):
        return (sum(v.numel() for w in self.w for k, v in w.items() if v is not None and k in ("qkv", "o", "gu", "down")) + self.head.numel()) * 2

    def launch(self, op, w, x, y, M, cfg, bias=None, residual=None, gain=None, pf_w=None, pf=0, split_out=None, **kw):
        kernel, grid, const, nw, P = spec(op, self.model, M, cfg, gain is not None, pf=pf, **kw)
        opt = dict(num_warps=nw, launch_pdl=True) if const["PDL"] else dict(num_warps=nw)
        if const.get("SPLIT", 1) > 1:
            y = self.part
            residual = bias = None
        if cfg[0] in ("pipe", "old"):
            if const.get("TMA"):
                key = (w.data_ptr(), const["BN"], const["BK"])
                if key not in self.desc:
                    from triton.tools.tensor_descriptor import TensorDescriptor
                    self.desc[key] = TensorDescriptor.from_tensor(w, [const["BN"], const["BK"]])
                w = self.desc[key]
            kernel[grid](x, w, y, bias, residual, M, **const, **opt)
        else:
            head = op == "head"
            kernel[grid](x, w, y, bias, residual, gain, self.best if head else None, self.index if head else None, pf_w if pf else None, M, 1e-6,
                         **const, **opt)
        return P

    def step(self, M, plan, norm=False, skip=(), pf=None, stub=0, stub_pf=0, **kw):
        """One decode step without attention. plan: op -> cfg; pf: op -> (op ahead, 2 KiB pieces)."""
        x = self.x0
        pf = pf or {}
        out = [self.xa, self.xb]
        seq = ["qkv", "o", "gu", "down"]
        pdl = kw.get("pdl", True)
        for li in range(self.layers):
            w = self.w[li]
            nxt = self.w[li + 1] if li + 1 < self.layers else None

            def ahead(op):
                if op not in pf:
                    return {}
                target, pieces = pf[op]
                if seq.index(target) > seq.index(op):
                    return dict(pf_w=w[target], pf=pieces)
                return dict(pf_w=(nxt[target] if nxt is not None else self.head), pf=pieces)

            if "qkv" not in skip:
                self.launch("qkv", w["qkv"], x, self.qkv, M, plan["qkv"], bias=w["bias"], gain=w["g1"] if norm else None, **ahead("qkv"), **kw)
            a = self.qkv
            if stub:
                n = M * self.c["qkv"]
                G = cdiv(n, 128)
                kn.stub[(G,)](self.qkv, self.att, stub, n, pdl, w["gu"] if stub_pf else None, stub_pf, cdiv(stub_pf, G), num_warps=4,
                              **(dict(launch_pdl=True) if pdl else {}))
                a = self.att
            y = out[0] if x is not out[0] else out[1]
            if "o" not in skip:
                self.launch("o", w["o"], a, y, M, plan["o"], residual=x, **ahead("o"), **kw)
            x = y
            if "gu" not in skip:
                self.launch("gu", w["gu"], x, self.ffn, M, plan["gu"], gain=w["g2"] if norm else None, **ahead("gu"), **kw)
            y = out[0] if x is not out[0] else out[1]
            if "down" not in skip:
                self.launch("down", w["down"], self.ffn, y, M, plan["down"], residual=x, **ahead("down"), **kw)
            x = y
        self.last = x
        if "head" not in skip:
            P = self.launch("head", self.head, x, self.logits, M, plan["head"], gain=self.gf if norm else None, **kw)
            if plan["head"][0] not in ("pipe", "old"):
                kn.argmax_partials[(M,)](self.best, self.index, self.token, P, min(4096, max(256, 1 << (P - 1).bit_length())), pdl, num_warps=8,
                                         **(dict(launch_pdl=True) if pdl else {}))

    def reference(self, M, norm=False):
        """The same step in torch, fp32 products on bf16 weights, activations rounded where the kernels round."""
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
