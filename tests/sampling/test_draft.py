"""Proposals come from the text itself, and stop where they are of no use."""

import random

from microllm.sampling.draft import MAX_PAUSE, Draft, NgramProposer


def draft_of(tokens, most=4):
    draft = Draft(NgramProposer, most)
    draft.extend(tokens)
    return draft


def test_what_followed_last_time_is_proposed():
    draft = draft_of([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert draft.propose(4) == [4, 5, 9, 1]
    assert draft.propose(2) == [4, 5]
    assert draft.propose(0) == []
    assert draft_of([1, 2, 3, 4, 5, 9, 1, 2, 3], most=1).propose(7) == [4]


def test_the_longest_match_decides_and_the_latest_of_equals():
    assert draft_of([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]).propose(1) == [7]
    assert draft_of([2, 3, 7, 5, 2, 3, 8, 6, 2, 3]).propose(1) == [8]


def test_a_text_without_repeats_proposes_nothing():
    assert draft_of([]).propose(4) == []
    assert draft_of([1]).propose(4) == []
    assert draft_of(range(100)).propose(4) == []


def test_a_repeating_text_proposes_its_period():
    assert draft_of([5] * 3).propose(4) == [5] * 4
    assert draft_of([1, 2] * 4, most=7).propose(7) == [1, 2, 1, 2, 1, 2, 1]


def test_misses_make_it_pause_ever_longer_and_a_hit_ends_that():
    draft = draft_of([5] * 4)
    gaps, since = [], 0
    for _ in range(400):
        since += 1
        if draft.propose(4):
            gaps.append(since)
            since = 0
            draft.judge(4, 0)
        draft.extend([5])
    assert gaps[:6] == [1, 2, 4, 8, 16, 32]
    assert set(gaps[6:]) == {MAX_PAUSE, MAX_PAUSE + 1}
    while not draft.propose(4):
        draft.extend([5])
    draft.judge(4, 1)
    draft.extend([5, 5])
    assert draft.propose(4)
    assert (draft.num_proposed, draft.num_accepted) == (4 * (len(gaps) + 1), 1)


def test_proposals_are_those_of_a_search_through_the_text():
    words = random.Random(3)
    tokens = [words.randrange(4) for _ in range(200)]
    draft = Draft(NgramProposer, 3)
    for end, token in enumerate(tokens):
        want = []
        for size in (4, 3, 2):
            places = [i for i in range(end - size) if tokens[i : i + size] == tokens[end - size : end] and end >= size]
            if places:
                want = tokens[places[-1] + size : min(places[-1] + size + 3, end)]
                break
        assert draft.propose(3)[: len(want)] == want
        draft.extend([token])
