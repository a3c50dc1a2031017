"""The catalog and the bindings as documents: digests, versions, dims, coverage; and hosts that they fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
import yaml

from microllm.errors import StructureError
from microllm.structures.binding import BINDINGS, CLASSES, load_bindings, read_binding
from microllm.structures.host import find_host
from microllm.structures.structure import CATALOG, evaluate, load_catalog
from tiny_hosts import FAMILIES, make_host

NAMES = {
    "attention_core", "autoregressive_decode_pipeline", "decoder_block", "decoder_ffn", "linear_proj", "lm_head",
    "qk_norm_rope", "qkv_pack", "qkv_rope", "residual_norm",
}  # fmt: skip


def test_the_catalog_is_whole_and_its_bytes_are_pinned():
    catalog = load_catalog()
    assert set(catalog.names()) == NAMES
    pinned = json.loads((CATALOG / "digests.json").read_text())
    changed = {s.id for s in catalog.all() if pinned.get(s.id) != s.digest}
    assert not changed, f"{changed}: a structure's bytes changed; give it a new version beside the old one"
    assert set(pinned) == {s.id for s in catalog.all()}
    for structure in catalog.all():
        if structure.kind == "region":
            assert callable(structure.reference)
            assert structure.gates["parity"]["metrics"] == ["cosine", "max_abs"]


def test_names_and_versions_that_are_not_there_are_refused_with_what_is():
    catalog = load_catalog()
    for name, words in [("ffn", "need one of attention_core"), ("lm_head@7", "lm_head@1"), ("lm_head@x", "lm_head@1")]:
        with pytest.raises(StructureError, match=words):
            catalog.get(name)
    with pytest.raises(StructureError, match="eager run"):
        _ = catalog.get("autoregressive_decode_pipeline").reference


def copied(tmp_path, name, folder=None, **changes):
    target = tmp_path / (folder or name)
    shutil.copytree(CATALOG / name, target)
    document = yaml.safe_load((target / "structure.yaml").read_text()) | changes
    (target / "structure.yaml").write_text(yaml.safe_dump({k: v for k, v in document.items() if v is not None}))


def test_two_versions_stand_side_by_side(tmp_path):
    copied(tmp_path, "decoder_ffn", "decoder_ffn@2", version=2, description="another boundary")
    catalog = load_catalog([tmp_path])
    assert catalog.get("decoder_ffn").version == 2
    assert catalog.get("decoder_ffn@1").digest == load_catalog().get("decoder_ffn").digest
    assert catalog.get("decoder_ffn@2").digest != catalog.get("decoder_ffn@1").digest
    assert load_bindings(catalog)[0].regions  # bindings pin the version that they were qualified with
    assert {r.structure.id for b in load_bindings(catalog) for r in b.regions if r.structure.name == "decoder_ffn"} == {
        "decoder_ffn@1"
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"structure": "other"}, "need a name"), ({"version": "two"}, "a whole version"),
        ({"reference": None}, "no reference"), ({"kind": "wish"}, "kind 'wish'"),
        ({"boundary": {"symbolic_dims": ["M"], "inputs": [{"name": "x", "dims": ["Q"]}]}}, "symbolic_dims"),
        ({"description": None}, "no structure"), ({"version": 1}, "twice"),
        ({"weights": [{"slot": "w", "dims": ["3**D"]}]}, "need symbols"),
    ],
    ids=["name", "version", "reference", "kind", "symbols", "key", "twice", "expression"],
)  # fmt: skip
def test_malformed_structures_are_refused(tmp_path, changes, words):
    copied(tmp_path, "decoder_ffn", **{"version": 9} | changes)
    with pytest.raises(StructureError, match=words):
        load_catalog([tmp_path])


def test_dims_are_evaluated_and_checked():
    sizes = {"H": 4, "G": 2, "K": 16}
    assert evaluate("(H + 2*G) * K", sizes) == 128
    assert evaluate("K // 2 - 1", sizes) == 7
    assert evaluate("H * Z", sizes) is None
    for bad in ("__import__('os')", "H ** 2", "H.x", "1.5 * H", "H +", "f(H)"):
        with pytest.raises(StructureError, match="dim"):
            evaluate(bad, sizes)
    structure = load_catalog().get("qkv_pack")
    w = {"w_q": torch.zeros(8, 4), "w_k": torch.zeros(2, 4), "w_v": torch.zeros(2, 4)}
    assert structure.check_weights(w, "here") == {"N": 8, "D": 4, "J": 2}
    for change, words in [
        ({"w_v": torch.zeros(3, 4)}, "J = 2"), ({"w_v": torch.zeros(2)}, "2 dims"),
        ({"w_z": torch.zeros(1)}, "unknown"),
    ]:  # fmt: skip
        with pytest.raises(StructureError, match=words):
            structure.check_weights(w | change, "here")
    with pytest.raises(StructureError, match=r"missing \['w_k'\]"):
        structure.check_weights({n: t for n, t in w.items() if n != "w_k"}, "here")
    block = load_catalog().get("decoder_block")
    with pytest.raises(StructureError, match=r"H\*K = 8"):
        block._check("slot", block.weights[1:2], {"w_q": torch.zeros(9, 4)}, {"H": 2, "K": 4}, "here")


# ---- bindings


@pytest.mark.parametrize("family", FAMILIES)
def test_a_host_is_found_by_what_it_holds(family):
    model = make_host(family)
    type(model).__name__ = "Nameless"  # no evidence
    model.config.model_type = "none"
    try:
        host = find_host(model, load_bindings(load_catalog()))
        assert host.binding.name == f"transformers-{family}"
        assert (host.stack_path, len(host.layers), host.num_kv_heads) == ("model", 2, 2)
        wrapped = torch.nn.ModuleDict({"inner": model})
        assert find_host(wrapped, load_bindings(load_catalog())).stack_path == "inner.model"
    finally:
        type(model).__name__ = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"


def test_a_model_of_another_shape_is_refused_with_what_it_lacks():
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    with pytest.raises(StructureError, match="no binding fits"):
        find_host(transformers.AutoModelForCausalLM.from_config(config), load_bindings(load_catalog()))
    model = make_host("llama")
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(StructureError, match=r"block 1 has no mlp.up_proj.weight"):
        find_host(model, load_bindings(load_catalog()))


def test_manifests_are_json_and_classify_every_hot_segment():
    for binding in load_bindings(load_catalog()):
        manifest = json.loads(json.dumps(binding.manifest()))
        pipeline = manifest["pipeline"]
        assert [s["name"] for s in pipeline["segments"]] == pipeline["hot_path"]
        assert {s["classification"] for s in pipeline["segments"]} <= set(CLASSES)
        assert manifest["structures"]["decoder_ffn@1"] == load_catalog().get("decoder_ffn").digest


def edit(*path, value):
    def change(document):
        for key in path[:-1]:
            document = document[key]
        if value is None:
            del document[path[-1]]
        else:
            document[path[-1]] = value

    return change


SEGMENTS = ("pipeline", "coverage", "segments")
BROKEN = {
    "another name": (edit("binding", value="x"), "file's name"),
    "unknown key": (edit("mood", value="good"), "mood"),
    "protocol": (edit("host", "protocol", value="telepathy"), "protocol"),
    "missing slot": (edit("regions", 2, "weights", "w_q", value=None), r"without \['w_q'\]"),
    "unknown slot": (edit("regions", 2, "weights", "w_z", value="z"), r"with \['w_z'\]"),
    "missing point": (edit("regions", 2, "points", value={}), "differ"),
    "unknown structure": (edit("regions", 2, "structure", value="magic"), "need one of"),
    "version": (edit("regions", 2, "structure", value="qkv_pack@2"), "qkv_pack@1"),
    "pipeline as region": (edit("regions", 2, "structure", value="autoregressive_decode_pipeline"), "as a region"),
    "scope": (edit("regions", 2, "scope", value="galaxy"), "scope"),
    "no stage": (edit("pipeline", "stages", "decode", value=None), "got stages"),
    "unknown stage": (edit("pipeline", "stages", "dream", value={}), "got stages"),
    "contract": (edit("pipeline", "coverage", "contract", value="best effort"), "complete_hot_path"),
    "no hot path": (edit("pipeline", "coverage", "hot_path", value=[]), "complete_hot_path"),
    "unclassified": (edit("pipeline", "coverage", "hot_path", 0, value="mystery"), r"unclassified \['mystery'\]"),
    "twice": (edit(*SEGMENTS, 1, "name", value="embedding"), "twice"),
    "classification": (edit(*SEGMENTS, 0, "classification", value="luck"), "classification"),
    "segment's stage": (edit(*SEGMENTS, 0, "stage", value="dream"), "need stage"),
    "segment's key": (edit(*SEGMENTS, 0, "why", value="x"), "need stage"),
    "structure without": (edit(*SEGMENTS, 2, "structures", value=[]), "need them of a structure"),
    "host stage with": (edit(*SEGMENTS, 0, "structures", value=["lm_head"]), "of nothing else"),
    "control with": (edit(*SEGMENTS, 14, "structures", value=["lm_head"]), "of nothing else"),
    "structure twice": (edit(*SEGMENTS, 2, "structures", value=["lm_head", "lm_head"]), "once"),
    "embedded pipeline": (edit(*SEGMENTS, 2, "structures", value=["autoregressive_decode_pipeline"]), "embeds"),
    "no document": (lambda document: document.clear(), "no binding"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_malformed_bindings_are_refused_by_name(tmp_path, broken):
    change, words = BROKEN[broken]
    document = yaml.safe_load((BINDINGS / "transformers-llama.yaml").read_text())
    change(document)
    path = tmp_path / "transformers-llama.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(StructureError, match=words):
        read_binding(path, load_catalog())
