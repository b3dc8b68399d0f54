"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from weighbridge.dashboard.words import age, count, percent, plural, rate, seconds, signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (math.nan, "–"), (math.inf, "never"), (0.0, "0 s"), (0.0042, "4.2 ms"), (0.371, "371 ms"),
        (0.9994, "999 ms"), (0.9996, "1.00 s"), (1.534, "1.53 s"), (12.44, "12.4 s"), (200.0, "3 min 20 s"),
        (7320.0, "2 h 2 min"), (-0.05, "−50 ms"),
    ],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.004, "0 %"), (-0.004, "0 %"), (0.22, "+22 %"), (-0.02, "−2 %"), (None, "–")]
)
def test_what_rounds_to_zero_has_no_sign(value: float | None, text: str) -> None:
    assert signed(value) == text


def test_the_rest() -> None:
    assert percent(0.979, 1) == "97.9 %"
    assert count(12345.6) == "12,346"
    assert count(None) == "–"
    assert rate(46.31) == "46.3/s"
    assert rate(0.351) == "0.35/s"
    assert plural(1, "instance") == "1 instance"
    assert plural(2000, "instance") == "2,000 instances"
    assert age(0.53) == "0.5 s"
