"""Tool calls found in streamed text."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.engine.tools import ToolParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "<"]}}\n</tool_call>'
OTHER = '<tool_call>{"name": "g", "parameters": {}}</tool_call>'


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser()
    content, calls = "", []
    for piece in pieces:
        text, found = parser.feed(piece)
        content += text
        calls += [(call.name, call.arguments) for call in found]
    return content + parser.flush(), calls


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=15))
def test_two_calls_are_found_wherever_the_text_is_cut(cuts: list[int]) -> None:
    text = f"Let me see. <b>{CALL}\n{OTHER}"
    borders = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    content, calls = parse([text[a:b] for a, b in zip(borders, borders[1:], strict=False)])  # noqa: RUF007
    assert content.rstrip() == "Let me see. <b>"
    assert [name for name, _ in calls] == ["f", "g"]
    assert json.loads(calls[0][1]) == {"a": [1, "<"]}
    assert calls[1][1] == "{}"


def test_what_is_no_call_stays_text() -> None:
    assert parse(["a <tool", "_box> b"]) == ("a <tool_box> b", [])
    assert parse(["<tool_call>not json</tool_call>"]) == ("<tool_call>not json</tool_call>", [])
    assert parse(["x <tool_call>{unfinished"]) == ("x <tool_call>{unfinished", [])
