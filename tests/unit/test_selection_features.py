"""Routing text and hashed features: what is kept, what is equal, what is distinct."""

from __future__ import annotations

import numpy as np
import pytest

from weighbridge.selection.features import SKETCH_DIMS, HashedNgrams
from weighbridge.selection.text import TextLimits, clip, plain_text, routing_text

ENCODER = HashedNgrams()


def cosine(a: str, b: str) -> float:
    return float(ENCODER.encode(a).sketch() @ ENCODER.encode(b).sketch())


def test_head_and_tail_are_kept_and_the_middle_goes() -> None:
    limits = TextLimits(head=10, tail=5, context=5, total=20)
    text = "HEAD-56789" + "x" * 100 + "-TAIL"
    built = plain_text(text, limits)
    assert built.text == "HEAD-56789\n-TAIL"
    assert built.truncated
    assert built.prompt_bytes == len(text)


def test_the_head_of_the_last_turn_decides_more_than_its_position_in_a_long_prompt() -> None:
    signal = "Translate this sentence into French."
    long = signal + " filler words here" * 2000
    assert plain_text(long).text.startswith(signal)
    assert clip("abcdef", 2, 0) == "ab\n"


def test_order_is_last_user_turn_then_system_then_earlier_turns() -> None:
    built = routing_text(
        [
            {"role": "system", "content": "SYSTEM"},
            {"role": "user", "content": "FIRST"},
            {"role": "assistant", "content": "REPLY"},
            {"role": "user", "content": "LAST"},
        ]
    )
    assert built.text.split("\n") == ["LAST", "SYSTEM", "REPLY", "FIRST"]
    assert not built.truncated


def test_parts_null_content_tool_calls_and_junk_are_handled() -> None:
    built = routing_text(
        [
            {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}, 7]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "content": "42"},
            "not a message",
        ],
        [{"type": "function", "function": {"name": "add", "parameters": {"a": [1, True, None]}}}, 3],
    )
    assert built.text.startswith("look")
    assert "add {}" in built.text
    assert "42" in built.text
    assert built.modalities == {"text", "vision"}
    assert built.has_tools
    assert built.tool_names == ("add",)


def test_no_messages_give_an_empty_text() -> None:
    assert routing_text([]).text == ""
    assert ENCODER.encode("").tokens == 0
    assert ENCODER.encode(" \n ").buckets.size == 0
    assert not ENCODER.encode("").sketch().any()


@pytest.mark.parametrize(
    "text", ["hello world", "数学の問題を解いてください", "Привет, как дела?", "😀😀 a", "\ud800 lone", "x"]
)
def test_features_are_unit_length_sorted_and_repeatable(text: str) -> None:
    one, two = ENCODER.encode(text), ENCODER.encode(text)
    assert np.array_equal(one.buckets, two.buckets)
    assert np.array_equal(one.values, two.values)
    assert float(one.values @ one.values) == pytest.approx(1.0, abs=1e-5)
    assert (np.diff(one.buckets) > 0).all()
    assert 0 <= one.buckets.min() <= one.buckets.max() < ENCODER.buckets
    assert one.sketch().shape == (SKETCH_DIMS,)


def test_both_ways_of_counting_agree() -> None:
    """A long text is counted by a pass over all buckets, a short one by sorting; the words must come out alike."""
    short, long = "alpha beta gamma ", "alpha beta gamma " * 200
    assert set(ENCODER.encode(short).buckets.tolist()) <= set(ENCODER.encode(long).buckets.tolist())


def test_case_and_white_space_do_not_matter_but_words_do() -> None:
    assert cosine("Write a  PYTHON\nfunction", "write a python function") == pytest.approx(1.0, abs=1e-5)
    assert cosine("write a python function", "what is the capital of France") < 0.5


def test_words_tell_token_and_bucket() -> None:
    words = ENCODER.words("  Sum(a_1, 23) 数学")
    assert [word for word, _ in words] == ["sum", "(", "a_", "1", ",", "2", "3", ")", "数", "学"]
    present = set(ENCODER.encode("  Sum(a_1, 23) 数学").buckets.tolist())
    assert {bucket for _, bucket in words} <= present


def test_encoder_name_holds_its_size() -> None:
    assert HashedNgrams(1024).name != ENCODER.name
