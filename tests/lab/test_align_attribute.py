"""Attribution: each side of a product is charged with its own rounding, and with nothing else."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from microllm.cli import main
from microllm.errors import ConfigError
from microllm.lab.align import AlignConfig
from microllm.lab.align_attribute import run_align_attribute

pytestmark = pytest.mark.slow

TOKENS = tuple((7 * i + i * i) % 97 for i in range(24))
EXACT = "layers.1.self_attn.o_proj"


@pytest.fixture
def with_one_exact_matrix(random_model, tmp_path):
    """Return a qwen2 one of whose matrices bf16 holds exactly."""
    source, directory = random_model("qwen2"), tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    name = f"model.{EXACT}.weight"
    tensors[name] = tensors[name].bfloat16().float()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def errors(directory, side, **changes):
    config = AlignConfig(model=str(directory), tokens=TOKENS, attribute=side, **changes)
    report = run_align_attribute(config, lambda text: None)
    return {row.site: row for row in report.rows}, report


def test_a_matrix_that_bf16_holds_costs_nothing_and_its_input_does(with_one_exact_matrix, tmp_path):
    weights, report = errors(with_one_exact_matrix, "weights", output=tmp_path)
    activations, both = (errors(with_one_exact_matrix, side)[0] for side in ("activations", "both"))
    assert len(weights) == len(activations) == 21
    assert [site for site, row in weights.items() if row.logits_error == 0] == [EXACT]
    assert weights[EXACT].output_error == 0
    assert both[EXACT] == activations[EXACT]
    for site in weights:
        assert 1e-4 < activations[site].output_error < 8e-3  # bf16 keeps 8 bits
        if site != EXACT:
            assert 1e-4 < weights[site].output_error < 8e-3
            assert both[site].output_error > 0.9 * max(weights[site].output_error, activations[site].output_error)
    assert report.logits_error > max(row.logits_error for row in weights.values()) / 2
    assert len(json.loads((tmp_path / "attribute.json").read_text())["rows"]) == 21


def test_the_command_lists_projections_and_refuses_mixtures(random_model, capsys):
    words = ["align", "--model", str(random_model("llama")), "--attribute", "both"]
    words += ["--tokens", *(str(t) for t in TOKENS)]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    assert lines[-1].startswith("align --attribute both: logits' relative L2 error ")
    assert main([*words, "--bisect", "precision"]) == 2
    assert "need it alone" in capsys.readouterr().err


def test_an_unknown_side_is_refused(random_model):
    with pytest.raises(ConfigError, match="need 'weights', 'activations' or 'both'"):
        errors(random_model("llama"), "biases")
