"""Which level runs, why, and who counts it; the plug for kernels; tuned choices."""

import dataclasses
import json
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from microllm import ops
from microllm.errors import OperatorError
from microllm.ops import kernels, tuned
from microllm.ops.kernels import KERNELS, Kernel

SELECT = sys.modules["microllm.ops.select"]  # ops.select is the function of that name


def qkv(*, heads=6, groups=2):
    return [torch.randn(2, 5, n, 64) for n in (heads, groups, groups)]


def test_a_choice_names_its_level_and_the_reason():
    norm = ops.select("rms_norm", ops.CONTRACTS["rms_norm"].example({"...": (3,), "D": 8}))
    assert norm == ops.Choice("reference", "the only level")
    linear = ops.CONTRACTS["linear_int8"]
    sizes = {"M": 2, "K": 64, "N": 8, "U": 1}
    wide = ops.select("linear_int8", linear.example(sizes))
    assert wide.level == "reference"
    assert wide.reason.startswith("not vendor: torch's packed int8 product is fast with x and scale in bf16 only; ")
    assert ops.select("linear_int8", linear.example(sizes, torch.bfloat16)).level == "vendor"
    grouped = ops.select("linear_int8", linear.example(sizes | {"U": 2}, torch.bfloat16))
    assert "one scale a row" in grouped.reason


def test_a_forced_level_that_does_not_qualify_is_an_error_and_no_fallback():
    x, w = torch.randn(3, 8), torch.ones(8)
    with (
        ops.use("vendor"),
        pytest.raises(OperatorError, match=r"rms_norm: got use\('vendor'\); need one of its levels"),
    ):
        ops.rms_norm(x, w, eps=1e-5)
    codes, scale = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)
    with ops.use("vendor", "linear_int8"):
        with pytest.raises(OperatorError, match="not vendor: torch's packed int8"):
            ops.linear_int8(x, codes, scale)
        ops.rms_norm(x, w, eps=1e-5)  # not named, not forced
        with ops.use("reference", "linear_int8"):
            ops.linear_int8(x, codes, scale)
        with pytest.raises(OperatorError):
            ops.linear_int8(x, codes, scale)
    ops.linear_int8(x, codes, scale)
    with ops.use("triton"), pytest.raises(OperatorError, match="levels on cpu, which are reference"):
        ops.rms_norm(x, w, eps=1e-5)


def test_the_ledger_counts_what_ran_and_nothing_after():
    q, k, v = qkv()
    with ops.ledger() as outer:
        ops.attention_full(q, k, v, scale=0.1)
        with ops.ledger() as inner:
            ops.attention_full(q, k, v, scale=0.1)
            ops.rms_norm(q, torch.ones(64), eps=1e-5)
    ops.rms_norm(q, torch.ones(64), eps=1e-5)
    assert outer[("attention_full", "vendor", "SDPA's backend FLASH_ATTENTION")] == 2
    assert inner == {
        ("attention_full", "vendor", "SDPA's backend FLASH_ATTENTION"): 1,
        ("rms_norm", "reference", "the only level"): 1,
    }


def test_sdpa_never_takes_its_math_backend_by_surprise():
    q, k, v = qkv()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), ops.ledger() as ran:
        ops.attention_full(q, k, v, scale=0.1)
        with ops.use("vendor"), pytest.raises(OperatorError, match="SDPA's backend MATH"):
            ops.attention_full(q, k, v, scale=0.1)
    assert [(entry.level, entry.reason) for entry in ran] == [
        ("reference", "not vendor: SDPA's backend MATH; plain torch")
    ]


# ---- the plug


@pytest.fixture
def plugged(monkeypatch):
    """A kernel in rms_norm's place, as if triton were there and interpreted."""
    calls = []

    def run(x, w, eps, *, out=None):
        calls.append(out)
        y = torch.nn.functional.rms_norm(x, w.shape, w, eps)
        return y if out is None else out[0].copy_(y)

    def suits(x, w, eps):
        return x.shape[-1] % 2 == 0, "D even"

    operator = ops.OPERATORS["rms_norm"]
    levels = {"cpu": ("reference",), "cuda": ("triton", "reference")}
    monkeypatch.setattr(operator, "contract", dataclasses.replace(operator.contract, levels=levels))
    monkeypatch.setitem(KERNELS, "rms_norm", Kernel(run, suits))
    monkeypatch.setattr(SELECT, "_has_triton", lambda: True)
    return calls


