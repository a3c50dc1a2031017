"""Ahead-of-time compilation: every kernel on every target, and each planted fault is caught."""

import json
import re
from pathlib import Path

import pytest
import triton
import triton.language as tl

from microllm.cli import main
from microllm.errors import UnavailableError
from microllm.lab import aot
from microllm.ops import kernels
from microllm.ops.kernels import Compiled
from microllm.ops.target import TARGETS

SM_80, SM_90, GFX942 = (TARGETS[name] for name in ("sm_80", "sm_90", "gfx942"))


@triton.jit
def scaled_kernel(x_ptr, scale, WIDE: tl.constexpr, NARROW: tl.constexpr):
    i = tl.arange(0, 128)
    x = tl.load(x_ptr + i)
    if WIDE:
        x = x.to(tl.float64)
    if NARROW:
        scale = scale.to(tl.float32)
    tl.store(x_ptr + i, (x * scale + x).to(tl.float32))


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def spilling_kernel(x_ptr, BLOCK: tl.constexpr):
    """Sort of nothing: all values of a warp are needed at once, twice."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x / tl.sum(x * x, 0))


@triton.jit
def waiting_kernel(x_ptr, PDL: tl.constexpr, GUARDED: tl.constexpr):
    if PDL or not GUARDED:
        tl.extra.cuda.gdc_wait()
    tl.store(x_ptr, 1.0)


@triton.jit
def copying_kernel(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float32))


def scaled(*, wide, narrow):
    return Compiled(scaled_kernel, {"x_ptr": "*fp32", "scale": "fp32"}, {"WIDE": wide, "NARROW": narrow})


def product(m, n, k, *, num_warps=4, uses=()):
    signature = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32"}
    return Compiled(product_kernel, signature, {"M": m, "N": n, "K": k}, num_warps, uses=uses)


def waiting(*, guarded, uses=()):
    return Compiled(waiting_kernel, {"x_ptr": "*fp32"}, {"PDL": True, "GUARDED": guarded}, uses=uses)


@pytest.mark.parametrize(
    ("case", "target", "text"),
    [
        (scaled(wide=True, narrow=True), SM_90, "fp64: "),
        (scaled(wide=False, narrow=False), SM_90, "fp64 where a scalar is fp64: "),
        (product(256, 256, 256, num_warps=8), SM_90, "bytes of shared memory; sm_90 has 232448"),
        (product(256, 128, 256), GFX942, "shared memory|does not compile: .*local memory"),
        (Compiled(spilling_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 8192}, 1), SM_90, r"spills \d+ bytes a thread"),
        (Compiled(spilling_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 32768}, 1), GFX942, r"spills \d+ registers"),
        (waiting(guarded=False), SM_80, "does not compile|has PDL instructions"),
        (scaled(wide=False, narrow=True)._replace(uses=("pdl",)), SM_90, "claims PDL"),
        (product(16, 64, 64, uses=("wgmma",)), SM_90, "claims wgmma"),
    ],
)
def test_a_planted_fault_is_caught(case, target, text):
    (found,) = aot.compile_all({"planted": [case]}, {target.name: target})
    assert not found.skipped
    assert any(re.search(text, fault) for fault in found.faults), found.faults


@pytest.mark.parametrize(
    "case",
    [scaled(wide=False, narrow=True), product(64, 64, 64, uses=("wgmma",)), waiting(guarded=True, uses=("pdl",))],
)
def test_what_is_right_has_no_fault(case):
    found = list(aot.compile_all({"planted": [case]}))
    assert [one.target for one in found] == ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"]
    assert [one.faults for one in found] == [()] * 5
    assert all(one.registers > 0 and one.spilled == 0 for one in found)


def test_a_case_is_skipped_only_where_its_fp8_is_not_the_targets():
    def skipped(pages):
        case = Compiled(copying_kernel, {"x_ptr": pages, "y_ptr": "*fp32"}, {}, uses=("fp8",))
        return {one.target for one in aot.compile_all({"planted": [case]}) if one.skipped}

    assert skipped("*fp8e4nv") == {"sm_80", "gfx942"}
    assert skipped("*fp8e4b8") == {"sm_80", "sm_90", "sm_100", "gfx950"}


def test_interpreted_kernels_are_not_compiled(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(UnavailableError, match="unset it"):
        next(aot.compile_all())


def test_the_command_prints_a_table_and_fails_on_a_fault(monkeypatch, capsys):
    good, bad = scaled(wide=False, narrow=True), scaled(wide=True, narrow=True)
    for cases, status in ([good], 0), ([good, bad], 1):
        planted = list(aot.compile_all({"planted": cases}))
        monkeypatch.setattr(aot, "compile_all", lambda found=planted: iter(found))
        assert main(["doctor", "--kernels"]) == status
        out = capsys.readouterr().out
        assert "gfx950" in out
        assert ("scaled_kernel 1 on sm_90: fp64: " in out) == bool(status)
        assert main(["doctor", "--kernels", "--json"]) == status
        found = json.loads(capsys.readouterr().out)["kernels"]
        assert len(found) == 5 * len(cases)
        assert any(one["faults"] for one in found) == bool(status)
        monkeypatch.undo()


def test_every_kernel_has_a_case():
    text = "".join(path.read_text() for path in Path(kernels.__file__).parent.glob("*.py"))
    defined = set(re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", text, flags=re.MULTILINE))
    assert len(defined) > 10
    assert defined == {case.kernel.__name__ for cases in kernels.COMPILED.values() for case in cases}


@pytest.mark.slow
def test_every_case_of_every_kernel_compiles_for_every_target_without_a_fault():
    found = list(aot.compile_all())
    assert len(found) == len(TARGETS) * sum(len(cases) for cases in kernels.COMPILED.values())
    faults = [f"{one.kernel} {one.case} on {one.target}: {text}" for one in found for text in one.faults]
    assert not faults, "\n".join(faults)
    taken = {(one.file, one.case) for one in found if not one.skipped}
    assert taken == {(one.file, one.case) for one in found}, "a case that no target takes"
