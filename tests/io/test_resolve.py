"""Names to places: what is found, in which order, and what is said when nothing is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from microllm.errors import ModelNotFoundError
from microllm.io import resolve
from microllm.io.resolve import ModelSource, resolve_model


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch) -> Path:
    """Give every test an empty Hugging Face cache, an empty working directory and a demo that is not fetched."""
    hub, work = tmp_path / "hub", tmp_path / "work"
    hub.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(resolve, "fetch_demo", lambda offline: Path(f"demo-offline-{offline}"))
    return hub


def directory(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in files:
        (path / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
    return path


def cached(hub: Path, repository: str, revision: str = "abc123", *, main: str | None = None) -> Path:
    folder = hub / f"models--{repository.replace('/', '--')}"
    if main is not None:
        directory(folder / "refs")
        (folder / "refs" / "main").write_text(main)
    return directory(folder / "snapshots" / revision, "config.json")


@pytest.mark.parametrize("name", ["demo", "Demo", "SmolLM2-135M-Instruct"])
def test_demo_names(name, tmp_path):
    directory(tmp_path / "work" / "demo", "config.json")
    assert resolve_model(name) == ModelSource("demo", Path("demo-offline-False"), "gguf")
    assert resolve_model(name, offline=True).path == Path("demo-offline-True")
    assert resolve_model("./demo").kind == "directory"


def test_directory_and_file(tmp_path, monkeypatch):
    model = directory(tmp_path / "model", "config.json", "weights.gguf", "more.gguf")
    assert resolve_model(str(model)) == ModelSource(str(model), model, "directory")
    assert resolve_model(str(model / "more.gguf")) == ModelSource(str(model / "more.gguf"), model / "more.gguf", "gguf")
    (model / "no-suffix").write_bytes(b"GGUF....")
    assert resolve_model(str(model / "no-suffix")).kind == "gguf"
    (model / "damaged.gguf").write_bytes(b"")
    assert resolve_model(str(model / "damaged.gguf")).kind == "gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model").path == model


def test_directory_with_one_gguf(tmp_path):
    model = directory(tmp_path / "model", "only.gguf", "tokenizer.json")
    assert resolve_model(str(model)) == ModelSource(str(model), model / "only.gguf", "gguf")
    directory(model, "second.gguf")
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files \(only\.gguf, second\.gguf\); need config\.json"):
        resolve_model(str(model))
    with pytest.raises(ModelNotFoundError, match=r"no config\.json and no GGUF file"):
        resolve_model(str(directory(tmp_path / "empty")))


def test_files_that_are_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    with pytest.raises(ModelNotFoundError, match=r"which is no GGUF; .*\(for safetensors name the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelNotFoundError, match="which is no GGUF"):
        resolve_model(str(tmp_path / "pipe"))


@pytest.mark.parametrize("name", ["", "  ", "a" * 5000, "bad\0name", "~nobody-of-that-name/x", "a/b/c", "../none"])
def test_names_that_can_be_nothing(name):
    with pytest.raises(ModelNotFoundError, match="need 'demo', a directory with"):
        resolve_model(name)


def test_place_that_may_not_be_read(tmp_path, monkeypatch):
    model = directory(tmp_path / "model", "only.gguf")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ModelNotFoundError):
        resolve_model(str(tmp_path / "loop"))

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)  # root reads everything, so chmod would prove nothing
    with pytest.raises(ModelNotFoundError, match="got Permission denied for model"):
        resolve_model(str(model))


def test_hugging_face_cache(hub):
    snapshot = cached(hub, "org/name", main="abc123\n")
    cached(hub, "org/name", "older")
    assert resolve_model("org/name") == ModelSource("org/name", snapshot, "directory")
    assert resolve_model("plain" if cached(hub, "plain") else "").kind == "directory"  # no refs/main, one snapshot
    cached(hub, "org/many", "one")
    cached(hub, "org/many", "two", main="../../elsewhere")
    with pytest.raises(ModelNotFoundError, match=r"2 snapshots and no usable refs/main"):
        resolve_model("org/many")
    directory(hub / "models--org--cut" / "snapshots" / "rev")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json and no GGUF"):
        resolve_model("org/cut")


def test_a_path_comes_before_the_cache(hub, tmp_path):
    cached(hub, "org/name")
    directory(tmp_path / "work" / "org" / "name", "config.json")
    assert resolve_model("org/name").path == Path("org/name")


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"HF_HUB_CACHE": "{}/a"}, "a"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "{}/b"}, "b/hub"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "", "XDG_CACHE_HOME": "{}/c"}, "c/huggingface/hub"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "", "XDG_CACHE_HOME": "", "HOME": "{}"}, ".cache/huggingface/hub"),
    ],
)
def test_where_the_cache_lies(tmp_path, monkeypatch, variables, want):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    snapshot = cached(tmp_path / want, "org/name")
    assert resolve_model("org/name").path == snapshot


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("dmeo", "demo"),
        ("smollm2-135m", "smollm2-135m-instruct"),
        ("qwen/qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
        ("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("models/tiny-lama", "models/tiny-llama"),
        ("models/tiny", "models/tiny.gguf"),
    ],
)
def test_near_names_are_suggested(hub, tmp_path, name, near):
    cached(hub, "Qwen/Qwen2.5-0.5B")
    directory(tmp_path / "work" / "models" / "tiny-llama")
    directory(tmp_path / "work" / "models", "tiny.gguf", "notes.txt")
    with pytest.raises(ModelNotFoundError, match="did you mean") as caught:
        resolve_model(name)
    assert near in str(caught.value).split("did you mean ")[1].removesuffix("?").split(" or ")


def test_nothing_near_suggests_nothing():
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("zzzzzzzz")
    assert "did you mean" not in str(caught.value)
