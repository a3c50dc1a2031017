"""Interpreter check (default) or ahead-of-time compile check (`aot`) of kernels.py."""
import os, sys
AOT = len(sys.argv) > 1
if not AOT: os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kernels as kn
cdiv = lambda a, b: -(-a // b)
pow2 = lambda n: 1 << max(0, n - 1).bit_length()

def constants(op, N, K, xs, tiles, nsums, pdl, store=None):
    swiglu, head = op == "gate_up", op == "head"
    common = dict(N=N, K=K, X_STRIDE=xs, EPS=1e-6, SWIGLU=swiglu, ARGMAX=head, STORE=(not head) if store is None else store, NUM_SUMS=nsums, SUMS_BLOCK=pow2(max(1, nsums)), PDL=pdl)
    NY = N // 2 if swiglu else N
    if isinstance(tiles, kn.MmaTiles):
        steps = cdiv(K, 32 * tiles.warps_k * tiles.kb)
        by = tiles.block_n // 2 if swiglu else tiles.block_n
        return kn.linear_mma_kernel, tiles.warps_k, dict(common, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, WARPS_K=tiles.warps_k, KB=tiles.kb, SUMS=tiles.sums,
            EARLY=min(tiles.early, steps), GROUP=min(tiles.group, steps), W_FIRST=tiles.w_first, NUM_TILES=cdiv(NY, by))
    steps = cdiv(K, tiles.block_k)
    return kn.linear_fma_kernel, tiles.num_warps, dict(common, ROWS=tiles.rows, REP=tiles.block_n // tiles.rows, BLOCK_K=tiles.block_k, EARLY=min(tiles.early, steps), NUM_TILES=cdiv(NY, tiles.block_n))

def interp():
    g = torch.Generator().manual_seed(0)
    M_, F_ = kn.MmaTiles, kn.FmaTiles
    cases = []
    for dt in (torch.float32, torch.float16):
        for M, t in ((1, F_(block_n=4, block_k=64, num_warps=1)), (3, F_(block_n=8, block_k=128, num_warps=2, early=1)),
                     (3, M_(warps_k=2, kb=1, sums=2, block_m=8, block_n=16, w_first=True)), (11, M_(warps_k=2, kb=2, sums=1, block_m=16, block_n=16, w_first=False, early=0, group=1)),
                     (19, M_(warps_k=1, kb=1, sums=4, block_m=16, block_n=32, w_first=True, early=2, group=2))):
            for op, N, K in (("qkv", 72, 136), ("o", 64, 136), ("gate_up", 112, 192), ("down", 40, 160), ("head", 200, 144)):
                rnd = lambda *s: torch.randn(*s, generator=g).to(dt)
                xs = K + 8
                x, w, bias, gain = rnd(M, xs), rnd(N, K) / K ** 0.5, rnd(N), 1 + rnd(N) / 8
                NY = N // 2 if op == "gate_up" else N
                res = rnd(M, NY)
                normed, emits = op in ("qkv", "gate_up", "head"), op in ("o", "down")
                nsums = 5 if normed else 0
                sums = torch.rand(M, 5, generator=g) * K / 4
                kernel, nw, c = constants(op, N, K, xs, t, nsums, False, store=True)
                nan = lambda *s, d=dt: torch.full(s, float("nan"), dtype=d)
                y, gained, so = nan(M + 1, NY), nan(M, NY), nan(M, c["NUM_TILES"], d=torch.float32)
                best, index, token = nan(M, c["NUM_TILES"], d=torch.float32), torch.full((M, c["NUM_TILES"]), -7, dtype=torch.int32), torch.full((M,), -7, dtype=torch.int32)
                p = lambda a, on: a if on else None
                grid = (c["NUM_TILES"], cdiv(M, c["BLOCK_M"]) if "BLOCK_M" in c else M)
                kernel[grid](x, w, y, p(bias, op == "qkv"), p(res, emits), p(sums, normed), p(gain, emits), p(gained, emits), p(so, emits), p(best, op == "head"), p(index, op == "head"), M, **c, num_warps=nw)
                r = x[:, :K].float() @ w.float().T
                if normed: r = r * torch.rsqrt(sums.sum(1, keepdim=True) / K + 1e-6)
                if op == "gate_up": a, b = r.chunk(2, -1); r = torch.nn.functional.silu(a) * b
                if op == "qkv": r = r + bias.float()
                if emits: r = r + res.float()
                tol = 2e-5 if dt == torch.float32 else 2e-3
                torch.testing.assert_close(y[:M].float(), r, atol=tol, rtol=tol)
                assert y[M:].isnan().all()
                if emits:
                    torch.testing.assert_close(gained.float(), y[:M].float() * gain.float(), atol=tol, rtol=tol)
                    torch.testing.assert_close(so.sum(1), y[:M].float().pow(2).sum(1), atol=1e-3, rtol=1e-4)
                if op == "head":
                    red = lambda: kn.argmax_partials_kernel[(M,)](best, index, token, c["NUM_TILES"], 16, False)
                    red(); assert torch.equal(token.long(), y[:M].float().argmax(-1)), token
                    for bad in (float("nan"), float("inf")):
                        x2 = x.clone(); x2[0, 0] = bad
                        kernel[grid](x2, w.abs() + 1, y, None, None, sums, None, None, None, best, index, M, **c, num_warps=nw)
                        red(); assert token[0] == -1 and (token[1:] >= 0).all(), token
                    # a tie takes the lowest index
                    kernel[grid](torch.zeros_like(x), w, y, None, None, sums, None, None, None, best, index, M, **c, num_warps=nw)
                    red(); assert (token == 0).all(), token
            print(dt, M, t, "ok", flush=True)
    x, gain = torch.randn(3, 40), torch.randn(40)
    h, s = torch.empty(3, 40), torch.empty(3)
    kn.gain_squares_kernel[(3,)](x, gain, h, s, 40, 64, False)
    torch.testing.assert_close(h, x * gain); torch.testing.assert_close(s, x.pow(2).sum(1))
    for key, by in kn.MMA_TILES.items(): assert len({t.order for t in by.values()}) == 1, key

def aot():
    import re, subprocess
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    B = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    limits = {"80": 166912, "90": 232448, "100": 232448, "gfx942": 65536, "gfx950": 163840}
    targets = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("cuda", 100, 32), GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx950", 64)]
    names = ["x_ptr", "w_ptr", "y_ptr", "bias_ptr", "residual_ptr", "sums_ptr", "gain_ptr", "gained_ptr", "sums_out_ptr", "best_ptr", "index_ptr"]
    todo = []
    for (op, N, K), t in kn.FMA_TILES.items(): todo.append((op, N, K, t))
    for (op, N, K), by in kn.MMA_TILES.items():
        for m, t in by.items():
            if m in (8, 64): todo.append((op, N, K, t))
    # the capped variant of the next run
    import dataclasses
    for (op, N, K), by in kn.MMA_TILES.items(): todo.append((op, N, K, dataclasses.replace(by[8], max_registers=255)))
    worst = 0
    for op, N, K, t in todo:
        normed, emits, head = op in ("qkv", "gate_up", "head"), op in ("o", "down"), op == "head"
        have = dict(x_ptr=1, w_ptr=1, y_ptr=1, bias_ptr=op == "qkv", residual_ptr=emits, sums_ptr=normed, gain_ptr=emits, gained_ptr=emits, sums_out_ptr=emits, best_ptr=head, index_ptr=head)
        ty = dict(sums_ptr="*fp32", sums_out_ptr="*fp32", best_ptr="*fp32", index_ptr="*i32")
        for tg in targets:
            pdl = tg.backend == "cuda" and tg.arch >= 90
            kernel, nw, c = constants(op, N, K, 1152 if op == "o" else K, t, 56 if normed else 0, pdl)
            sig = {n: ty.get(n, "*bf16") if have[n] else "constexpr" for n in names}
            sig["M"] = "i32"
            const = {**c, **{n: None for n in names if not have[n]}}
            attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if have[n]}
            src = ASTSource(kernel, {**sig, **{k: "constexpr" for k in const}}, const, attrs)
            opt = dict(num_warps=nw, **({"launch_pdl": True} if pdl else {}), **({"maxnreg": t.max_registers} if getattr(t, "max_registers", 0) and tg.backend == "cuda" else {}))
            try:
                k = triton.compile(src, target=tg, options=opt)
            except Exception as e:
                print("FAIL", op, t, tg.arch, repr(e)[:200], flush=True); continue
            line = ""
            assert k.metadata.shared <= limits[str(tg.arch)], (op, t, tg.arch, k.metadata.shared)
            if tg.backend == "cuda":
                assert ".f64" not in k.asm["ptx"], (op, t)
                assert ("griddepcontrol" in k.asm["ptx"]) == pdl
                open("a.cubin", "wb").write(k.asm["cubin"])
                res = subprocess.run([B, "--dump-resource-usage", "a.cubin"], capture_output=True, text=True).stdout
                reg, stack = re.search(r"REG:(\d+) STACK:(\d+)", res).groups()
                line = f"regs {reg} stack {stack}"
                sass = subprocess.run([B, "-sass", "a.cubin"], capture_output=True, text=True).stdout
                n = lambda p: len(re.findall(p, sass))
                line += f" LDG.128 {n('LDG[.A-Z]*128')} HMMA {n('HMMA')} STL {n('STL')} BAR {n('BAR.SYNC')}"
            else:
                a = k.asm["amdgcn"]
                line = "vgpr %s spill %s mfma %d" % (re.search(r"\.vgpr_count:\s+(\d+)", a).group(1), re.search(r"\.vgpr_spill_count:\s+(\d+)", a).group(1), a.count("v_mfma"))
            d = "fma" if isinstance(t, kn.FmaTiles) else "mma m%d n%d w%d%s" % (t.block_m, t.block_n, t.warps_k, " cap" if t.max_registers else "")
            print("%-8s %-18s %-7s shared %6d %s" % (op, d, tg.arch, k.metadata.shared, line), flush=True)

aot() if AOT else interp()
