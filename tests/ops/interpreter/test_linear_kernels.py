"""The forms of a linear one by one: several steps of K, odd edges, every code, every fold-in, the choice from data."""

import json
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from microllm import ops
from microllm.errors import OperatorError
from microllm.ops import tuned
from microllm.ops.kernels import linear, linear_choice
from microllm.ops.kernels.linear_choice import FORMS, Choice, Matrix
from microllm.ops.target import INTERPRETER, TARGETS

pytestmark = pytest.mark.interpreter
FP8 = torch.float8_e4m3fn
MMA = {"BLOCK_M": 16, "BLOCK_N": 32, "WARPS_K": 2, "KB": 1, "SUMS": 2, "EARLY": 1, "AHEAD": 2}
CHOICES = {
    "fma": Choice("fma", {"ROWS": 8, "REP": 2, "BLOCK_K": 64, "EARLY": 1}, 1),
    "mma": Choice("mma", MMA, 2),
    "mma of four sums": Choice("mma", MMA | {"WARPS_K": 1, "KB": 2, "SUMS": 4, "EARLY": 0, "AHEAD": 1}, 1),
    "mma all at once": Choice("mma", MMA | {"SUMS": 1, "EARLY": 5, "AHEAD": 5, "BLOCK_M": 8, "BLOCK_N": 16}, 2),
    "tile": Choice("tile", {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "STAGES": 2, "SPLIT": 1}, 4),
}


@pytest.fixture(params=CHOICES)
def form(request, monkeypatch):
    """Hold every call to one form and its tiles."""
    monkeypatch.setattr(linear_choice, "choose", lambda *_: CHOICES[request.param])
    return request.param


def close(got, want, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("M", "dtype"), [(19, torch.float32), (3, torch.float16)])
def test_every_form_folds_in_bias_residual_norm_and_swiglu(form, M, dtype):
    """K = 296 is several steps and a part of one in every form; N = 74 ends inside a tile."""
    M, K, N = min(M, 2) if form == "fma" else M, 296, 74
    x, w = torch.randn(M, K).to(dtype), (torch.randn(N, K) / K**0.5).to(dtype)
    bias, residual, gain = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype), (1 + torch.randn(K) / 8).to(dtype)
    wide = x.double() @ w.double().T
    close(ops.linear(x, w), wide, dtype)
    sink = {}
    close(ops.linear_residual(x, w, residual, bias, sink=sink), wide + bias.double() + residual.double(), dtype)
    close(sink["projected"], wide + bias.double(), dtype)
    normed = F.rms_norm(x.double(), (K,), gain.double(), 1e-6)
    want = normed @ w.double().T + bias.double()
    close(ops.norm_linear(x, gain, w, bias, eps=1e-6, sink=sink), want, dtype)
    close(sink["normed"], normed, dtype)
    gate, up = want.chunk(2, -1)
    close(ops.norm_linear_swiglu(x, gain, w, bias, eps=1e-6, sink=sink), F.silu(gate) * up, dtype)
    close(sink["gate"], gate, dtype)
    close(sink["up"], up, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_programs_that_share_k_add_their_parts_whoever_ends_last(dtype, monkeypatch):
    split = Choice("tile", CHOICES["tile"].constants | {"SPLIT": 3}, 4)
    monkeypatch.setattr(linear_choice, "choose", lambda *_: split)
    M, K, N = 19, 296, 74
    x, w = torch.randn(M, K).to(dtype), (torch.randn(N, K) / K**0.5).to(dtype)
    bias, residual, sink = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype), {}
    want = x.double() @ w.double().T + bias.double()
    for _ in range(2):  # the counters are 0 again
        close(ops.linear(x, w, bias), want, dtype)
        close(ops.linear_residual(x, w, residual, bias, sink=sink), want + residual.double(), dtype)
        close(sink["projected"], want, dtype)


def test_k_is_shared_where_outputs_are_few_and_no_promise_is_made():
    qkv = Matrix("linear", 1152, 896, torch.bfloat16)
    down = Matrix("linear_residual", 896, 4864, torch.bfloat16)
    assert chosen(qkv, 64).constants["SPLIT"] == 4
    assert chosen(down, 64).constants["SPLIT"] == 8
    for matrix in (qkv, down):
        assert chosen(matrix, 64, one_order=True).form == "mma"
        assert chosen(matrix, 64, target=TARGETS["gfx942"]).constants["SPLIT"] == 1
        assert linear.one_tiling(matrix, H200).constants["SPLIT"] == 1
        amd = chosen(matrix, 64, one_order=True, target=TARGETS["gfx942"])
        assert (amd.form, amd.constants["SPLIT"]) == ("tile", 1)


