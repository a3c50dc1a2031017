"""Stop texts: the stream with hold-back equals cutting the whole text, and holds back no more than it must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microllm.sampling import StopChecker

LETTERS = st.text("ab界", max_size=30)
STOPS = st.lists(st.text("ab界", min_size=1, max_size=5), max_size=4, unique=True)


def cut(text, stops):
    """The definition, letter by letter: the first end at which a stop text lies decides, the longest there wins."""
    for end in range(1, len(text) + 1):
        there = [stop for stop in stops if text[:end].endswith(stop)]
        if there:
            stop = max(there, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(LETTERS, STOPS, st.data())
def test_any_pieces_give_the_cut_text(text, stops, data):
    checker, out, rest = StopChecker(stops), "", text
    while rest and checker.stopped is None:
        size = data.draw(st.integers(1, len(rest)))
        out += checker.push(rest[:size])
        rest = rest[size:]
    out += checker.flush()
    assert (out, checker.stopped) == cut(text, stops)


@given(LETTERS, STOPS)
def test_what_is_held_back_could_still_become_a_stop_text(text, stops):
    checker, out = StopChecker(stops), ""
    for end, letter in enumerate(text, 1):
        out += checker.push(letter)
        if checker.stopped is not None:
            return
        seen = text[:end]
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        # What went out is final: no tail that starts earlier could still grow into a stop text.
        for start in range(len(out)):
            assert not any(stop.startswith(seen[start:]) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "outs", "stopped"),
    [
        (["Hello", " wor", "ld"], ["\n"], ["Hello", " wor", "ld"], None),
        (["a\n", "\nHuman", ": hi"], ["\n\nHuman:"], ["a", "", ""], "\n\nHuman:"),
        (["END"], ["END"], [""], "END"),
        (["x", "E", "N", "x"], ["END"], ["x", "", "", "ENx"], None),
        (["aa", "ab"], ["aab"], ["", "a"], "aab"),
        (["abcd"], ["abcd", "bc"], ["a"], "bc"),  # "bc" is complete first
        (["xabc"], ["bc", "abc"], ["x"], "abc"),  # both at once: the longest
        (["é", "界s", "top!"], ["stop"], ["é", "界", ""], "stop"),
    ],
)
def test_examples(pieces, stops, outs, stopped):
    checker = StopChecker(stops)
    assert [checker.push(piece) for piece in pieces] == outs
    assert checker.stopped == stopped


def test_flush_lets_go_once():
    checker = StopChecker(["END"])
    assert checker.push("the EN") == "the "
    assert (checker.flush(), checker.flush()) == ("EN", "")


def test_a_stopped_text_does_not_go_on():
    checker = StopChecker(["."])
    checker.push("a.b")
    with pytest.raises(AssertionError):
        checker.push("c")
