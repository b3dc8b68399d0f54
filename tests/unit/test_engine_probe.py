"""What the start-up probe makes of its few measurements."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.cost.step import step_seconds
from weighbridge.engine.probe import SHORT_PREFILL_TOKENS, Probed

STAIRS = Probed(short_prefill_s=0.36, prefill_tokens=256, prefill_s=1.416, decode_s={1: 0.0125, 2: 0.025, 4: 0.039})
seconds = st.floats(1e-4, 10.0)


def test_the_model_gives_back_what_was_measured() -> None:
    step = STAIRS.step
    assert step_seconds(step, prefill_tokens=256) == pytest.approx(1.416)
    assert step_seconds(step, prefill_tokens=64) == pytest.approx(0.36)
    for count, took in STAIRS.decode_s.items():
        assert step_seconds(step, sequences=count) == pytest.approx(took)
    assert step_seconds(step, sequences=3) == pytest.approx(0.032), "between the points, a line"
    assert STAIRS.together_tokens_per_s == pytest.approx(4 / 0.039)
    assert STAIRS.rates.decode_tokens_per_s == pytest.approx(80.0)


@given(seconds, seconds, st.lists(seconds, min_size=1, max_size=6), st.integers(1, 512))
def test_a_disturbed_probe_still_gives_a_model_that_makes_sense(
    short: float, long: float, decode: list[float], tokens: int
) -> None:
    """Whatever was measured: no negative term, more work never takes less, and a lone sequence takes what it took."""
    probed = Probed(short, max(tokens, SHORT_PREFILL_TOKENS), long, {i + 1: took for i, took in enumerate(decode)})
    step = probed.step
    assert min(step.base_s, step.prefill_s, step.sequence_s) >= 0.0
    steps = [step_seconds(step, sequences=count) for count in range(len(decode) + 3)]
    assert all(more >= less * (1 - 1e-12) for less, more in itertools.pairwise(steps))
    assert steps[1] == pytest.approx(decode[0])
    assert step_seconds(step, prefill_tokens=probed.prefill_tokens) == pytest.approx(long)
