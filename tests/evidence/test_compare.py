"""Error statistics against plain formulas, and the statuses of a pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from microllm.errors import EvidenceError
from microllm.evidence.compare import Gate, TraceComparison, TripleRule, compare_traces
from microllm.evidence.tensor_statistics import CHUNK, error_statistics
from microllm.evidence.trace import Trace, record


def trace_of(keep="whole", **tensors):
    trace = Trace(keep, sample_size=16)
    for site, tensor in tensors.items():
        trace.add("output", site, tensor)
    return trace


class TestErrorStatistics:
    def test_against_numpy(self):
        r = torch.randn(7, 900, 3, dtype=torch.float64)
        c = r + 0.01 * torch.randn_like(r) + 0.002
        found = error_statistics(c, r)
        a, b = c.numpy().ravel(), r.numpy().ravel()
        d = a - b
        assert found.max_abs == np.abs(d).max()
        assert found.relative_l2 == pytest.approx(np.linalg.norm(d) / np.linalg.norm(b), rel=1e-12)
        assert found.p999_abs == np.quantile(np.abs(d), 0.999, method="inverted_cdf")
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert found.cosine_deficit == pytest.approx(1 - cosine, abs=1e-15)
        assert found.signed_bias == pytest.approx(d.mean() / np.sqrt((b * b).mean()), rel=1e-9)
        assert found.worst_index == np.unravel_index(np.abs(d).argmax(), r.shape)
        assert (found.non_finite, found.special_mismatches, found.first_special_index) == (0, 0, None)

    def test_pieces_change_nothing(self):
        r = torch.randn(3, CHUNK + 17)
        c = (r + 1e-3 * torch.randn_like(r)).bfloat16()
        c[2, CHUNK + 9] = 50
        found = error_statistics(c, r.t().contiguous().t())
        d = (c.double() - r.double()).abs().flatten()
        assert found.worst_index == (2, CHUNK + 9)
        assert found.relative_l2 == pytest.approx((d.norm() / r.double().norm()).item(), rel=1e-12)
        assert found.p999_abs == d.sort().values[math.ceil(0.999 * len(d)) - 1].item()

    def test_a_tiny_cosine_deficit_is_not_lost(self):
        r = torch.ones(1000, dtype=torch.float64)
        c = r.clone()
        c[0] += 1e-9
        expected = 1e-18 * (1 - 1 / 1000) / (2 * 1000)
        assert error_statistics(c, r).cosine_deficit == pytest.approx(expected, rel=1e-6)
        assert error_statistics(3 * r, r).cosine_deficit < 1e-30
        assert error_statistics(-r, r).cosine_deficit == 2

    def test_bias_shows_what_norms_hide(self):
        r = torch.randn(100_000, dtype=torch.float64)
        noise = 1e-3 * torch.randn_like(r)
        random, biased = error_statistics(r + noise, r), error_statistics(r + noise.abs(), r)
        assert random.relative_l2 == pytest.approx(biased.relative_l2, rel=1e-9)
        assert abs(random.signed_bias) < 2e-5
        assert biased.signed_bias == pytest.approx(1e-3 * math.sqrt(2 / math.pi), rel=0.02)
        assert error_statistics(r - noise.abs(), r).signed_bias < 0

    def test_special_values(self):
        nan, inf = math.nan, math.inf
        r = torch.tensor([[1.0, -inf, nan], [inf, 2.0, 3.0]])
        c = torch.tensor([[1.0, -inf, nan], [-inf, nan, 3.5]])
        found = error_statistics(c, r)
        assert (found.non_finite, found.special_mismatches, found.first_special_index) == (4, 3, (0, 2))
        assert (found.max_abs, found.worst_index) == (0.5, (1, 2))
        assert found.relative_l2 == pytest.approx(0.5 / math.sqrt(10))
        nothing = error_statistics(torch.tensor([nan]), torch.tensor([1.0]))
        assert (nothing.special_mismatches, nothing.worst_index, nothing.max_abs) == (1, None, 0.0)

    def test_zero_reference(self):
        zero = torch.zeros(4)
        assert error_statistics(zero, zero).relative_l2 == 0
        off = error_statistics(zero + 1, zero)
        assert (off.relative_l2, off.signed_bias, off.cosine_deficit) == (math.inf, math.inf, 1.0)
        assert error_statistics(torch.empty(0), torch.empty(0)).numel == 0

    def test_shapes_must_agree(self):
        with pytest.raises(EvidenceError, match="same tokens"):
            error_statistics(torch.ones(2, 3), torch.ones(3, 2))

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0.5, 2))
    def test_bounds(self, values, scale):
        r = torch.tensor(values, dtype=torch.float64)
        found = error_statistics(r * scale, r)
        assert 0 <= found.p999_abs <= found.max_abs
        assert 0 <= found.cosine_deficit <= 2
        if r.norm() > 1e-100:
            assert found.relative_l2 == pytest.approx(abs(scale - 1), rel=1e-6, abs=1e-12)


class TestStatuses:
    def test_each(self):
        x = torch.randn(5, 4)
        reference = trace_of(same=x, off=x, gone=x, shape=x, special=x, nan=x * math.nan)
        broken = x.clone()
        broken[1, 2] = math.nan
        candidate = trace_of(same=x, off=x * 1.01, shape=x[:4], special=broken, nan=x * math.nan, more=x)
        comparison = compare_traces(candidate, reference)
        assert {row.site: row.status for row in comparison.rows} == {
            "same": "pass",
            "off": "numeric_mismatch",
            "nan": "non_finite",
            "gone": "missing",
            "shape": "shape_mismatch",
            "special": "non_finite",
            "more": "missing",
        }
        assert comparison.counts()["missing"] == 2
        assert not comparison.passed
        assert comparison.fault.seen_at == "off"
        assert "(1, 2)" in next(row.detail for row in comparison.rows if row.site == "special")
        assert compare_traces(candidate, reference, sites=["same"]).passed

    def test_missing_alone_fails_but_has_no_place(self):
        comparison = compare_traces(trace_of(a=torch.ones(1)), trace_of(a=torch.ones(1), b=torch.ones(1)))
        assert not comparison.passed
        assert comparison.fault is None

    def test_truncated(self):
        x = torch.randn(40)
        reference, candidate = trace_of("sample", a=x), trace_of("sample", a=x)
        assert compare_traces(candidate, reference).rows[0].status == "truncated"
        assert compare_traces(candidate, reference, allow_truncated=True).passed
        worse = trace_of("sample", a=x * 1.1)
        assert compare_traces(worse, reference, allow_truncated=True).rows[0].status == "numeric_mismatch"
        thin = trace_of("stats", a=x)
        assert compare_traces(thin, reference, allow_truncated=True).rows[0].status == "truncated"

    def test_non_finite_is_seen_without_values(self):
        x = torch.randn(40)
        broken = x.clone()
        broken[7] = math.inf
        row = compare_traces(trace_of("stats", a=broken), trace_of("stats", a=x)).rows[0]
        assert row.status == "non_finite"

    def test_nothing_to_compare(self):
        with pytest.raises(EvidenceError, match="at least one pair"):
            compare_traces(trace_of(a=torch.ones(1)), trace_of(a=torch.ones(1)), sites=["b"])

    def test_occurrences_are_paired(self):
        first, second = torch.ones(3), torch.full((3,), 2.0)
        traces = []
        for order in ((first, second), (second, first)):
            trace = Trace("whole")
            for tensor in order:
                trace.add("output", "layers.0", tensor)
            traces.append(trace)
        comparison = compare_traces(*traces)
        assert [row.status for row in comparison.rows] == ["numeric_mismatch"] * 2
        assert compare_traces(traces[0], traces[0]).passed


class TestTriple:
    def case(self, numel, ratio):
        r = torch.randn(numel, dtype=torch.float64)
        noise = 1e-3 * r.norm() * nn.functional.normalize(torch.randn_like(r), dim=0)
        traces = [trace_of(a=t) for t in (r + ratio * noise, r, r + noise)]
        return compare_traces(traces[0], traces[1], low=traces[2])

    @pytest.mark.parametrize(
        ("numel", "ratio", "passed"),
        [(500, 1.5, True), (500, 1.55, False), (499, 2.5, True), (499, 2.55, False), (500, 0.0, True)],
    )
    def test_factor(self, numel, ratio, passed):
        comparison = self.case(numel, ratio)
        assert comparison.passed is passed
        row = comparison.rows[0]
        assert row.reference_error.relative_l2 == pytest.approx(1e-3, rel=1e-9)
        assert row.error.relative_l2 == pytest.approx(ratio * 1e-3, rel=1e-9, abs=1e-15)

    def test_floor_carries_an_exact_reference(self):
        r = torch.randn(1000, dtype=torch.float64)
        for error, passed in ((0.9e-5, True), (1.1e-5, False)):
            got = compare_traces(trace_of(a=r * (1 + error)), trace_of(a=r), low=trace_of(a=r))
            assert got.passed is passed
        assert TripleRule(floor=0.5).limit(1.0, 1000) == 2.0

    def test_low_must_have_the_site(self):
        x = torch.ones(3)
        got = compare_traces(trace_of(a=x), trace_of(a=x), low=trace_of(b=x))
        assert got.rows[0].status == "missing"


def test_an_all_zero_reference():
    zero, tiny = torch.zeros(600), torch.full((600,), 1e-9)
    assert not compare_traces(trace_of(a=tiny), trace_of(a=zero)).passed
    assert compare_traces(trace_of(a=tiny), trace_of(a=zero), gate=Gate(relative_l2=1e-5, negligible_abs=2e-9)).passed
    row = compare_traces(trace_of(a=tiny), trace_of(a=zero), low=trace_of(a=tiny)).rows[0]
    assert (row.status, row.relative_l2_limit) == ("pass", math.inf)


def test_a_gate_limits_something():
    with pytest.raises(ValueError, match="without a limit"):
        Gate()
    with pytest.raises(ValueError, match="without a limit"):
        Gate(max_abs=math.nan)


def test_training_records_are_compared_and_placed():
    def run(scale):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(module.parameters())
        with record(module, keep="whole", gradients=True) as trace:
            loss = module(torch.ones(2, 4)).square().sum()
            trace.add("loss", "loss", loss)
            loss.backward()
            module[0].weight.grad *= scale
            trace.add_gradients(module)
            optimizer.step()
            trace.add_optimizer(module, optimizer)
        return trace

    assert compare_traces(run(1), run(1), blocks=["*"]).passed
    comparison = compare_traces(run(1.01), run(1), blocks=["*"])
    assert (comparison.fault.kind, comparison.fault.layer, comparison.fault.seen_at) == ("gradient", "0", "0.weight")
    bad = {(row.kind, row.site) for row in comparison.rows if row.status != "pass"}
    assert ("optimizer", "0.weight.exp_avg") in bad
    assert ("optimizer", "2.weight.exp_avg") not in bad


def test_json_round_trip_with_special_values():
    x = torch.tensor([1.0, 2.0])
    comparison = compare_traces(trace_of(a=x, b=x + 1), trace_of(a=x * math.nan, b=x * 0))
    text = comparison.model_dump_json()
    assert '"Infinity"' in text
    assert TraceComparison.model_validate_json(text) == comparison
