"""A whole model under torch.compile: one graph, the same logits and gradients, whatever the length."""

import pytest
import torch

from microllm import ops
from microllm.config import preset
from microllm.model import Transformer


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_compiles_to_one_graph_with_its_gradients(family):
    torch.compiler.reset()
    config = preset("tiny", family=family, qk_norm=family == "qwen3", num_hidden_layers=1)
    model = Transformer(config).initialise(seed=0)
    ids = torch.randint(model.config.vocab_size, (2, 7))

    def loss(ids):
        h = model(ids)
        return ops.cross_entropy(h[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    want = torch.autograd.grad(loss(ids), list(model.parameters()))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(ids), list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert compiled(ids[:, :5]).item() == pytest.approx(loss(ids[:, :5]).item(), rel=1e-6)
