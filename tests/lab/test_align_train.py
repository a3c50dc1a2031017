"""Three training steps beside the twin: they pass as they are, and a planted fault is named."""

from __future__ import annotations

import pytest

from microllm.cli import main
from microllm.lab.align import AlignConfig
from microllm.lab.align_train import NUM_STEPS, run_align_train

TOKENS = tuple((7 * i + i * i) % 97 for i in range(60))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_training_equals_transformers(family, random_model, tmp_path):
    report = run_align_train(AlignConfig(model=str(random_model(family)), tokens=TOKENS, output=tmp_path))
    assert report.passed, report.verdict
    assert len([s for s in report.sites if s.kind == "loss"]) == NUM_STEPS
    assert report.losses[0] > report.losses[-1] > 0
    assert all(name.endswith("k_proj.bias") for name in report.negligible)
    assert {s.kind for s in report.sites} == {"loss", "gradient", "exp_avg", "exp_avg_sq", "parameter"}
    assert (tmp_path / "train.json").stat().st_size > 1000


def test_a_planted_fault_fails(random_model, capsys):
    words = ["align", "--train", "--model", str(random_model("llama")), "--perturb", "layers.1.mlp.up_proj"]
    assert main([*words, "--tokens", *(str(t) for t in TOKENS)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_trained_models_pass(trained_model):
    report = run_align_train(AlignConfig(model=str(trained_model("tiny-qwen2"))))
    assert report.passed, report.verdict
