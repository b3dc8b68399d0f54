"""Stop strings and UTF-8 over token borders."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.engine.text import StopMatcher, TextStream


def whole(text: str, stops: list[str]) -> str:
    """The slow obvious cut: at the earliest end of any stop string, as a reader of one character at a time sees it."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: min(text[:end].rindex(stop) for stop in ends)]
    return text


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_fed_by_characters_the_cut_is_the_obvious_one(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for character in text:
        given_out += matcher.feed(character)
        if matcher.matched is not None:
            break
    given_out += "" if matcher.matched is not None else matcher.flush()
    assert given_out == whole(text, stops)


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_no_part_of_a_stop_string_is_ever_given_out(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, given_out = "", ""
    for piece in pieces:
        seen += piece
        given_out += matcher.feed(piece)
        assert seen.startswith(given_out)
        assert not any(stop in given_out for stop in stops)
        if matcher.matched is not None:
            assert seen.startswith(given_out + matcher.matched)
            return
    assert given_out + matcher.flush() == seen


@settings(deadline=None)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 120), max_size=20))
def test_characters_survive_any_cut(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", errors="surrogatepass")
    text = data.decode("utf-8", errors="replace")
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    stream = TextStream()
    out = "".join(stream.feed(data[a:b]) for a, b in pairwise(borders))
    assert out + stream.flush() == text


def test_the_stop_string_is_included_on_request() -> None:
    matcher = StopMatcher(["fox"], include=True)
    assert matcher.feed("a fo") + matcher.feed("x!") == "a fox"
