"""The training benchmark on a CPU: equal losses, a whole row, no claim of a peak."""

from __future__ import annotations

import json

import pytest

from microllm.cli import main
from microllm.lab import bench_train
from microllm.lab.bench_train import measure_train
from microllm.lab.bench_train_config import BenchTrainConfig

SMALL = {"rows": 2, "row_tokens": 16, "device": "cpu", "rounds": 2, "round_s": 0.01, "forms": ("eager",)}


@pytest.mark.slow
def test_rows_beside_transformers(tmp_path, capsys):
    words = ["bench", "train", "--rows", "2", "--row-tokens", "16", "--device", "cpu", "--rounds", "2"]
    out = ["--round-s", "0.01", "--forms", "eager", "--out", str(tmp_path / "rows.jsonl"), "--json"]
    assert main([*words, *out]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["parity"] == row["status"] == "pass"
    assert row["unit"] == "tok/s"
    assert row["ours"] > 0
    assert row["peer"] > 0
    assert row["limit"] is None  # this device's peak is not published
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1


def test_another_loss_costs_the_figure(monkeypatch):
    real = bench_train.ours

    def different(*args):
        arm = real(*args)
        step = arm.step
        arm.step = lambda: step() + 1
        return arm

    monkeypatch.setattr(bench_train, "ours", different)
    (row,) = measure_train(BenchTrainConfig(**SMALL, moments="bf16"))
    assert row.status == "precision_mismatch"
    assert row.ours is None
