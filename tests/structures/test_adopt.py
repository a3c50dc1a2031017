"""Adopting what comes quantised: each format, its error, and that there is no way back."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from microllm import structures
from microllm.errors import GuardRefused, StructureError
from tiny_hosts import make_host

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Format -> the largest relative L2 of a layer that converting may cost.
LIMITS = {"int8": 4e-3, "int8 grouped": 4e-3, "fp8": 4e-3, "nvfp4": 1.2e-2, "q8_0": 4e-3, "q4_0": 6e-3, "q4_1": 8e-3}


def parts_of(weight, kind):
    """Quantise as a compressor would: stored parts, and the values that they stand for."""
    if kind.startswith("int8"):
        groups = weight.unflatten(1, (-1, 32 if "grouped" in kind else weight.shape[1]))
        scale = groups.abs().amax(2) / 127
        codes = (groups / scale[..., None]).round().to(torch.int8)
        return {"weight": codes.flatten(1), "weight_scale": scale}, (codes * scale[..., None]).flatten(1)
    if kind == "fp8":
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(1, (-1, 16))
    total = torch.tensor([2688.0]) / weight.abs().max()
    scale = (groups.abs().amax(2) / 6 * total).to(torch.float8_e4m3fn)
    step = (scale.float() / total)[..., None]
    nearest = ((groups.abs() / step)[..., None] - table).abs().argmin(-1)
    values = table[nearest] * groups.sign() * step
    codes = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": total}, values.flatten(1)


def write_compressed(path, model, kind):
    """Write a directory as compressed-tensors does; change the model to what it holds."""
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.split(".")[-2] in LINEARS and n.endswith("weight")]:
        parts, values = parts_of(tensors.pop(name), kind)
        tensors |= {f"{name.rpartition('.')[0]}.{part}": t.contiguous() for part, t in parts.items()}
        model.get_parameter(name).data.copy_(values)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": kind}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["int8", "int8 grouped", "fp8", "nvfp4"])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_compressed_tensors(kind, family, tmp_path):
    model = make_host(family)
    write_compressed(tmp_path, model, kind)
    adopted = structures.adopt_prequantized(tmp_path, dtype=torch.float32)
    assert set(adopted.relative_l2) == {
        f"model.layers.{i}.{'mlp' if n[0] in 'gud' else 'self_attn'}.{n}" for i in range(2) for n in LINEARS
    }  # fmt: skip
    assert adopted.worst[1] <= LIMITS[kind]
    ids = torch.arange(12)[None]
    wanted, found = model(ids).logits, adopted.model(ids).logits
    assert (found - wanted).norm() / wanted.norm() < 8 * LIMITS[kind]
    if kind in ("int8", "fp8"):  # the same grid: nothing but the order of sums differs
        assert torch.allclose(found, wanted, atol=2e-4)
        assert adopted.worst[1] < 1e-6
    assert adopted.summary()["clean"]
    assert adopted.summary()["replaced"] == 14
    with pytest.raises(GuardRefused, match="reload"):
        adopted.detach()
    for refused in (lambda: adopted.model.half(), lambda: adopted.model.state_dict(), lambda: adopted.model.train()):
        with pytest.raises(GuardRefused):
            refused()
    with structures.decode_loop(adopted.model, max_len=32) as loop:
        assert len(loop.generate([1, 2, 3], max_new_tokens=5)[0]) == 5


def write_gguf(path, model, kind):
    """Write a llama as GGUF, its linears in one packed type; change the model to what it holds."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    kinds = {t.name.lower(): t for t in gguf.GGMLQuantizationType}
    for name, parameter in model.named_parameters():
        stem = name.removesuffix(".weight")
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.get(stem)
        if top is None:
            layer, _, rest = stem.removeprefix("model.layers.").partition(".")
            top = f"blk.{layer}.{names[rest]}"
        if parameter.dim() == 1 or stem == "model.embed_tokens":
            writer.add_tensor(f"{top}.weight", parameter.detach().numpy())
            continue
        packed = gguf.quants.quantize(parameter.detach().numpy(), kinds[kind])
        parameter.data.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kinds[kind])))
        if "attn_q." in f"{top}." or "attn_k." in f"{top}.":  # GGUF keeps llama's pairs side by side
            heads = config.num_attention_heads if "attn_q" in top else config.num_key_value_heads
            packed = packed.reshape(heads, 2, -1, packed.shape[1]).swapaxes(1, 2).reshape(packed.shape)
        writer.add_tensor(f"{top}.weight", np.ascontiguousarray(packed), raw_dtype=kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_gguf(kind, tmp_path):
    model = make_host("llama", tie_word_embeddings=False)
    write_gguf(tmp_path / "model.gguf", model, kind)
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 8 * LIMITS[kind])):
        adopted = structures.adopt_prequantized(tmp_path / "model.gguf", dtype=dtype)
        assert adopted.worst[1] <= LIMITS[kind]
        ids = torch.arange(12)[None]
        wanted, found = model(ids).logits, adopted.model(ids).logits.float()
        assert (found - wanted).norm() / wanted.norm() < limit
        assert adopted.summary()["replaced"] == 15
        assert functional.cosine_similarity(found.flatten(), wanted.flatten(), 0) > 0.99


def test_what_is_not_adopted_is_refused(tmp_path):
    model = make_host("llama")
    with pytest.raises(StructureError, match="need one of auto"):
        structures.adopt_prequantized(tmp_path, "exl2")
    model.save_pretrained(tmp_path)
    with pytest.raises(StructureError, match="quantised by None"):
        structures.adopt_prequantized(tmp_path)
    with pytest.raises(StructureError, match="without quantised weights"):
        structures.adopt_prequantized(model)
    write_compressed(tmp_path, model, "int8")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != f"{name}_scale"}, tmp_path / "model.safetensors")
    with pytest.raises(StructureError, match="weight_scale"):
        structures.adopt_prequantized(tmp_path)
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(StructureError, match=r"model\.norm\.weight"):
        structures.adopt_prequantized(tmp_path)
    save_file(tensors | {f"{name}_scale": torch.ones(128, 7)}, tmp_path / "model.safetensors")
    with pytest.raises(StructureError, match="need int8 or e4m3"):
        structures.adopt_prequantized(tmp_path)
