"""On a GPU: a captured step is the eager one, packed bf16 rows are their documents, runs go on bit for bit."""

from __future__ import annotations

import pytest
import torch
from run_files import assert_same_end
from test_network import FAMILIES, distance, documents, gradients, network, rows_of

import gpu_train
from microllm.training import OptimizerConfig, train

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_a_captured_step_is_the_eager_one():
    found = gpu_train.check_capture()
    for name in ("one", "three"):
        assert found[f"{name} worst gradient"] < 1e-3
        assert found[f"{name} on"] == pytest.approx(found[f"{name} off"], rel=1e-4)


def test_a_batch_is_learnt():
    found = gpu_train.check_overfit("cuda")
    assert found["first"] > 8
    assert found["last"] < 0.5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_rows_on_the_gpu_are_near_the_cpus_fp32(family, dtype):
    model, net = network(**FAMILIES[family])
    net(rows_of(documents(), weight=0.1)).backward()
    want = gradients(model)
    model, net = network(**FAMILIES[family])
    net.to(CUDA)
    net.copies._dtype = dtype
    net.copies.make(net.parameters())
    net(rows_of(documents(), weight=0.1).to(CUDA)).backward()
    found = {name: g.cpu() for name, g in gradients(model).items()}
    noise = {n for n in want if want[n].norm() < 1e-4}
    limit = 1e-4 if dtype == torch.float32 else 0.06
    assert max(d for n, d in distance(found, want).items() if n not in noise) < limit


@pytest.mark.parametrize("capture", ["off", "on"])
def test_five_and_five_steps_are_ten(capture, make_config, tmp_path):
    rest = {
        "device": "cuda", "capture": capture, "checkpoint_every": 100, "micro_rows": 3, "row_tokens": 64,
        "optimizer": OptimizerConfig(moments="bf16", stochastic_rounding=True),
    }  # fmt: skip
    train(make_config(output=tmp_path / "whole", **rest))
    train(make_config(output=tmp_path / "parts", stop_at=5, **rest))
    train(make_config(output=tmp_path / "parts", **rest))
    assert_same_end(tmp_path / "whole", tmp_path / "parts", 10)


def test_a_steps_parts_and_memory_are_told(make_config):
    rows = []
    train(make_config(device="cuda", num_steps=6, row_tokens=64, batch_rows=8), rows.append)
    for row in [r for r in rows if r["kind"] == "step"][2:]:
        parts = dict(row["seconds"])
        total = parts.pop("total")
        assert sum(parts.values()) == pytest.approx(total, rel=0.1, abs=2e-3)
        assert row["peak_memory_bytes"] > 1 << 20
