"""Strict loading names every offender before the first weight; saving is whole or not at all."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from microllm.config import ModelConfig, RopeConfig, preset
from microllm.errors import CheckpointError, ConfigError, LoadError, UnsupportedModelError
from microllm.io import checkpoint as checkpoint_module
from microllm.io import safetensors_files
from microllm.io.checkpoint import MapEntry, check_tensors, open_checkpoint, read_tensors, save_checkpoint
from microllm.io.hf_config import GenerationDefaults, to_hf_config
from microllm.io.names import file_name, is_ignored, runtime_name
from microllm.io.resolve import ModelSource
from microllm.io.safetensors_files import INDEX_FILE, SINGLE_FILE

TINY = preset("tiny", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8, eos_token_ids=(2,))
TIED = preset("tiny", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8, tie_word_embeddings=True)
CONFIGS = {
    "llama": TINY,
    "llama tied": TIED,
    "llama biased, llama3": preset(
        "tiny", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8, qkv_bias=True, o_bias=True,
        mlp_bias=True, rope=RopeConfig(kind="llama3", factor=8.0, original_context=64),
    ),
    "qwen2 yarn": preset(
        "tiny", family="qwen2", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8, qkv_bias=True,
        rope=RopeConfig(kind="yarn", factor=4.0, original_context=512),
    ),
    "qwen3 tied": preset(
        "tiny", family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=16,
        tie_word_embeddings=True, qk_norm=True,
    ),
}  # fmt: skip


def random_state(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in config.parameter_shapes().items()}


def on_disk(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {file_name(name): tensor for name, tensor in state.items()}


def write(directory: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a directory by hand: on-disk names, one file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(to_hf_config(config)))
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    return directory


def opened(directory: Path):
    return open_checkpoint(ModelSource(directory.name, directory, "directory"))


def loaded(directory: Path, **options) -> dict[str, torch.Tensor]:
    checkpoint = opened(directory)
    return dict(read_tensors(checkpoint, checkpoint.config.parameter_shapes(), **options))


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


# ---- names


def test_names_round_trip():
    for name in CONFIGS["llama biased, llama3"].parameter_shapes():
        assert runtime_name(file_name(name)) == name
    assert runtime_name("transformer.wte.weight") is None
    assert is_ignored("model.layers.12.self_attn.rotary_emb.inv_freq")
    assert is_ignored("model.rotary_emb.inv_freq")
    assert not is_ignored("model.layers.x.self_attn.rotary_emb.inv_freq")


# ---- opening


def test_opening_reads_headers_and_both_configs(tmp_path):
    directory = write(tmp_path, TINY, on_disk(random_state(TINY)))
    (directory / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 5]}')
    checkpoint = opened(directory)
    assert checkpoint.config == preset(
        "tiny", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8, eos_token_ids=(2, 5)
    )
    assert checkpoint.generation == GenerationDefaults(temperature=0.6, eos_token_ids=(2, 5))
    assert checkpoint.raw_config["model_type"] == "llama"
    assert checkpoint.tensors.infos["model.norm.weight"].shape == (32,)


def test_a_config_without_dtype_takes_the_stored_one(tmp_path):
    directory = write(tmp_path, TINY, on_disk(random_state(TINY, torch.bfloat16)))
    raw = to_hf_config(TINY)
    del raw["dtype"]
    (directory / "config.json").write_text(json.dumps(raw))
    assert opened(directory).config.dtype == "bfloat16"


def test_a_refused_model_is_refused_before_its_weights_are_looked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(TINY) | {"num_local_experts": 8}))
    with pytest.raises(UnsupportedModelError, match="num_local_experts"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no readable"), ("{", "valid JSON"), ("[]", "JSON list"), ('{"a": 1, "a": 2}', "twice"),
     (" " * ((1 << 20) + 1), "more than 1048576 bytes"), ("\udcff", "valid JSON")],
)  # fmt: skip
def test_a_damaged_config_is_refused(text, message, tmp_path):
    directory = write(tmp_path, TINY, on_disk(random_state(TINY)))
    (directory / "config.json").unlink()
    if text is not None:
        (directory / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        opened(directory)


def test_a_damaged_generation_config_is_refused(tmp_path):
    directory = write(tmp_path, TINY, on_disk(random_state(TINY)))
    (directory / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match="temperature"):
        opened(directory)


# ---- loading


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_what_transformers_writes_loads_equal(name, max_shard_size, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[config.family]
    model = transformers.AutoModelForCausalLM.from_config(kind.from_dict(to_hf_config(config)))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_size == "20KB")
    checkpoint = opened(tmp_path)
    assert checkpoint.config == config
    want = {runtime_name(key): value for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del want["lm_head.weight"]
    assert_same(loaded(tmp_path), want)


def test_every_offender_is_named_and_nothing_is_handed_out(tmp_path):
    tensors = on_disk(random_state(TINY))
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(16)
    tensors["transformer.wte.weight"] = torch.zeros(2)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(48, 32)
    tensors["lm_head.weight"] = torch.zeros(64, 32, dtype=torch.int8)
    checkpoint = opened(write(tmp_path, TINY, tensors))
    shapes = TINY.parameter_shapes()
    report = check_tensors(shapes, checkpoint)
    assert not report.ok
    assert set(report.missing) == {"norm.weight", "layers.1.mlp.up_proj.weight"}
    assert set(report.unexpected) == {"model.layers.0.self_attn.k_proj.bias", "transformer.wte.weight"}
    assert set(report.incompatible) == {"model.layers.0.mlp.down_proj.weight", "lm_head.weight"}
    assert len(report.loaded) == len(shapes) - 4
    with pytest.raises(LoadError) as caught:
        read_tensors(checkpoint, shapes)  # not iterated: the judgement does not wait for the first weight
    assert caught.value.report == report
    for name in (*report.missing, *report.unexpected, *report.incompatible):
        assert name in str(caught.value)
    assert "shape [48, 32], need [32, 48]" in str(caught.value)
    assert "int8" in str(caught.value)


def test_not_strict_hands_out_what_fits(tmp_path):
    state = random_state(TINY)
    tensors = on_disk(state)
    del tensors["model.norm.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    got = loaded(write(tmp_path, TINY, tensors), strict=False)
    assert_same(got, {name: state[name] for name in state if name not in ("norm.weight", "lm_head.weight")})


def test_computed_buffers_are_passed_over(tmp_path):
    state = random_state(TINY)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert_same(loaded(write(tmp_path, TINY, on_disk(state) | extra)), state)


def test_tensors_come_in_file_order(tmp_path):
    checkpoint = opened(write(tmp_path, TINY, on_disk(random_state(TINY))))
    names = [name for name, _ in read_tensors(checkpoint, TINY.parameter_shapes())]
    assert [file_name(name) for name in names] == list(checkpoint.tensors.infos)


def test_a_tied_head_stored_twice_must_be_the_same(tmp_path):
    state = random_state(TIED)
    twin = on_disk(state) | {"lm_head.weight": state["embed_tokens.weight"].clone()}
    directory = write(tmp_path, TIED, twin)
    checkpoint = opened(directory)
    assert len(checkpoint.tensors.infos) == len(TIED.parameter_shapes()) + 1
    assert check_tensors(TIED.parameter_shapes(), checkpoint).ok
    assert_same(loaded(directory), state)
    twin["lm_head.weight"][-1, -1] += 1
    write(tmp_path, TIED, twin)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight that differs from model\.embed_tokens"):
            loaded(directory, strict=strict)


def test_a_tied_head_that_is_equal_but_not_by_bytes_is_refused(tmp_path):
    state = random_state(TIED) | {"embed_tokens.weight": torch.zeros(64, 32)}
    directory = write(tmp_path, TIED, on_disk(state) | {"lm_head.weight": -torch.zeros(64, 32)})
    with pytest.raises(CheckpointError, match="differs"):
        loaded(directory)


def test_a_tied_head_of_another_shape_is_incompatible(tmp_path):
    tensors = on_disk(random_state(TIED)) | {"lm_head.weight": torch.zeros(63, 32)}
    with pytest.raises(LoadError, match=r"lm_head\.weight \(shape \[63, 32\]"):
        loaded(write(tmp_path, TIED, tensors))


def test_a_tied_head_stored_in_the_embeddings_place_is_the_embedding(tmp_path):
    state = random_state(TIED)
    tensors = on_disk(state)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    assert_same(loaded(write(tmp_path, TIED, tensors)), state)


def test_an_untied_model_without_a_head_lacks_it(tmp_path):
    tensors = on_disk(random_state(TINY))
    del tensors["lm_head.weight"]
    with pytest.raises(LoadError, match=r"1 missing: lm_head\.weight"):
        loaded(write(tmp_path, TINY, tensors))


# ---- foreign names


def foreign(state):
    """Return (tensors, name map) under names of another project, projections stored as [in, out]."""
    tensors, name_map = {}, {}
    for name, tensor in state.items():
        transpose = name.endswith("_proj.weight")
        tensors[f"net/{name}"] = (tensor.T if transpose else tensor).contiguous()
        name_map[f"net/{name}"] = MapEntry(name, transpose=transpose)
    return tensors, name_map


def test_a_name_map_renames_and_transposes(tmp_path):
    state = random_state(TINY)
    tensors, name_map = foreign(state)
    assert_same(loaded(write(tmp_path, TINY, tensors), name_map=name_map), state)


def test_a_name_map_to_nowhere_or_twice_is_incompatible(tmp_path):
    tensors, name_map = foreign(random_state(TINY))
    name_map["net/norm.weight"] = MapEntry("final_norm.weight")
    name_map["net/layers.0.mlp.up_proj.weight"] = MapEntry("layers.0.mlp.gate_proj.weight", transpose=True)
    name_map["net/layers.1.input_layernorm.weight"] = MapEntry("layers.1.input_layernorm.weight", transpose=True)
    report = check_tensors(TINY.parameter_shapes(), opened(write(tmp_path, TINY, tensors)), name_map)
    assert "does not have" in report.reasons["net/norm.weight"]
    assert "transposed" in report.reasons["net/layers.1.input_layernorm.weight"]
    second = {"net/layers.0.mlp.up_proj.weight", "net/layers.0.mlp.gate_proj.weight"} & set(report.incompatible)
    assert [report.reasons[name] for name in second] == ["a second tensor for layers.0.mlp.gate_proj.weight"]
    assert set(report.missing) == {"norm.weight", "layers.0.mlp.up_proj.weight"}


# ---- saving


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
def test_transformers_loads_what_we_save_bit_for_bit(name, max_shard_bytes, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    state = random_state(config)
    path = save_checkpoint(tmp_path / "saved", config, state, max_shard_bytes=max_shard_bytes)
    assert (path / INDEX_FILE).exists() == (max_shard_bytes == 20_000)
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(problems.values()), problems
    got = {runtime_name(key): value for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        assert torch.equal(got.pop("lm_head.weight"), state["embed_tokens.weight"])
    assert_same(got, state)
    assert_same(loaded(path), state)
    assert opened(path).config == config


def test_the_written_dtype_is_the_tensors_and_holds_all_of_them(tmp_path):
    state = random_state(TINY, torch.bfloat16)
    path = save_checkpoint(tmp_path / "half", TINY, state)
    assert opened(path).config.dtype == "bfloat16"
    assert_same(loaded(path), state)
    state["norm.weight"] = state["norm.weight"].float()
    assert opened(save_checkpoint(tmp_path / "mixed", TINY, state)).config.dtype == "float32"


def test_text_files_and_generation_defaults_are_saved(tmp_path):
    generation = GenerationDefaults(temperature=0.7, top_p=0.9, eos_token_ids=(2, 9))
    path = save_checkpoint(
        tmp_path / "m", TINY, random_state(TINY), generation=generation, text_files={"tokenizer.json": b"{}"}
    )
    assert (path / "tokenizer.json").read_bytes() == b"{}"
    assert opened(path).generation == generation
    assert opened(path).config.eos_token_ids == (2, 9)


def test_a_tied_head_is_written_once(tmp_path):
    state = random_state(TIED)
    path = save_checkpoint(tmp_path / "m", TIED, state | {"lm_head.weight": state["embed_tokens.weight"]})
    assert "lm_head.weight" not in load_file(path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="differs"):
        save_checkpoint(tmp_path / "n", TIED, state | {"lm_head.weight": torch.zeros(64, 32)})
    assert not (tmp_path / "n").exists()


def test_a_state_that_is_not_the_configs_is_refused(tmp_path):
    state = random_state(TINY)
    state["layers.9.extra"] = torch.zeros(1)
    state["norm.weight"] = torch.zeros(31)
    del state["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight missing; layers\.9\.extra unexpected; norm\.weight of"):
        save_checkpoint(tmp_path / "m", TINY, state)
    with pytest.raises(CheckpointError, match="float64"):
        save_checkpoint(tmp_path / "m", TINY, random_state(TINY, torch.float64))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../tokenizer.json", "config.json", "x/y", "", "..", "a.safetensors", INDEX_FILE])
def test_a_text_file_name_that_would_do_harm_is_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match="text file name"):
        save_checkpoint(tmp_path / "m", TINY, random_state(TINY), text_files={name: b""})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_empty_is_kept_unless_told(tmp_path):
    place = tmp_path / "m"
    place.mkdir()
    save_checkpoint(place, TINY, random_state(TINY))  # empty: fine
    before = contents(place)
    with pytest.raises(CheckpointError, match="not empty"):
        save_checkpoint(place, TINY, random_state(TINY))
    assert contents(place) == before
    state = random_state(TIED)
    (place / "stale.txt").write_text("old")
    save_checkpoint(place, TIED, state, overwrite=True)
    assert_same(loaded(place), state)
    assert not (place / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with pytest.raises(CheckpointError, match="is a file"):
        save_checkpoint(place / "config.json", TINY, random_state(TINY))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def full_disk(*_args, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", ["first shard", "second shard", "config", "rename"])
def test_a_full_disk_changes_nothing(failing, tmp_path, monkeypatch):
    place = save_checkpoint(tmp_path / "m", TINY, random_state(TINY))
    before = contents(place)
    if failing == "rename":
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda self, to: full_disk() if self.name == "new" else rename(self, to))
    elif failing == "config":
        monkeypatch.setattr(checkpoint_module, "write_bytes", full_disk)
    else:
        write_file, calls = safetensors_files.save_file, []

        def sometimes(*args, **options):
            calls.append(args)
            if len(calls) == (1 if failing == "first shard" else 2):
                full_disk()
            write_file(*args, **options)

        monkeypatch.setattr(safetensors_files, "save_file", sometimes)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(place, TINY, random_state(TINY), max_shard_bytes=20_000, overwrite=True)
    monkeypatch.undo()
    assert contents(place) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]  # no half-written directory stays


def test_an_interrupt_while_saving_changes_nothing(tmp_path, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "write_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "m", TINY, random_state(TINY))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="writable"):
        save_checkpoint(tmp_path / "file" / "m", TINY, random_state(TINY))


def test_saving_over_the_directory_that_was_loaded(tmp_path):
    """Weights read from a directory may still be mapped from it while it is replaced."""
    state = random_state(TINY)
    place = save_checkpoint(tmp_path / "m", TINY, state)
    save_checkpoint(place, TINY, loaded(place), overwrite=True)
    assert_same(loaded(place), state)
