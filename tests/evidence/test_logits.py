"""Agreement, margins and KL against plain formulas; which greedy splits are accepted."""

from __future__ import annotations

import math

import pytest
import torch

from microllm.errors import EvidenceError
from microllm.evidence.logits import compare_logits, greedy_splits


def test_kl_and_agreement_against_torch():
    r, c = torch.randn(2, 5, 33), torch.randn(2, 5, 33)
    found = compare_logits(c, r)
    kl = torch.nn.functional.kl_div(
        c.double().log_softmax(-1), r.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert found.mean_kl == pytest.approx(kl.mean().item(), rel=1e-12)
    assert found.max_kl == pytest.approx(kl.max().item(), rel=1e-12)
    agree = (c.argmax(-1) == r.argmax(-1)).float().mean().item()
    assert found.top1_agreement == pytest.approx(agree)
    assert {(s.row, s.position) for s in found.splits} == {
        tuple(p) for p in (c.argmax(-1) != r.argmax(-1)).nonzero().tolist()
    }
    top = r.double().topk(2).values
    assert found.min_margin == (top[..., 0] - top[..., 1]).min().item()


def test_equal_logits_masked_vocabulary_and_pieces():
    r = torch.randn(1, 40, 50_000)
    r[..., 7] = -math.inf
    found = compare_logits(r.clone(), r)
    assert (found.top1_agreement, found.max_kl, found.splits, found.num_positions) == (1.0, 0.0, (), 40)
    c = r.clone()
    c[0, 39, 123] = 100.0
    assert [(s.row, s.position, s.candidate_token) for s in compare_logits(c, r).splits] == [(0, 39, 123)]


def test_epsilon_accepts_only_the_undecided():
    r = torch.tensor([[[5.0, 4.99, 1.0], [5.0, 4.0, 1.0], [5.0, 4.99, 1.0]]])
    c = torch.tensor([[[4.9, 5.0, 1.0], [3.0, 4.0, 1.0], [1.0, 1.0, 2.0]]])
    found = compare_logits(c, r, epsilon=0.1)
    assert [s.accepted for s in found.splits] == [True, False, False]  # the third chose neither of the close two
    assert found.num_refused == 2
    assert found.splits[2].margin == pytest.approx(0.01, abs=1e-6)
    assert found.splits[2].gap == 4.0
    assert compare_logits(c, r).num_refused == 3


def test_unmatched_logits_are_refused():
    for a, b in (((2, 3), (3, 3)), ((0, 3), (0, 3)), ((2, 1), (2, 1))):
        with pytest.raises(EvidenceError, match="equal"):
            compare_logits(torch.zeros(a), torch.zeros(b))


class TestGreedySplits:
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 8.99], [0, 0, 9.0], [9.0, 0, 0]])
    reference = (0, 1, 2, 0)

    def test_first_split_only(self):
        found = greedy_splits(
            [self.reference, (0, 2, 0, 1), (1, 1, 2, 0)], [self.reference] * 3, [self.logits] * 3, epsilon=0.05
        )
        assert [(s.row, s.position, s.accepted) for s in found] == [(1, 1, True), (2, 0, False)]
        assert (found[0].candidate_token, found[0].reference_token) == (2, 1)
        assert found[0].margin == pytest.approx(0.01, abs=1e-6)

    def test_a_split_may_change_the_length_but_nothing_else_may(self):
        assert len(greedy_splits([(0, 2)], [self.reference], [self.logits], epsilon=0.05)) == 1
        with pytest.raises(EvidenceError, match="equal work"):
            greedy_splits([(0, 1)], [self.reference], [self.logits], epsilon=0.05)
        with pytest.raises(EvidenceError, match="one a token"):
            greedy_splits([self.reference], [self.reference], [self.logits[:2]], epsilon=0.05)
        with pytest.raises(EvidenceError, match="as many of each"):
            greedy_splits([self.reference], [], [], epsilon=0.05)
