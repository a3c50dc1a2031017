"""Adapters: they start as nothing, train alone, resume exactly, and peft reads them."""

from __future__ import annotations

import pytest
import torch
from run_files import steps
from safetensors.torch import load_file

from microllm.config import preset
from microllm.errors import ConfigError
from microllm.io.checkpoint import open_checkpoint, save_checkpoint
from microllm.io.resolve import resolve_model
from microllm.model import Transformer, load_model
from microllm.training import LoraConfig, train
from microllm.training.lora import merge_adapters


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model") / "tiny"
    shape = preset("tiny", tie_word_embeddings=True)
    return save_checkpoint(place, shape, Transformer(shape).initialise(0, std=0.1).state_dict())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_an_adapter_loads_in_peft_with_equal_logits(model, make_config):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = make_config(model=str(model), num_steps=6, lora=LoraConfig(lora_rank=4, lora_alpha=8))
    train(config)
    losses = [row[1] for row in steps(config.output)]
    assert losses[-1] < losses[0]
    adapter = config.output / "checkpoints/step-00000006"
    assert not (adapter / "model.safetensors").exists()
    ours = load_model(open_checkpoint(resolve_model(str(model))))
    before = ours(torch.arange(40)[None])
    merge_adapters(ours, adapter)
    twin = transformers.AutoModelForCausalLM.from_pretrained(model)
    theirs = peft.PeftModel.from_pretrained(twin, adapter).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours(ids), atol=2e-5)
        assert not torch.allclose(before, ours(ids), atol=1e-3)


def test_an_interrupted_adapter_goes_on_exactly(model, make_config, tmp_path):
    lora = {"model": str(model), "num_steps": 6, "lora": LoraConfig(lora_rank=2, lora_targets=("q_proj", "down_proj"))}
    train(make_config(output=tmp_path / "whole", **lora))
    train(make_config(output=tmp_path / "parts", stop_at=3, **lora))
    train(make_config(output=tmp_path / "parts", **lora))
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        one, two = (load_file(tmp_path / run / "checkpoints/step-00000006" / name) for run in ("whole", "parts"))
        assert one.keys() == two.keys()
        assert len(one) == (8 if name.startswith("adapter") else 16)
        assert all(tensor.equal(two[key]) for key, tensor in one.items())


def test_bf16_adapters_stay_fp32_and_learn(model, make_config):
    config = make_config(model=str(model), num_steps=6, precision="bf16", lora=LoraConfig(lora_rank=4))
    train(config)
    stored = load_file(config.output / "checkpoints/step-00000006/adapter_model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    losses = [row[1] for row in steps(config.output)]
    assert losses[-1] < losses[0]


def test_targets_that_no_layer_has_are_refused():
    with pytest.raises(ConfigError, match="q_proj"):
        LoraConfig(lora_rank=2, lora_targets=("query",))
