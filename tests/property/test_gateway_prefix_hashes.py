"""What is remembered of earlier prompts changes no hash."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weighbridge.gateway import prefix_hashes as module
from weighbridge.gateway.prefix_hashes import PrefixHasher, prefix_hashes

PROMPTS = st.lists(st.sampled_from([b"a", b"b", b"ab", b"abababab", b"x" * 9]), max_size=14).map(b"".join)


@given(st.lists(st.tuples(st.sampled_from("tu"), st.sampled_from(["m", ""]), PROMPTS), max_size=12), st.integers(1, 5))
def test_hashes_are_those_of_a_prompt_that_comes_alone(asked: list[tuple[str, str, bytes]], block_bytes: int) -> None:
    hasher = PrefixHasher(block_bytes, 12)
    for tenant, model, text in asked:
        alone = prefix_hashes(f"{tenant}\0{model}".encode(), text, block_bytes, 12)
        assert hasher.hashes(tenant, model, text) == alone


def test_few_prompts_are_remembered() -> None:
    hasher = PrefixHasher(2, 8)
    for number in range(1000):
        hasher.hashes("t", "m", b"%d" % number * 4)
    assert len(hasher._last) <= module.REMEMBERED
