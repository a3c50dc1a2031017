"""The roofline on this CPU, in seconds: every dtype has a row, products are checked, limits are read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from microllm.errors import EvidenceError
from microllm.evidence.environment import read_device_name
from microllm.evidence.rows import read_rows
from microllm.lab import roofline
from microllm.lab.roofline import DTYPES, RooflineConfig, measure_roofline, read_limits, short

TINY = replace(short(RooflineConfig()), sizes=(32, 128), memory_mib=(4,), round_s=0.004)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("rows") / "roofline.jsonl"
    patched = pytest.MonkeyPatch()
    patched.setattr(roofline, "MIB", 1 << 17)  # an eighth of every buffer
    rows = measure_roofline(replace(TINY, out=out))
    patched.undo()
    return rows, out


def test_every_probe_has_a_row_and_the_file_holds_them(measured):
    rows, out = measured
    assert [(row.dtype, row.workload) for row in rows[:4]] == [
        ("fp32", "gemm 32"), ("fp32", "gemm 128"), ("tf32", "gemm 32"), ("tf32", "gemm 128"),
    ]  # fmt: skip
    assert len(rows) == 2 * len(DTYPES) + 3
    assert {row.unit for row in rows} == {"TFLOPS", "GB/s"}
    assert read_rows(out) == rows


def test_what_a_cpu_lacks_is_a_row_that_says_so(measured):
    tf32 = [row for row in measured[0] if row.dtype == "tf32"]
    assert [(row.status, row.ours) for row in tf32] == [("unsupported", None)] * 2
    assert "TF32 is a GPU's" in tf32[0].parity


def test_limits_are_the_best_passing_rates(measured):
    rows, _ = measured
    limits = read_limits(rows, read_device_name("cpu"))
    fp32 = [row.ours for row in rows if row.dtype == "fp32" and row.workload.startswith("gemm")]
    assert limits.tflops["fp32"] == max(fp32)
    assert "tf32" not in limits.tflops
    assert limits.read_gb_s == max(row.ours for row in rows if row.workload.startswith("read"))
    assert 0 < limits.copy_gb_s < 10_000
    worse = [row.model_copy(update={"status": "invalid", "ours": 1e9}) for row in rows if row.dtype == "fp32"]
    assert read_limits([*worse, *rows], read_device_name("cpu")) == limits
    with pytest.raises(EvidenceError, match="bench roofline"):
        read_limits(rows, "NVIDIA H200")


def test_a_quick_look_is_no_record():
    assert short(RooflineConfig()).out is None


def test_a_wrong_product_has_no_rate(monkeypatch):
    monkeypatch.setattr(roofline.torch, "mm", lambda a, b: a @ b * 1.0001)
    row = measure_roofline(replace(TINY, sizes=(32,), dtypes=("fp32",), memory_mib=(), out=None))[0]
    assert (row.status, row.ours) == ("precision_mismatch", None)
    assert "relative error 1.0e-04" in row.parity


def test_out_of_memory_and_a_published_peak(monkeypatch):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    config = replace(TINY, sizes=(32,), dtypes=("fp32",), memory_mib=(), out=None)
    monkeypatch.setattr(roofline, "_prepare_gemm", exhausted)
    assert measure_roofline(config)[0].status == "oom"
    monkeypatch.undo()
    monkeypatch.setitem(roofline.PUBLISHED, read_device_name("cpu"), {"fp32": 1e-9, "GB/s": 1e-9})
    row = measure_roofline(config)[0]
    assert row.status == "invalid", "faster than the published peak"
    assert row.ratio_limit > 1


def test_published_peaks_are_dense():
    assert roofline.PUBLISHED["NVIDIA H200"]["bf16"] == pytest.approx(989, rel=0.001)


@pytest.mark.gpu
def test_on_a_gpu_every_dtype_has_a_rate():
    config = RooflineConfig(device="cuda", sizes=(1024,), memory_mib=(256,), out=None)
    rows = measure_roofline(config)
    assert {row.status for row in rows} == {"pass"}, [(row.workload, row.dtype, row.parity) for row in rows]
