"""Planted faults in a small Llama-like model: each is traced to the right layer and substage, and no false alarm."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

from microllm.errors import EvidenceError
from microllm.evidence.compare import Gate, TripleRule, compare_traces, first_non_finite
from microllm.evidence.teacher_forcing import teacher_forced
from microllm.evidence.trace import ROOT, Trace, record

V, D, F, L, H, T = 96, 64, 128, 4, 4, 24  # vocabulary, hidden, FFN, layers, heads, tokens


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(D))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Attention(nn.Module):
    theta = 10_000.0
    manual = False

    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(D, D))
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, *, hidden_states, scale=None):
        q, k, v = (
            proj(hidden_states).unflatten(-1, (H, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q), self.rotate(k)
        if self.manual:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(mask, float("-inf")).softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2)), None

    def rotate(self, x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.self_attn, self.mlp = Attention(), MLP()

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states))[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block() for _ in range(L))
        self.norm = RMSNorm()

    def forward(self, token_ids):
        x = self.embed_tokens(token_ids)
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class TwinStyle(nn.Module):
    """As Hugging Face nests it: model.layers..., a mapping as result, with the loss before the logits."""

    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids):
        logits = self.lm_head(self.model(input_ids))
        return {"loss": logits.float().mean(), "logits": logits}


class OurStyle(Body):
    """The same names without the prefix; attention written out, so that rounding differs from the twin's."""

    def __init__(self, twin: TwinStyle):
        super().__init__()
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.load_state_dict({name.removeprefix("model."): t for name, t in twin.state_dict().items()})
        for block in self.layers:
            block.self_attn.manual = True

    def forward(self, token_ids):
        return self.lm_head(super().forward(token_ids))


def toy_pair() -> tuple[TwinStyle, OurStyle, Tensor]:
    """Return a twin, our style of it with equal weights, and token ids (2, T)."""
    torch.manual_seed(7)
    twin = TwinStyle().eval()
    ours = OurStyle(twin).eval()
    return twin, ours, torch.randint(0, V, (2, T))


def in_bf16(module):
    return copy.deepcopy(module).bfloat16()


class NarrowSums(nn.Linear):
    """A linear layer that adds up its products in bf16, one at a time."""

    def forward(self, x):
        total = torch.zeros(*x.shape[:-1], self.out_features, dtype=torch.bfloat16)
        x, weight = x.bfloat16(), self.weight.bfloat16()
        for start in range(self.in_features):
            total = total + x[..., start : start + 1] @ weight[:, start : start + 1].T
        return total.to(self.weight.dtype)


@torch.no_grad()
def plant(model: OurStyle, fault: str) -> None:
    """Break layer 2 (or, for the rotary base, its attention only)."""
    block = model.layers[2]
    if fault == "perturbed weight":
        block.mlp.up_proj.weight[3, 5] += 0.05
    elif fault == "dropped bias":
        block.self_attn.k_proj.bias.zero_()
    elif fault == "swapped gate and up":
        block.mlp.gate_proj, block.mlp.up_proj = block.mlp.up_proj, block.mlp.gate_proj
    elif fault == "wrong rope base":
        block.self_attn.theta = 500.0
    elif fault == "bf16 accumulation":
        narrow = NarrowSums(F, D, bias=False)
        narrow.weight = block.mlp.down_proj.weight
        block.mlp.down_proj = narrow
    else:
        raise AssertionError(fault)


FAULTS = {
    "perturbed weight": "layers.2.mlp.up_proj",
    "dropped bias": "layers.2.self_attn.k_proj",
    "swapped gate and up": "layers.2.mlp.gate_proj",
    "wrong rope base": "layers.2.self_attn",
    "bf16 accumulation": "layers.2.mlp.down_proj",
}


def comparable(site: str) -> bool:
    return site != "model"  # the twin's body has no counterpart in ours


@torch.no_grad()
def traced(model: nn.Module, ids: Tensor, forced_by: Trace | None = None) -> Trace:
    with contextlib.ExitStack() as stack:
        if forced_by is not None:
            stack.enter_context(teacher_forced(model, forced_by))
        trace = stack.enter_context(record(model, sites=comparable, keep="whole"))
        model(ids)
    return trace


@pytest.fixture(scope="module")
def toy():
    twin, ours, ids = toy_pair()
    reference = traced(twin, ids)
    low = in_bf16(twin)
    return ours, ids, reference, {True: traced(low, ids, reference), False: traced(low, ids)}


@pytest.mark.parametrize("forced", [True, False], ids=["teacher-forced", "free"])
@pytest.mark.parametrize("triple", [True, False], ids=["bf16 triple", "fp32 gate"])
class TestLocalisation:
    def compare(self, toy, model, *, forced, triple):
        _, ids, reference, lows = toy
        candidate = traced(in_bf16(model) if triple else model, ids, reference if forced else None)
        return compare_traces(candidate, reference, low=lows[forced] if triple else None)

    def test_no_false_alarm(self, toy, forced, triple):
        comparison = self.compare(toy, toy[0], forced=forced, triple=triple)
        assert comparison.passed
        assert comparison.fault is None
        assert comparison.mode == ("triple" if triple else "gate")
        layers = comparison.layers()
        assert [row.site for row in layers] == [f"layers.{i}" for i in range(L)]
        # two formulations of attention really rounded differently: the comparison had something to forgive
        assert all(0 < row.error.relative_l2 < row.relative_l2_limit for row in layers)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_planted_fault(self, toy, forced, triple, fault):
        model = copy.deepcopy(toy[0])
        plant(model, fault)
        comparison = self.compare(toy, model, forced=forced, triple=triple)
        assert not comparison.passed
        found = comparison.fault
        assert (found.layer, found.substage) == ("layers.2", FAULTS[fault]), found.description
        if fault == "wrong rope base":
            assert (found.kind, found.seen_at) == ("input", "layers.2.self_attn.o_proj")
        else:
            assert (found.kind, found.seen_at) == ("output", FAULTS[fault])
        assert FAULTS[fault] in found.description


