"""Weights from a checkpoint into a model: all or nothing by default, what fits when asked, foreign names by a map."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch

from microllm.config import preset
from microllm.errors import LoadError
from microllm.io.checkpoint import MapEntry, open_checkpoint, save_checkpoint
from microllm.io.resolve import resolve_model
from microllm.model import Transformer, load_model, load_weights

CONFIG = preset("tiny", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
MATRIX = "layers.0.mlp.up_proj.weight"


def saved(tmp_path, seed=1, config=CONFIG):
    source = Transformer(config).initialise(seed)
    place = save_checkpoint(tmp_path / "m", config, source.state_dict())
    return source, open_checkpoint(resolve_model(str(place)))


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_a_whole_checkpoint_replaces_the_models_weights(tmp_path):
    source, checkpoint = saved(tmp_path)
    model = Transformer(CONFIG).initialise(seed=2)
    assert load_weights(model, checkpoint).ok
    assert_equal(model.state_dict(), source.state_dict())


def test_a_strict_load_that_does_not_fit_leaves_the_model_untouched(tmp_path):
    _, checkpoint = saved(tmp_path)
    model = Transformer(preset("tiny", vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2))
    before = copy.deepcopy(model.initialise(seed=2).state_dict())
    with pytest.raises(LoadError, match=r"need \[40, 32\]") as caught:
        load_weights(model, checkpoint)
    assert "layers.1.input_layernorm.weight" in str(caught.value)
    assert_equal(model.state_dict(), before)


def test_a_load_that_is_not_strict_takes_what_fits_and_says_what_did_not(tmp_path):
    source, checkpoint = saved(tmp_path)
    model = Transformer(preset("tiny", vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1))
    before = copy.deepcopy(model.initialise(seed=2).state_dict())
    report = load_weights(model, checkpoint, strict=False)
    assert set(report.incompatible) == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    left = {name for name in before if ".mlp." in name}
    assert set(report.loaded) == before.keys() - left
    want = {name: (before if name in left else source.state_dict())[name] for name in before}
    assert_equal(model.state_dict(), want)


def test_a_name_map_takes_a_tensor_from_another_place_transposed(tmp_path):
    square = preset("tiny", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    source, checkpoint = saved(tmp_path, config=square)
    up, gate = f"model.{MATRIX}", f"model.{MATRIX.replace('up', 'gate')}"
    swapped = {up: MapEntry(gate.removeprefix("model."), transpose=True), gate: MapEntry(MATRIX)}
    model = Transformer(square)
    assert load_weights(model, checkpoint, name_map=swapped).ok
    mlp, theirs = model.layers[0].mlp, source.layers[0].mlp
    assert torch.equal(mlp.gate_proj.weight, theirs.up_proj.weight.T)
    assert torch.equal(mlp.up_proj.weight, theirs.gate_proj.weight)


def test_asking_for_qwen2_in_float16_warns_whatever_the_file_holds(tmp_path):
    config = preset("tiny", family="qwen2", qkv_bias=True, vocab_size=64, num_hidden_layers=1)
    _, checkpoint = saved(tmp_path, config=config)
    with pytest.warns(UserWarning, match="overflow"):
        load_model(checkpoint, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(checkpoint, dtype=torch.bfloat16)


def test_sizes_that_no_machine_holds_are_compared_before_they_are_used(tmp_path):
    _, checkpoint = saved(tmp_path)
    huge = dict.fromkeys(("vocab_size", "hidden_size", "head_dim", "intermediate_size"), 2**31 - 2)
    with pytest.raises(LoadError, match="need \\[2147483646, 2147483646\\]"):
        load_model(replace(checkpoint, config=replace(checkpoint.config, **huge)))
