"""Row and batch invariance: honest functions pass, each kind of dependence is caught and placed."""

from __future__ import annotations

import math

import pytest
import torch

from microllm.errors import EvidenceError
from microllm.evidence.invariance import probe_invariance

ROWS = torch.arange(20, dtype=torch.float32).reshape(5, 4)


def test_a_rowwise_function_passes_also_with_special_values():
    rows = ROWS.clone()
    rows[1, 2] = math.nan
    report = probe_invariance(lambda x: x.sin().bfloat16(), rows, probed=(0, 1, 4))
    assert report.passed
    assert report.failures == ()
    assert len(report.cases) == 3 * (1 + 1 + 1 + 5 + 1 + 1)  # again, first, last, five copies, among, pair


def test_dependence_on_the_batch_is_placed():
    def batch_mean(x):
        y = x.clone()
        y[:, 3] += 0.25 * (len(x) > 2)
        return y

    report = probe_invariance(batch_mean, ROWS, probed=(2,))
    assert report.repeatable
    assert {case.arrangement for case in report.failures} == {"first", "last", "duplicated", "among strangers"}
    for case in report.failures:
        assert (case.row, case.num_different, case.first_index, case.max_abs) == (2, 1, (3,), 0.25)


def test_dependence_on_the_position():
    report = probe_invariance(lambda x: x + (torch.arange(len(x)) == 4)[:, None], ROWS)
    assert {(case.arrangement, case.position) for case in report.failures} == {("last", 4), ("duplicated", 4)}


def test_dependence_on_the_neighbours():
    report = probe_invariance(lambda x: x - x.mean(0, keepdim=True), ROWS)
    failed = {case.arrangement for case in report.failures}
    assert failed == {"first", "last", "among strangers", "pair"}  # copies of itself leave the mean alone


def test_the_sign_of_zero_counts():
    report = probe_invariance(lambda x: torch.zeros_like(x) * (1 if len(x) == 1 else -1), ROWS)
    assert not report.passed
    assert report.failures[0].max_abs == 0.0


def test_unrepeatable_is_said_apart():
    calls = []

    def drifting(x):
        calls.append(1)
        return x + len(calls)

    report = probe_invariance(drifting, ROWS)
    assert not report.repeatable
    assert not report.passed


def test_a_reused_result_buffer_does_not_hide_a_difference():
    buffer = torch.empty(5, 4)

    def step(x):
        buffer[: len(x)] = x * (1 + 0.5 * (len(x) > 1))
        return buffer[: len(x)]

    assert not probe_invariance(step, torch.ones(5, 4), probed=(1,)).passed


def test_bad_calls():
    with pytest.raises(EvidenceError, match="at least 3 rows"):
        probe_invariance(lambda x: x, ROWS[:2])
    with pytest.raises(EvidenceError, match="probed"):
        probe_invariance(lambda x: x, ROWS, probed=(5,))
    with pytest.raises(EvidenceError, match="one a row"):
        probe_invariance(lambda x: x[:1].repeat(7, 1), ROWS)