def test_forced_layers_after_the_fault_are_clean_while_free_ones_are_not(toy):
    ours, ids, reference, _ = toy
    model = copy.deepcopy(ours)
    plant(model, "dropped bias")
    status = {
        forced: [r.status for r in compare_traces(traced(model, ids, by), reference).layers()]
        for forced, by in ((True, reference), (False, None))
    }
    assert status[True] == ["pass", "pass", "numeric_mismatch", "pass"]
    assert status[False] == ["pass", "pass", "numeric_mismatch", "numeric_mismatch"]


def test_fault_between_blocks_is_the_roots(toy):
    _, ids, reference, _ = toy
    _, ours, _ = toy_pair()
    ours.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.001,), prepend=True)
    fault = compare_traces(traced(ours, ids), reference).fault
    assert (fault.layer, fault.substage, fault.seen_at) == (ROOT, ROOT, "layers.1")


@pytest.mark.parametrize(("site", "expected"), [("norm", "norm"), ("embed_tokens", "embed_tokens")])
def test_fault_outside_blocks(toy, site, expected):
    ours, ids, reference, _ = toy
    model = copy.deepcopy(ours)
    with torch.no_grad():
        getattr(model, site).weight[:, ...] = getattr(model, site).weight * 1.01
    fault = compare_traces(traced(model, ids, reference), reference).fault
    assert (fault.layer, fault.substage) == (expected, expected)


class TestNonFinite:
    def test_weight(self, toy):
        ours, ids, reference, _ = toy
        model = copy.deepcopy(ours)
        with torch.no_grad():
            model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
        with torch.no_grad(), record(model, keep="stats") as trace:
            model(ids)
        assert first_non_finite(trace).substage == "layers.1.mlp.down_proj"
        comparison = compare_traces(traced(model, ids), reference)
        assert (comparison.fault.status, comparison.fault.substage) == ("non_finite", "layers.1.mlp.down_proj")

    def test_a_modules_own_code(self, toy):
        ours, ids, *_ = toy
        model = copy.deepcopy(ours)
        model.layers[3].self_attn.theta = 0.0  # 0 to a negative power: infinite angles
        with torch.no_grad(), record(model, keep="stats") as trace:
            model(ids)
        found = first_non_finite(trace)
        assert (found.layer, found.substage) == ("layers.3", "layers.3.self_attn")

    def test_none(self, toy):
        assert first_non_finite(toy[2]) is None


class TestTeacherForcing:
    def test_a_recorder_sees_the_forced_input(self, toy):
        ours, ids, reference, _ = toy
        model = copy.deepcopy(ours)
        plant(model, "dropped bias")
        with torch.no_grad(), record(model, keep="whole") as trace, teacher_forced(model, reference):
            model(ids)  # whichever was opened first
        assert trace.teacher_forced
        for site in ("layers.3", "norm", "lm_head"):
            assert torch.equal(trace.find("input", site).values, reference.find("input", site).values)

    def test_hooks_are_gone_and_the_result_is_back(self, toy):
        ours, ids, reference, _ = toy
        before = ours(ids)
        with pytest.raises(RuntimeError, match="stop"), teacher_forced(ours, reference):
            raise RuntimeError("stop")
        assert not any(m._forward_pre_hooks for m in ours.modules())
        assert torch.equal(ours(ids), before)
        assert not traced(ours, ids).teacher_forced

    def test_keyword_input_is_replaced(self, toy):
        ours, ids, reference, _ = toy
        with torch.no_grad(), teacher_forced(ours, reference, blocks=["layers.*.self_attn"]) as sites:
            with record(ours, keep="whole") as trace:
                ours(ids)
        assert sites == tuple(f"layers.{i}.self_attn" for i in range(L))
        name = "layers.2.self_attn"
        assert torch.equal(trace.find("input", name).values, reference.find("input", name).values)

    def test_unmatched_work_is_refused(self, toy):
        ours, ids, reference, lows = toy
        with pytest.raises(EvidenceError, match="same tokens"):
            traced(ours, ids[:, :5], reference)
        with record(ours, keep="stats") as thin:
            ours(ids)
        with pytest.raises(EvidenceError, match="keep='whole'"):
            traced(ours, ids, thin)
        with teacher_forced(ours, reference):
            ours(ids)
            with pytest.raises(EvidenceError, match="call 2"):
                ours(ids)
        with pytest.raises(EvidenceError, match="match no module"), teacher_forced(ours, reference, blocks=["h.*"]):
            pass
        with pytest.raises(EvidenceError, match="one mode"):
            compare_traces(traced(ours, ids), reference, low=lows[True])


def test_limits_are_what_decides(toy):
    ours, ids, reference, lows = toy
    candidate = traced(in_bf16(ours), ids)
    assert compare_traces(candidate, reference, low=lows[False]).passed
    strict = TripleRule(factor=0.5, small_factor=0.5, floor=0.0)
    assert not compare_traces(candidate, reference, low=lows[False], rule=strict).passed
    assert not compare_traces(candidate, reference).passed
    assert compare_traces(candidate, reference, gate=Gate(relative_l2=0.05)).passed
    assert not compare_traces(candidate, reference, gate=Gate(relative_l2=0.05, max_abs=1e-4)).passed
