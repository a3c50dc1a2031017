"""A structure, a binding, an implementation and a scheme from a folder: found, bound and judged like the package's."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

from microllm import structures
from microllm.errors import StructureError
from microllm.structures.schemes import Decision, region_key
from tiny_hosts import make_host

STRUCTURE = """
structure: relu_ffn
version: 1
description: A network of two matrices and ReLU between them.
reference: {module: reference.py, entrypoint: reference}
boundary:
  symbolic_dims: [M, D]
  inputs: [{name: x, dims: [M, D]}]
  outputs: [{name: y, dims: [M, D]}]
weights:
  - {slot: w_in, dims: ["4*D", D]}
  - {slot: w_out, dims: [D, "4*D"]}
calibration: {points: [x]}
gates: {parity: {metrics: [cosine, max_abs]}}
"""
REFERENCE = """
from torch.nn import functional


def reference(inputs, weights, constants):
    hidden = functional.relu(functional.linear(inputs["x"], weights["w_in"]))
    return {"y": functional.linear(hidden, weights["w_out"])}
"""
BINDING = """
binding: my-host
host: {package: mine, tested: [1], protocol: transformers}
stack: {layers: layers, embed: embed_tokens, norm: norm, rotary: rotary_emb}
head: lm_head
has: {mlp.fc_in: true}
constants: {head_dim: self_attn.head_dim, scale: self_attn.scaling, eps: input_layernorm.variance_epsilon}
regions:
  - structure: relu_ffn@1
    scope: layer
    sites: [mlp]
    weights: {w_in: fc_in.weight, w_out: fc_out.weight}
    points: {x: .}
  - structure: residual_norm@1
    scope: layer
    sites: [input_layernorm]
    weights: {w: weight}
    constants: {eps: variance_epsilon}
    points: {x: .}
"""
IMPL = """
from torch.nn import functional
from microllm.structures.impls import Impl


def bind(region):
    w_in, w_out = region.weights["w_in"], region.weights["w_out"]
    return lambda x: functional.linear(functional.relu(functional.linear(x, w_in)), w_out) * FACTOR


FACTOR = 1.0
IMPLS = (Impl("mine", "relu_ffn", ("float",), bind),)
"""


class ReluFfn(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.fc_out(functional.relu(self.fc_in(x)))


class OnlyMine:
    """Binds the structure of its own, and keeps the rest."""

    name = "only_mine"

    def statistics(self, points):
        return {}

    def decide(self, report):
        return {region_key(c): Decision(True, "mine") for c in report.candidates if c.structure.name == "relu_ffn"}


@pytest.fixture
def folders(tmp_path):
    files = {
        "catalog/relu_ffn/structure.yaml": STRUCTURE, "catalog/relu_ffn/reference.py": REFERENCE,
        "bindings/my-host.yaml": BINDING, "impls/mine.py": IMPL,
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def make(folders, **others):
    model = make_host("llama")
    for layer in model.model.layers:
        layer.mlp = ReluFfn().eval().requires_grad_(False)
    config = structures.AttachConfig(
        catalog=[folders / "catalog"], bindings=[folders / "bindings"], impls=[folders / "impls"],
        store=folders / "store", **others,
    )  # fmt: skip
    return model, config


def test_all_four_come_from_a_folder_and_pass_the_same_gates(folders):
    model, config = make(folders)
    ids = torch.arange(16)[None]
    own = model(ids).logits
    plan = structures.attach(model, lambda: model(ids), scheme=OnlyMine(), min_speedup=0, config=config)
    assert plan.host.binding.name == "my-host"
    assert [seat.path for seat in plan.seats] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert {phase.phase for phase in plan.union.phases} == {"prefill", "decode_1", "decode_8"}
    assert all(phase.passed and phase.gate.control_moved for phase in plan.union.phases)
    assert torch.allclose(model(ids).logits, own, atol=1e-5)
    assert plan.summary()["clean"]
    assert plan.receipt.body["structures"]["relu_ffn@1"] == config.load_catalog().get("relu_ffn").digest
    assert plan.build.kept == {
        f"residual_norm|model.layers.{i}.input_layernorm": "only_mine says nothing of it" for i in range(2)
    }
    plan.detach()
    assert torch.equal(model(ids).logits, own)
    x = torch.randn(3, 64)
    bound = structures.get("relu_ffn", config).bind(model.model.layers[0].mlp, [x], config=config)
    assert torch.allclose(bound(x), model.model.layers[0].mlp(x), atol=1e-5)


def test_an_implementation_that_is_wrong_is_refused_by_the_reference(folders):
    (folders / "impls" / "mine.py").write_text(IMPL.replace("* FACTOR", "+ x"))
    model, config = make(folders)
    plan = structures.auto_swaps(model, lambda: model(torch.arange(9)[None]), scheme=OnlyMine(), config=config)
    assert plan.seats == []
    assert all("with its reference" in r.reason for r in plan.build.refused)
    with pytest.raises(StructureError, match="need seats"):
        plan.activate()


def test_files_that_lack_what_they_must_define_are_refused(folders):
    (folders / "impls" / "mine.py").write_text("x = 1\n")
    model, config = make(folders)
    with pytest.raises(StructureError, match="IMPLS"):
        structures.auto_swaps(model, lambda: model(torch.arange(9)[None]), scheme=OnlyMine(), config=config)
    (folders / "catalog" / "relu_ffn" / "reference.py").unlink()
    with pytest.raises(StructureError, match="no reference"):
        config.load_catalog()
