"""Any request body gives a bounded text, valid features and a decision."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.core.errors import RequestError
from weighbridge.selection.features import HashedNgrams
from weighbridge.selection.opening import open_selector
from weighbridge.selection.tensors import TensorError, pack, unpack
from weighbridge.selection.text import TextLimits, clip, routing_text

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
part = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "input_audio", "file"]), "text": junk})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
    optional={"content": st.text(max_size=300) | st.lists(part | junk, max_size=3) | junk, "tool_calls": junk},
)
messages = st.lists(message | junk, max_size=6)
SELECTOR = open_selector()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=200), head=st.integers(1, 50), tail=st.integers(0, 50))
def test_clip_keeps_both_ends_and_the_bound(text: str, head: int, tail: int) -> None:
    kept = clip(text, head, tail)
    assert len(kept) <= head + tail + 1
    assert kept.startswith(text[:head])
    assert kept.endswith(text[-tail:] if tail else "")
    if len(text) <= head + tail:
        assert kept == text


@settings(max_examples=60, deadline=None)
@given(said=messages, tools=st.lists(junk, max_size=3))
def test_any_body_gives_a_bounded_text_and_a_decision(said: list[Any], tools: list[Any]) -> None:
    limits = TextLimits()
    built = routing_text(said, tools, limits)
    assert len(built.text) <= limits.total + 1
    features = HashedNgrams().encode(built.text)
    assert np.isfinite(features.values).all()
    assert features.buckets.size == 0 or abs(float(features.values @ features.values) - 1.0) < 1e-4
    try:
        decision = SELECTOR.decide(said, tools)
    except RequestError as error:
        assert "no model can serve" in str(error)
        return
    assert decision.chosen().excluded is None
    assert all(0.0 <= candidate.quality <= 1.0 and candidate.cost_usd >= 0.0 for candidate in decision.candidates)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=400), size=st.sampled_from([512, 4096, 1 << 15]))
def test_words_are_among_the_features(text: str, size: int) -> None:
    encoder = HashedNgrams(size)
    buckets = set(encoder.encode(text).buckets.tolist())
    words = encoder.words(text)
    assert {bucket for _, bucket in words} <= buckets
    assert encoder.encode(text).tokens == len(words)


@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_no_bytes_crash_the_tensor_reader(data: bytes) -> None:
    with contextlib.suppress(TensorError):
        unpack(data)


@settings(max_examples=60, deadline=None)
@given(
    arrays=st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
        st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(lambda v: np.array(v, np.float32)),
        max_size=4,
    )
)
def test_tensors_read_back_as_written(arrays: dict[str, Any]) -> None:
    back = unpack(pack(arrays))
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