def test_a_kernel_runs_where_it_is_selected_and_fills_out(plugged, monkeypatch):
    x, w = torch.randn(3, 8), torch.ones(8)
    want = ops.rms_norm(x, w, eps=1e-5)
    assert plugged == []  # on a CPU the reference is the level, unless the interpreter is asked for
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ops.rms_norm(x, w, eps=1e-5)
    assert plugged == []
    out = torch.empty_like(x)
    with ops.use("triton"), ops.ledger() as ran:
        torch.testing.assert_close(ops.rms_norm(x, w, eps=1e-5), want)
        assert ops.rms_norm(x, w, eps=1e-5, out=out) is out
        with pytest.raises(OperatorError, match="not triton: D even"):
            ops.rms_norm(x[:, :7].contiguous(), w[:7], eps=1e-5)
    torch.testing.assert_close(out, want)
    assert plugged[0] is None
    assert plugged[1][0] is out
    assert ran == {("rms_norm", "triton", "D even"): 2}


def test_without_the_package_the_reason_names_the_extra(plugged, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(SELECT, "_has_triton", lambda: False)
    with ops.use("triton"), pytest.raises(OperatorError, match=r"pip install 'microllm\[gpu\]'"):
        ops.rms_norm(torch.randn(3, 8), torch.ones(8), eps=1e-5)


def test_rows_that_list_a_kernel_have_one_and_kernels_have_rows():
    listed = {name for name, row in ops.CONTRACTS.items() if "triton" in row.levels["cuda"]}
    assert listed == set(kernels.KERNELS)
    assert not any("triton" in row.levels["cpu"] for row in ops.CONTRACTS.values())


# ---- tuned.json


@pytest.fixture
def entries(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "_triton_version", lambda: "3.6.0")
    entry = {
        "op": "linear", "shape": {"N": 4, "K": 8}, "dtype": "bfloat16", "device": "GPU A",
        "torch": torch.__version__.partition("+")[0], "triton": "3.6.0", "source": tuned.source_of("linear"),
        "choice": {"rows": 16},
    }  # fmt: skip

    def write(*changes):
        path = tmp_path / f"tuned{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"format": 1, "entries": [entry | change for change in changes]}))
        monkeypatch.setattr(tuned, "PATH", path)

    return write


def test_a_tuned_choice_is_found_by_operator_shape_dtype_and_environment(entries):
    entries({})
    assert tuned.tuned("linear", {"K": 8, "N": 4}, torch.bfloat16, "GPU A") == {"rows": 16}
    assert tuned.tuned("linear", {"K": 8, "N": 5}, torch.bfloat16, "GPU A") is None
    assert tuned.tuned("linear", {"K": 8, "N": 4}, torch.float16, "GPU A") is None
    assert tuned.tuned("swiglu", {"K": 8, "N": 4}, torch.bfloat16, "GPU A") is None
    assert tuned.ignored("GPU A") == []


@pytest.mark.parametrize(
    ("change", "device", "why"),
    [
        ({}, "GPU B", "tuned on device GPU A, here GPU B"),
        ({"torch": "2.0.0"}, "GPU A", "tuned on torch 2.0.0, here 2"),
        ({"triton": "3.5.0"}, "GPU A", "tuned on triton 3.5.0, here 3.6.0"),
        ({"source": "0"}, "GPU A", "tuned on source 0, here "),
    ],
)
def test_a_choice_of_another_environment_is_ignored_and_reported(entries, change, device, why):
    entries(change)
    assert tuned.tuned("linear", {"K": 8, "N": 4}, torch.bfloat16, device) is None
    assert len(tuned.ignored(device)) == 1
    assert why in tuned.ignored(device)[0]


def test_a_file_with_something_else_in_it_is_refused(entries):
    entries({"speed": 3})
    with pytest.raises(OperatorError, match=r"tuned\d\.json: got entries\.0\.speed"):
        tuned.ignored("GPU A")


def test_the_packaged_file_reads():
    assert isinstance(tuned.ignored("GPU A"), list)


def test_a_plain_call_runs_at_once_and_one_that_somebody_follows_does_not():
    x, w = torch.randn(3, 8), torch.ones(8)
    with torch.profiler.profile() as profile:
        followed = ops.rms_norm(x, w, eps=1e-5)
    assert "microllm::rms_norm" in {event.key for event in profile.key_averages()}
    assert torch.equal(ops.rms_norm(x, w, eps=1e-5), followed)
    with FakeTensorMode() as mode:
        assert isinstance(ops.rms_norm(mode.from_tensor(x), mode.from_tensor(w), eps=1e-5), FakeTensor)
    seen = []

    class Follows(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Follows():
        ops.rms_norm(x, w, eps=1e-5)
    assert any("microllm.rms_norm" in name for name in seen)
