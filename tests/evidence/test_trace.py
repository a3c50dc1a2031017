"""Recording: what is captured, under which name, at what cost, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from microllm.errors import EvidenceError
from microllm.evidence.tensor_statistics import CHUNK, chunks, tensor_statistics
from microllm.evidence.trace import ROOT, Trace, load_trace, main_input, main_output, record, site_matcher


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.shared = nn.Linear(8, 8)

    def forward(self, *, mask, hidden_states):
        return mask.sum(), self.shared(self.shared(hidden_states))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.model.embed.weight

    def forward(self, ids):
        x = self.model.embed(ids)
        _, x = self.model(mask=torch.ones(3, dtype=torch.bool), hidden_states=x)
        logits = self.head(x)
        return {"loss": logits.mean(), "logits": logits}


@pytest.fixture
def outer():
    return Outer()


@pytest.fixture
def ids():
    return torch.tensor([[1, 2, 3], [4, 5, 6]])


def hooks_left(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


class TestSites:
    def test_names_order_and_occurrences(self, outer, ids):
        with record(outer, keep="whole") as trace:
            result = outer(ids)
        assert [(r.kind, r.site, r.occurrence) for r in trace.records] == [
            ("input", ROOT, 0), ("input", "embed", 0), ("output", "embed", 0), ("input", "model", 0),
            ("input", "shared", 0), ("output", "shared", 0), ("input", "shared", 1), ("output", "shared", 1),
            ("output", "model", 0), ("input", "head", 0), ("output", "head", 0), ("output", ROOT, 0),
        ]  # fmt: skip
        # token ids where there is nothing else; activations before masks and scalars; logits, not the loss
        assert torch.equal(trace.find("input", ROOT).values, ids)
        assert trace.find("input", "model").shape == (2, 3, 8)
        assert trace.find("output", "model").shape == (2, 3, 8)
        assert torch.equal(trace.find("output", ROOT).values, result["logits"])
        second = trace.find("output", "shared", 1)
        assert torch.equal(second.values, trace.find("output", "model").values)
        assert trace.find("output", "shared", 2) is None

    @pytest.mark.parametrize(
        ("patterns", "site", "expected"),
        [
            (["layers.*"], "layers.3", True),
            (["layers.*"], "layers.3.mlp", False),
            (["layers.**"], "layers.3.mlp.up_proj", True),
            (["layers.*.mlp.*_proj"], "layers.3.mlp.up_proj", True),
            (["norm", "layers.1?"], "layers.12", False),
            ([], "norm", False),
            (None, "anything", True),
            (lambda site: site.endswith("norm"), "layers.0.input_layernorm", True),
        ],
    )
    def test_patterns(self, patterns, site, expected):
        assert site_matcher(patterns)(site) is expected

    def test_a_string_is_no_list_of_patterns(self):
        with pytest.raises(EvidenceError, match="list of patterns"):
            site_matcher("layers.*")

    def test_no_match_and_clashing_names_are_refused(self, outer):
        with pytest.raises(EvidenceError, match="match no module"), record(outer, sites=["layers.*"]):
            pass
        outer.shared = nn.Linear(8, 8)  # beside model.shared
        with pytest.raises(EvidenceError, match="two modules"), record(outer):
            pass
        with record(outer, prefix_strip="") as trace:
            outer(torch.tensor([[1]]))
        assert trace.find("output", "model.shared", 1)

    def test_main_tensors(self):
        mask, x, ids = torch.ones(3, dtype=torch.bool), torch.ones(2), torch.tensor([1])
        assert main_input((ids, mask), {"x": x})[0] == "x"
        assert main_input((None, x), {"y": x})[0] == 1
        assert main_input((ids,), {"mask": mask})[0] == 0
        assert main_input((3,), {"text": "a"}) is None
        assert main_output((None, (torch.tensor(1.0), x))) is x
        assert main_output([torch.tensor(1.0)]).ndim == 0
        assert main_output("text") is None


class TestNothingStays:
    def test_after_an_exception_and_when_nested(self, outer, ids):
        with contextlib.suppress(RuntimeError), record(outer) as broken:
            outer(ids)
            raise RuntimeError
        assert hooks_left(outer) == 0
        assert broken.find("output", "head")
        with record(outer) as wide:
            with record(outer, sites=["head"]) as narrow:
                outer(ids)
            outer(ids)
        assert hooks_left(outer) == 0
        assert [r.occurrence for r in wide.records if r.site == "head" and r.kind == "output"] == [0, 1]
        assert [r.occurrence for r in narrow.records if r.kind == "output"] == [0]

    def test_gradient_hooks_go_too(self, outer, ids):
        with record(outer, gradients=True) as trace:
            loss = outer(ids)["loss"]
        loss.backward()
        assert not any(r.kind == "activation_gradient" for r in trace.records)

    def test_the_result_is_untouched(self, outer, ids):
        expected = outer(ids)["logits"]
        for keep in ("stats", "sample", "whole"):
            with record(outer, keep=keep, gradients=True):
                assert torch.equal(outer(ids)["logits"], expected)


class TestKeep:
    def test_stats_keeps_no_values(self, outer, ids):
        with torch.inference_mode(), record(outer.bfloat16()) as trace:
            outer(ids)
        found = trace.find("output", "head")
        assert (found.values, found.dtype, found.shape, found.device) == (None, "bfloat16", (2, 3, 11), "cpu")

    def test_samples_are_bounded_deterministic_and_spread(self):
        wide = nn.Linear(4, 4096)
        x = torch.randn(64, 4)
        samples = []
        for _ in range(2):
            with torch.no_grad(), record(wide, keep="sample", sample_size=512) as trace:
                y = wide(x)
            samples.append(trace.find("output", ROOT).values)
        assert torch.equal(*samples)
        assert samples[0].shape == (512,)
        assert not trace.find("output", ROOT).complete
        assert trace.find("input", ROOT).complete  # 256 elements fit whole
        places = torch.isin(y.reshape(-1), samples[0]).nonzero().flatten()
        assert len(places) >= 512
        assert len((places % 4096).unique()) > 400  # an even stride would meet one column only
        assert len((places // 4096).unique()) == 64

    def test_whole_is_a_copy(self):
        class Overwrites(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Identity()

            def forward(self, x):
                return self.inner(x).mul_(0)

        x = torch.ones(5)
        module = Overwrites()
        with record(module, keep="whole") as trace:
            module(x)
        assert torch.equal(trace.find("output", "inner").values, torch.ones(5))
        assert torch.equal(trace.find("output", ROOT).values, torch.zeros(5))

    def test_a_bad_sample_size(self):
        with pytest.raises(EvidenceError, match="sample_size=0"):
            Trace("sample", 0)


class TestStatistics:
    def test_pinned(self):
        found = tensor_statistics(torch.tensor([[3.0, -4.0], [math.nan, math.inf]]))
        assert (found.numel, found.finite_count, found.minimum, found.maximum) == (4, 2, -4.0, 3.0)
        assert (found.mean, found.l2_norm, found.all_finite) == (-0.5, 5.0, False)

    def test_no_finite_element(self):
        found = tensor_statistics(torch.tensor([math.nan]))
        assert found.finite_count == 0
        assert math.isnan(found.mean)
        assert tensor_statistics(torch.empty(0, 4)).numel == 0

    def test_integers_and_booleans(self):
        assert tensor_statistics(torch.tensor([2**40, 1])).maximum == 2**40
        assert tensor_statistics(torch.tensor([True, False])).mean == 0.5

    def test_pieces_follow_the_order_whatever_the_layout(self):
        base = torch.arange(3 * CHUNK, dtype=torch.int32).reshape(1, 3, -1)
        for tensor in (base, base.transpose(1, 2), base[:, :, ::2], base.reshape(-1)[5:]):
            pieces = list(chunks(tensor))
            assert max(p.numel() for p in pieces) <= CHUNK
            assert torch.equal(torch.cat(pieces), tensor.reshape(-1))

    def test_sums_are_wide(self):
        tensor = torch.full((3 * CHUNK,), 0.1, dtype=torch.float32)
        assert tensor_statistics(tensor).mean == pytest.approx(float(torch.tensor(0.1)), rel=1e-14)


class TestTraining:
    def step(self, outer, ids, steps=2):
        optimizer = torch.optim.AdamW(outer.parameters(), lr=0.01)
        with record(outer, keep="whole", gradients=True) as trace:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = outer(ids)["loss"]
                trace.add("loss", "loss", loss)
                loss.backward()
                trace.add_gradients(outer)
                optimizer.step()
            trace.add_optimizer(outer, optimizer)
        return trace, optimizer

    def test_everything_is_there_once(self, outer, ids):
        trace, optimizer = self.step(outer, ids)
        names = {"embed.weight", "shared.weight", "shared.bias"}  # head.weight is tied: listed once
        assert {r.site for r in trace.records if r.kind == "parameter"} == names
        gradients = [r for r in trace.records if r.kind == "gradient"]
        assert sorted((r.site, r.occurrence) for r in gradients) == sorted((n, k) for n in names for k in (0, 1))
        assert {r.site for r in trace.records if r.kind == "optimizer"} == {
            f"{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")
        }
        weight = outer.model.shared.weight
        assert torch.equal(trace.find("optimizer", "shared.weight.exp_avg").values, optimizer.state[weight]["exp_avg"])
        assert torch.equal(trace.find("gradient", "shared.weight", 1).values, weight.grad)
        assert trace.find("loss", "loss", 1).shape == ()

    def test_activation_gradients_against_autograd(self, outer, ids):
        trace, _ = self.step(outer, ids, steps=1)
        found = trace.find("activation_gradient", "head")
        assert torch.equal(found.values, torch.full((2, 3, 11), 1 / 66))
        # of the module called twice, each call keeps its own number, though backward meets the last one first
        order = [r.occurrence for r in trace.records if r.kind == "activation_gradient" and r.site == "shared"]
        assert order == [1, 0]
        last = trace.find("activation_gradient", "shared", 1)
        assert torch.equal(last.values, trace.find("activation_gradient", "model").values)

    def test_a_foreign_optimizer(self, outer):
        foreign = torch.optim.SGD(nn.Linear(2, 2).parameters())
        with pytest.raises(EvidenceError, match="not the module's"):
            Trace().add_optimizer(outer, foreign)


class TestFiles:
    @pytest.fixture
    def saved(self, tmp_path, outer, ids):
        with torch.no_grad(), record(outer.bfloat16(), keep="sample", sample_size=20) as trace:
            trace.add("loss", "loss", torch.tensor(math.nan))
            outer(ids)
        trace.save(tmp_path / "t")
        return trace, tmp_path / "t"

    def test_round_trip(self, saved):
        trace, directory = saved
        loaded = load_trace(directory)
        assert len(loaded.records) == len(trace.records)
        for a, b in zip(trace.records, loaded.records, strict=True):
            same = {"statistics", "values_key"}
            assert a.model_dump(exclude=same) == b.model_dump(exclude=same)
            assert torch.equal(a.values.nan_to_num(9), b.values.nan_to_num(9))
            assert a.statistics.model_dump_json() == b.statistics.model_dump_json()
        assert (loaded.keep, loaded.sample_size, loaded.teacher_forced) == ("sample", 20, False)
        json.loads((directory / "trace.json").read_text(), parse_constant=pytest.fail)  # no bare NaN
        assert loaded.add("loss", "loss", torch.tensor(0.0)) == 1  # counting goes on

    def test_equal_neighbours_are_stored_once(self, saved):
        trace, directory = saved
        stored = load_file(directory / "trace.safetensors")
        assert len(stored) < len(trace.records)
        assert trace.find("output", "embed").values is trace.find("input", "model").values

    @pytest.mark.parametrize("damage", ["missing", "json", "safetensors", "value", "shape", "field"])
    def test_damage_is_refused(self, saved, damage):
        _, directory = saved
        body, values = directory / "trace.json", directory / "trace.safetensors"
        if damage == "missing":
            values.unlink()
        elif damage == "json":
            body.write_text(body.read_text()[:-20])
        elif damage == "safetensors":
            values.write_bytes(values.read_bytes()[:-2])
        else:
            old, new = {
                "value": ('"values_key": "000001"', '"values_key": "999999"'),
                "shape": ('"dtype": "bfloat16"', '"dtype": "float32"'),
                "field": ('"site"', '"place"'),
            }[damage]
            assert old in body.read_text()
            body.write_text(body.read_text().replace(old, new, 1))
        with pytest.raises(EvidenceError, match="record it again"):
            load_trace(directory)
