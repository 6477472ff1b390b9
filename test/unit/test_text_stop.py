"""Stop strings: the earliest completed one, whatever the pieces, and nothing of it streamed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashspark.text import StopMatch, StopMatcher


def reference(text: str, stops: list[str]) -> StopMatch | None:
    """Character by character: the first position where a stop ends, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return StopMatch(stop, end - len(stop))
    return None


PIECES = st.lists(st.text(alphabet="ab\n", max_size=5), max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


@given(pieces=PIECES, stops=STOPS)
def test_matches_as_character_by_character(pieces, stops):
    matcher = StopMatcher(stops)
    for piece in pieces:
        matcher.push(piece)
    assert matcher.match == reference("".join(pieces), stops)


@given(pieces=PIECES, stops=STOPS)
def test_nothing_of_a_match_is_released_and_nothing_is_lost(pieces, stops):
    matcher = StopMatcher(stops)
    text, released = "", 0
    for piece in pieces:
        text += piece
        match = matcher.push(piece)
        if match is not None:
            assert released <= match.start
            return
        now = released + matcher.releasable(text[released:])
        assert now >= released
        released = now
    # What is held back is a beginning of a stop string, or nothing.
    held = text[released:]
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_answer_does_not_change_after_a_match():
    matcher = StopMatcher(["END", "ND!"])
    assert matcher.push("the EN") is None
    assert matcher.releasable("the EN") == 4
    match = matcher.push("D! and")
    assert match == StopMatch("END", 4)
    assert match.end == 7
    assert matcher.push("ND!") == match


def test_no_stops_and_empty_stops():
    matcher = StopMatcher([])
    assert matcher.push("x" * 100) is None
    assert matcher.releasable("abc") == 3
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@given(skipped=st.text(alphabet="ab", max_size=6), pieces=PIECES, stops=STOPS)
def test_nothing_reaches_back_into_skipped_text(skipped, pieces, stops):
    matcher = StopMatcher(stops)
    matcher.push("x")
    matcher.skip(skipped)
    for piece in pieces:
        matcher.push(piece)
    expected = reference("".join(pieces), stops)
    shift = 1 + len(skipped)
    assert matcher.match == (expected and StopMatch(expected.stop, expected.start + shift))


def test_skipping_nothing_changes_nothing():
    """A caller that skips before every push, mostly nothing, still finds what straddles its pushes."""
    matcher = StopMatcher(["END"])
    matcher.skip("E")
    for piece in ("x", "E", "N", "D"):
        matcher.skip("")
        matcher.push(piece)
    assert matcher.match == StopMatch("END", 2)
