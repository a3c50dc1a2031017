"""Pages are held, shared, cached and given out again; nobody writes what another holds."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microllm.step.pages import PageAllocator, first_digest, page_digests

SALTS = [b"", b"a"]


def digests(tokens, size=4, salt=b""):
    return list(page_digests(tokens, size, first_digest(salt)))


def test_a_digest_names_all_tokens_so_far_and_the_salt():
    a = digests([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(a) == 2
    assert digests([1, 2, 3, 4]) == a[:1]
    assert digests([1, 2, 3, 4, 5, 6, 7, 9]) != a
    assert digests([9, 2, 3, 4, 5, 6, 7, 8])[1] != a[1], "the second page does not know its parent"
    assert not set(digests([1, 2, 3, 4, 5, 6, 7, 8], salt=b"other")) & set(a)
    assert digests([2**40, 0, 0, 0]) != digests([0, 2**40, 0, 0])
    assert digests([1, 2, 3]) == []


def test_what_was_let_go_longest_ago_is_forgotten_first_and_a_tail_before_its_head():
    pages = PageAllocator(4)
    old, new = digests([1] * 8), digests([2] * 8)
    for chain in (old, new):
        held = pages.take(2)
        for page, digest in zip(held, chain, strict=True):
            pages.publish(page, digest)
        pages.release(held)
    assert pages.num_free == pages.num_cached == 4
    pages.take(1)
    assert [len(pages.find(chain)) for chain in (old, new)] == [1, 2]
    pages.hold(pages.find(old))  # used again: the other chain is the older one now
    pages.take(1)
    assert [len(pages.find(chain)) for chain in (old, new)] == [1, 1]
    pages.take(1)
    assert [len(pages.find(chain)) for chain in (old, new)] == [1, 0]
    assert pages.num_free == 0


def test_a_shared_page_is_free_when_its_last_holder_is_gone():
    pages = PageAllocator(2)
    (page,) = pages.take(1)
    pages.publish(page, b"x")
    pages.hold([page])
    pages.release([page])
    assert pages.num_held == 1
    assert pages.count_free([page]) == 0
    pages.release([page])
    assert (pages.num_held, pages.num_cached) == (0, 1)
    with pytest.raises(AssertionError, match="released once"):
        pages.release([page])
    with pytest.raises(AssertionError, match="more pages"):
        pages.take(3)


def test_equal_pages_keep_the_first_place():
    pages = PageAllocator(2)
    first, second = pages.take(2)
    pages.publish(first, b"x")
    pages.publish(second, b"x")
    assert pages.find([b"x"]) == [first]
    pages.release([first, second])
    assert (pages.num_cached, pages.num_free) == (1, 2)
    assert sorted(pages.take(2)) == [0, 1]
    assert pages.find([b"x"]) == []


@settings(max_examples=150)
@given(data=st.data())
def test_random_holders_agree_with_a_model_that_counts(data):
    num_pages = data.draw(st.integers(1, 6))
    pages = PageAllocator(num_pages)
    holders: list[list[int]] = []
    content: dict[int, bytes] = {}  # what each page held when it was published
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["take", "hold", "release", "publish"]))
        if action == "take" and pages.num_free:
            taken = pages.take(data.draw(st.integers(1, pages.num_free)))
            assert not {page for held in holders for page in held} & set(taken), "a held page was given out"
            for page in taken:
                content.pop(page, None)
            holders.append(taken)
        elif action == "publish" and holders:
            held = data.draw(st.sampled_from(holders))
            digest = str(data.draw(st.integers(0, 3))).encode()
            if held[0] not in content and digest not in content.values():
                content[held[0]] = digest
            pages.publish(held[0], digest)
        elif action == "hold" and content:
            digest = data.draw(st.sampled_from(sorted(content.values())))
            found = pages.find([digest])
            assert content[found[0]] == digest
            pages.hold(found)
            holders.append(found)
        elif action == "release" and holders:
            pages.release(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        counted = Counter(page for held in holders for page in held)
        assert pages.num_held == len(counted), number
        assert pages.num_free == num_pages - len(counted)
        assert pages.num_cached == len(set(content) - set(counted))
        assert [pages.count_free([page]) for page in range(num_pages)] == [not counted[p] for p in range(num_pages)]
