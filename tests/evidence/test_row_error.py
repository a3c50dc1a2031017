"""Activations are judged token by token: one token of huge size neither decides nor hides."""

import pytest
import torch

from microllm.evidence.compare import Gate, compare_traces
from microllm.evidence.tensor_statistics import CHUNK, error_statistics
from microllm.evidence.trace import Trace


def trace_of(tensor, kind="output"):
    trace = Trace("whole")
    trace.add(kind, "layers.0", tensor)
    return trace


def judge(candidate, reference, low=None, kind="output"):
    traces = [None if t is None else trace_of(t, kind) for t in (candidate, reference, low)]
    (row,) = compare_traces(traces[0], traces[1], low=traces[2], gate=Gate(relative_l2=1e-3)).rows
    return row


def activations():
    """Sixty-four tokens of which the first is a thousand times as large."""
    reference = torch.randn(1, 64, 32)
    reference[0, 0] *= 1000
    return reference


def off_by(reference, share, tokens=slice(None)):
    result = reference.clone()
    result[:, tokens] *= 1 + share
    return result


@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 11), (4, CHUNK // 2), (1, 3, CHUNK // 3)])
def test_the_mean_over_rows_is_what_it_says(shape):
    reference = torch.randn(shape)
    reference.view(-1, shape[-1])[1] = 0
    candidate = reference + 0.01 * torch.randn(shape)
    difference = (candidate - reference).double().view(-1, shape[-1]).norm(dim=1)
    size = reference.double().view(-1, shape[-1]).norm(dim=1)
    size[1] = size.square().mean().sqrt()  # a row of zeros counts against the RMS row
    found = error_statistics(candidate, reference)
    assert found.row_relative_l2 == pytest.approx((difference / size).mean().item(), rel=1e-9)
    assert error_statistics(reference, reference).row_relative_l2 == 0


@pytest.mark.parametrize("shape", [(40,), (), (0, 4), (2, CHUNK + 1)])
def test_without_rows_it_is_the_error_of_the_whole(shape):
    reference = torch.randn(shape)
    found = error_statistics(reference + 0.01, reference)
    assert found.row_relative_l2 == found.relative_l2


def test_the_luck_of_one_huge_token_does_not_fail_a_triple():
    reference = activations()
    low = off_by(off_by(reference, 0.004), -0.003, slice(1))  # lucky in the first token: its error is 0.001
    candidate = off_by(reference, 0.004)
    assert error_statistics(candidate, reference).relative_l2 > 3 * error_statistics(low, reference).relative_l2
    assert judge(candidate, reference, low).status == "pass"
    assert judge(candidate, reference, low, kind="gradient").status == "numeric_mismatch"  # rows are no tokens there


def test_one_huge_token_does_not_hide_the_others():
    reference = activations()
    low, candidate = off_by(reference, 0.004), off_by(reference, 0.02, slice(1, None))
    candidate = off_by(candidate, 0.004, slice(1))
    assert error_statistics(candidate, reference).relative_l2 < 1.1 * error_statistics(low, reference).relative_l2
    assert judge(candidate, reference, low).status == "numeric_mismatch"
    hidden = off_by(reference, 0.01, slice(1, None))
    assert error_statistics(hidden, reference).relative_l2 < 1e-3
    assert judge(hidden, reference).status == "numeric_mismatch"


def test_a_gate_still_sees_one_bad_token_among_many():
    reference = torch.randn(1, 512, 32)
    candidate = off_by(reference, 0.1, slice(300, 301))
    assert error_statistics(candidate, reference).row_relative_l2 < 1e-3
    assert judge(candidate, reference).status == "numeric_mismatch"