@pytest.mark.parametrize("group", [None, 32, 96])
def test_every_form_decodes_codes_of_several_groups(form, group):
    M, K, N = 2, 288, 42
    x, bias, groups = torch.randn(M, K), torch.randn(N), 1 if group is None else K // group
    scale = torch.rand(N, groups) / 50 + 0.01
    codes = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    close(ops.linear_int8(x, codes, scale, bias), x.double() @ dequantised(codes, scale).T + bias.double(), x.dtype)
    packed, minimum = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), -torch.rand(N, groups)
    want = ops.dequantise_int4(packed, scale, minimum)
    close(ops.linear_int4(x, packed, scale, minimum), x.double() @ want.double().T, x.dtype)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_every_form_folds_norm_residual_and_swiglu_over_codes(form, format):
    """K = 288 is several steps and a part of one; gate and up rows have scales, and minima, of their own."""
    M, K, N = 2, 288, 74
    groups, coded = (3, (N, K // 2)) if format == "int4" else (1, (N, K))
    codes = torch.randint(0, 256, coded, dtype=torch.uint8)
    codes = codes if format == "int4" else codes.view(torch.int8) if format == "int8" else (codes & 0x3F).view(FP8)
    scale, minimum = torch.rand(N, groups) / 50 + 0.01, -torch.rand(N, groups) / 8 if format == "int4" else None
    whole = (codes, scale) if minimum is None else (codes, scale, minimum)
    w = getattr(ops, f"dequantise_{format}")(*whole).double()
    x, bias, residual, gain = torch.randn(M, K), torch.randn(N), torch.randn(M, N), 1 + torch.randn(K) / 8
    want = x.double() @ w.T + bias.double() + residual.double()
    close(ops.linear_residual_codes(x, codes, scale, minimum, residual, bias), want, x.dtype)
    want = F.rms_norm(x.double(), (K,), gain.double(), 1e-6) @ w.T + bias.double()
    close(ops.norm_linear_codes(x, gain, codes, scale, minimum, bias, eps=1e-6), want, x.dtype)
    gate, up = want.chunk(2, -1)
    sink = {}
    got = ops.norm_linear_swiglu_codes(x, gain, codes, scale, minimum, bias, eps=1e-6, sink=sink)
    torch.testing.assert_close(got.double(), F.silu(gate) * up, atol=1e-4, rtol=1e-4)
    close(sink["gate"], gate, x.dtype)
    close(sink["up"], up, x.dtype)


def dequantised(codes, scale):
    return codes.double() * scale.double().repeat_interleave(codes.shape[1] // scale.shape[1], 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_every_form_decodes_all_256_codes_of_fp8_exactly(form, dtype):
    """A row of the weight for each code, zeros beside it; what is NaN in the format is NaN, and alone."""
    codes = torch.zeros(256, 64, dtype=torch.uint8)
    codes[:, 7] = torch.arange(256, dtype=torch.uint8)
    x = torch.zeros(2, 64)
    x[1, 7] = 1
    got = ops.linear_fp8(x, codes.view(dtype), torch.ones(256, 1))
    want = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    torch.testing.assert_close(got[1], want, atol=0, rtol=0, equal_nan=True)
    assert int(want.isnan().sum()) == (2 if dtype == torch.float8_e4m3fn else 1)


def test_prefill_rows_of_codes_take_tiles_and_one_order_takes_them_back():
    codes, scale, x = torch.randint(-128, 128, (40, 64), dtype=torch.int8), torch.rand(40, 1) / 50, torch.randn(300, 64)
    want = x.double() @ dequantised(codes, scale).T
    close(ops.linear_int8(x, codes, scale), want, x.dtype)
    with ops.batch_invariant():
        alone = ops.linear_int8(x[7:8].clone(), codes, scale)
        assert torch.equal(ops.linear_int8(x, codes, scale)[7:8], alone)


def test_more_rows_than_256_are_the_vendors_but_for_one_tiling():
    x, w = torch.randn(257, 16), torch.randn(5, 16)
    with pytest.raises(OperatorError, match="not triton: for up to 256 rows"):
        ops.linear(x, w)
    close(ops.linear_one_tiling(x, w), x.double() @ w.double().T, x.dtype)


# ---- the choice


H200 = TARGETS["sm_90"]


def chosen(matrix, M, *, target=H200, one_order=False):
    linear_choice.choose.cache_clear()
    return linear_choice.choose(matrix, M, target, "GPU A", one_order)


SHAPES = [
    Matrix("norm_linear", 1152, 896, torch.bfloat16, normed=True), Matrix("linear_residual", 896, 4864, torch.bfloat16),
    Matrix("norm_linear_swiglu", 9728, 896, torch.bfloat16, swiglu=True, normed=True),
    Matrix("lm_head_argmax", 151936, 896, torch.bfloat16), Matrix("linear_int4", 9728, 896, torch.bfloat16, "int4"),
]  # fmt: skip


@pytest.mark.parametrize("matrix", SHAPES, ids=lambda m: m.op)
def test_one_order_of_k_for_every_number_of_rows(matrix):
    orders = {
        tuple(chosen(matrix, M, one_order=True).constants[name] for name in ("WARPS_K", "KB", "SUMS"))
        for M in (1, 2, 7, 16, 64, 65, 256)
    }
    assert len(orders) == 1
    assert chosen(matrix, 1).form == "fma"
    assert chosen(matrix, 2).form == "mma"
    few = chosen(matrix, 256, one_order=True)
    assert (few.form, few.constants["BLOCK_M"]) == ("mma", 16 if matrix.normed else 32)
    assert chosen(matrix, 64).form == "tile"
    amd = [chosen(matrix, M, one_order=True, target=TARGETS["gfx942"]) for M in (1, 256)]
    assert amd[0] == amd[1]
    assert (amd[0].form, amd[0].constants["BLOCK_M"]) == ("tile", 16)


def test_rows_of_several_forms_say_which_one_mode_b_takes():
    several = {name for name, row in ops.CONTRACTS.items() if row.mode_b.startswith("mma")}
    assert several == {
        "linear", "linear_residual", "norm_linear", "norm_linear_swiglu", "linear_int8", "linear_fp8", "linear_int4",
        "norm_linear_codes", "linear_residual_codes", "norm_linear_swiglu_codes", "lm_head_argmax",
    }  # fmt: skip
    assert ops.CONTRACTS["linear_one_tiling"].mode_b.startswith("tile")
    assert all("triton" in ops.CONTRACTS[name].invariant for name in (*several, "linear_one_tiling"))


def test_fp32_has_no_matrix_instruction():
    found = [chosen(Matrix("linear", 896, 896, torch.float32), M, one_order=True) for M in (1, 256)]
    assert found[0] == found[1]
    assert found[0].form == "tile"
    assert chosen(Matrix("linear", 896, 896, torch.float32), 2, target=INTERPRETER).form == "mma"


def test_the_choice_is_data(tmp_path, monkeypatch):
    """Entries of {N, K} change the order of all rows, entries of {M, N, K} the form and tiles of their bucket."""
    entry = {"op": "linear", "dtype": "bfloat16", **tuned.environment("linear", "GPU A")}
    entries = [
        entry | {"shape": {"N": 64, "K": 128}, "choice": {"WARPS_K": 4, "fma_rows": 2}},
        entry | {"shape": {"M": 8, "N": 64, "K": 128}, "choice": {"form": FORMS.index("mma"), "BLOCK_N": 32}},
    ]
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"format": 1, "entries": entries}))
    monkeypatch.setattr(tuned, "PATH", path)
    matrix = Matrix("linear", 64, 128, torch.bfloat16)
    assert chosen(matrix, 2).form == "mma"  # the entry of 8 rows, which two rows round up to
    found = chosen(matrix, 8)
    assert found.num_warps == found.constants["WARPS_K"] == 4
    assert found.constants["BLOCK_N"] == 32
    assert chosen(matrix, 9).constants["BLOCK_N"] == 16
    assert chosen(matrix, 1).form == "fma"
    assert chosen(matrix, 1, one_order=True).constants["WARPS_K"] == 4
    linear_choice.choose.cache_clear()


def test_every_form_counts_its_tiles():
    for (name, choice), matrix in product(CHOICES.items(), SHAPES):
        tiles = linear.num_tiles(matrix, choice)
        width = {"fma": 16, "tile": 32}.get(choice.form, choice.constants.get("BLOCK_N", 0) // (1 + matrix.swiglu))
        assert (tiles - 1) * width < matrix.outputs <= tiles * width, name
