"""Numbers within bounds and patterns: the grammar matches exactly what arithmetic and Python's `re` say."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.engine.number_range import integer_range
from weighbridge.engine.pattern import PatternError, pattern_expression

CHAR = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
PIECES = re.compile(r'"((?:[^"\\]|\\.)*)"|\[(?:[^\]\\]|\\.)*\]|char|[()|*+?]|\{[0-9,]+\}|\s+')


def as_regex(expression: str) -> re.Pattern[str]:
    """A GBNF expression of literals, classes, groups and repetitions as a Python regular expression."""
    out, at = [], 0
    for piece in PIECES.finditer(expression):
        assert piece.start() == at, expression[at:]
        at = piece.end()
        text = piece.group()
        if text.startswith('"'):
            out.append(re.escape(re.sub(r"\\(.)", r"\1", piece.group(1))))
        elif text == "char":
            out.append(CHAR)
        elif text.strip():
            out.append("(?:" if text == "(" else text)
    assert at == len(expression)
    return re.compile("".join(out))


BOUNDS = st.one_of(st.none(), st.integers(-1200, 1200), st.integers(-(10**15), 10**15))


@settings(max_examples=150, deadline=None)
@given(BOUNDS, BOUNDS, st.integers(-1500, 1500), st.integers(-3, 3))
def test_a_range_holds_exactly_its_numbers(low: int | None, high: int | None, number: int, near: int) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    matcher = as_regex(integer_range(low, high))
    for value in (number, (low or 0) + near, (high or 0) + near):
        within = (low is None or value >= low) and (high is None or value <= high)
        assert bool(matcher.fullmatch(str(value))) == within, (low, high, value)
    for odd in ("", "-", "-0", "00", "01", "+1", "1.0"):
        assert not matcher.fullmatch(odd), odd


PATTERNS = [
    "abc",
    "^abc$",
    "^a|b$",
    "^[a-z]+$",
    "^[^a-z]*$",
    r"^\d{3}-\d{2,}$",
    r"^(?:\+?1)?[0-9]{2,4}$",
    r"\w+@\w+\.com",
    r"^[\w.-]+$",
    "^.{2,3}$",
    r'^["\\]+$',
    r"^(a|bc)*?d$",
    r"^\S+\s\S+$",
    r"^[\n\t]x$",
    r"^[é-ü]\u20ac$",
    "^$",
    r"^\D\W$",
    "^(a(b(c)?)+)+$",
    r"^[-a]]$",
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATTERNS), st.text(alphabet='abcdxz01239+-.@ \n\t"\\]éü€_com', max_size=8), st.data())
def test_a_pattern_matches_what_it_matches_in_python(pattern: str, text: str, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        text = data.draw(st.from_regex(re.compile(pattern, re.ASCII)))
        if any(0xD800 <= ord(char) < 0xE000 or char == "\x7f" for char in text):
            return
    wanted = re.search(re.sub(r"\$(?=\||$)", r"\\Z", pattern), text, re.ASCII)
    if not text.isascii() and re.search(r"\\[sSW]|\.", pattern):
        return  # Python and JSON Schema differ in which other characters are spaces or end lines
    if re.search(r"[\r\x1c-\x1f]", text):
        return
    found = as_regex(pattern_expression(pattern)).fullmatch(json.dumps(text, ensure_ascii=False)[1:-1])
    assert bool(found) == bool(wanted), (pattern, text)


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "[a", "[]", "*a", "a**", "a{2,1}", "a{x}", "(?=a)", "(?<n>a)", r"\b", r"\1", r"\p{L}", "a^b", "a$b",
     "(^a)", "(a$)", "\\", r"\ud800", r"\x0", "[z-a]", r"[\d-z]", "a{1001}", "(" * 40 + ")" * 40],
)  # fmt: skip
def test_what_a_grammar_cannot_say_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        pattern_expression(pattern)
