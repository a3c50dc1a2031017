"""Which replica a prompt goes to."""

import pytest

from microllm.errors import UnavailableError
from microllm.serving.router import PrefixRouter

PROMPT = list(range(100))


def test_a_beginning_goes_where_it_was_seen_unless_that_one_is_too_busy():
    router = PrefixRouter(16, slack=2)
    assert router.choose(PROMPT, b"", {0: 0, 1: 0}) == 0
    assert router.choose([*PROMPT[:40], 7, 7, 7], b"", {0: 2, 1: 0}) == 0
    assert router.choose([*PROMPT[:40], 8, 8], b"", {0: 3, 1: 0}) == 1
    assert router.choose([*PROMPT[:40], 9], b"", {0: 0, 1: 0}) == 1  # the last one to see it has it too
    assert router.choose(PROMPT, b"other key", {0: 1, 1: 0}) == 1
    assert router.choose(PROMPT[:10], b"", {0: 5, 1: 4}) == 1


def test_an_engine_that_is_gone_gets_nothing():
    router = PrefixRouter(16, slack=9)
    assert router.choose(PROMPT, b"", {0: 0}) == 0
    assert router.choose(PROMPT, b"", {1: 5}) == 1
    with pytest.raises(UnavailableError, match="no engine that runs"):
        router.choose(PROMPT, b"", {})
