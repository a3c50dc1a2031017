"""The packed pass: a packed row is its documents alone, and gradients do not depend on how a step is cut."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from microllm import ops
from microllm.config import preset
from microllm.model import Transformer
from microllm.ops.cross_entropy import IGNORE
from microllm.training import TrainConfig
from microllm.training.build import build
from microllm.training.dataset import Dataset, Rows, open_index
from microllm.training.network import Copies, TrainNetwork
from microllm.training.passes import Passes
from microllm.training.ranks import Ranks

CPU = Ranks(0, 1, torch.device("cpu"))
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
}


def network(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = preset("tiny", vocab_size=61, hidden_size=32, intermediate_size=48, head_dim=8, **changes)
    model = Transformer(config).initialise(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    copies = Copies(dtype)
    net = TrainNetwork(model, copies, {})
    copies.make(net.parameters())
    return model, net


def rows_of(documents, *, weight):
    ids = torch.cat(documents)
    targets = torch.cat([torch.cat((d[1:], torch.tensor([IGNORE]))) for d in documents])
    lengths = [len(d) for d in documents]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), len(ids)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Rows(ids, targets, positions, starts, (targets != IGNORE).float() * weight, max(lengths))


def documents(count=4):
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(61, (n,), generator=draw) for n in (7, 1, 12, 5)[:count]]


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def distance(a, b):
    return {name: ((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-6)).item() for name in b}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_documents_run_alone(family):
    model, net = network(**FAMILIES[family])
    docs = documents()
    net(rows_of(docs, weight=0.1)).backward()
    packed = gradients(model)
    loss = torch.zeros(())
    for document in docs:  # the model's own forward pass and torch's loss
        logits = model(document[None])[0]
        loss = loss + 0.1 * functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
    loss.backward()
    assert net(rows_of(docs, weight=0.1)).item() == pytest.approx(loss.item(), rel=1e-6)
    alone = gradients(model)
    noise = {n for n in alone if alone[n].norm() < 1e-4}  # a K bias has no gradient but rounding
    assert noise <= {f"layers.{i}.self_attn.k_proj.bias" for i in range(2)}
    assert max(d for n, d in distance(packed, alone).items() if n not in noise) < 1e-5
    net.eval()
    for start, document in zip((0, 7, 8, 20), docs, strict=True):
        part = net(rows_of([document], weight=1.0), last_logits=True)
        until = rows_of([d for d, s in zip(docs, (0, 7, 8, 20), strict=True) if s <= start], weight=1.0)
        assert torch.allclose(net(until, last_logits=True), part, atol=1e-6)


def test_plain_torch_level_gives_the_same_gradients():
    model, net = network()
    net(rows_of(documents(), weight=0.1)).backward()
    best = gradients(model)
    with ops.use("reference"):
        net(rows_of(documents(), weight=0.1)).backward()
    assert max(distance(best, gradients(model)).values()) < 1e-5


def test_recompute_gives_the_same_gradients():
    model, net = network()
    net(rows_of(documents(), weight=0.1)).backward()
    kept = gradients(model)
    net.recompute = True
    net(rows_of(documents(), weight=0.1)).backward()
    assert max(distance(kept, gradients(model)).values()) == 0


def test_bf16_copies_give_fp32_gradients_near_fp32s():
    model, net = network(**FAMILIES["qwen2"])
    net(rows_of(documents(), weight=0.1)).backward()
    exact = gradients(model)
    model, net = network(torch.bfloat16, **FAMILIES["qwen2"])
    net(rows_of(documents(), weight=0.1)).backward()
    low = gradients(model)
    assert {g.dtype for g in low.values()} == {torch.float32}
    far = {n: d for n, d in distance(low, exact).items() if not n.endswith("k_proj.bias")}
    assert max(far.values()) < 0.05
    assert not all(d == 0 for d in far.values())


def test_a_tied_gradient_makes_no_second_table():
    model, net = network(**FAMILIES["qwen2"])
    made = []
    table = tuple(model.embed_tokens.weight.shape)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and tuple(out.shape) == table and out._base is None:
                made.append((str(func), out.untyped_storage().data_ptr()))
            return out

    loss = net(rows_of(documents(), weight=0.1))
    with Watch():
        loss.backward()
    ours = model.embed_tokens.weight.grad.untyped_storage().data_ptr()
    assert {pointer for _, pointer in made} <= {ours}, made
    assert model.lm_head is None


def split(config, index, micro_rows, step=0):
    built = build(config, index, CPU, lambda: None)
    data = Dataset(index, "train", config.row_tokens)
    rows = data.rows_of_step(step, config.batch_rows, config.seed)
    batches = [data.batch(rows[i : i + micro_rows], micro_rows) for i in range(0, len(rows), micro_rows)]
    count = sum(int((b.targets_N != IGNORE).sum()) for b in batches)
    scaled = [b._replace(weights_N=b.weights_N / count) for b in batches]
    loss, norm = Passes(config, built, CPU).run(scaled)
    return loss, norm, {name: p.grad for name, p in built.parameters.items()}


@pytest.mark.parametrize("micro_rows", [8, 3, 1])  # 3: the last micro-batch is short
def test_accumulation_changes_no_gradient(micro_rows, packed, tmp_path):
    config = TrainConfig(data=packed, output=tmp_path, model="tiny", batch_rows=16, row_tokens=32, device="cpu")
    index = open_index(packed)
    loss, norm, whole = split(config, index, 16)
    other_loss, other_norm, parts = split(config, index, micro_rows)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert other_norm == pytest.approx(norm, rel=1e-6)
    assert max(distance(parts, whole).values()) <= 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at all it is given
def test_compiled_blocks_give_the_same_gradients(packed, tmp_path):
    from dataclasses import replace

    config = TrainConfig(data=packed, output=tmp_path, model="tiny", batch_rows=4, row_tokens=32, device="cpu")
    index = open_index(packed)
    loss, _, eager = split(config, index, 4)
    compiled_loss, _, compiled = split(replace(config, compile=True), index, 4)
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert max(distance(compiled, eager).values()) <= 1e-5
