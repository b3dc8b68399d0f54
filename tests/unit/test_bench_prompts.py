"""Prompt texts: length by calibration, uniqueness, shared blocks."""

from __future__ import annotations

import pytest

from weighbridge.bench.prompts import Calibration, calibration_of, prompt_text
from weighbridge.bench.schedule import Planned


def planned(tokens: int, name: str = "r0", blocks: tuple[int, ...] = (), size: int = 0) -> Planned:
    return Planned(name, 0.0, tokens, 1, blocks=blocks, block_tokens=size)


def test_calibration_is_the_line_through_two_observations() -> None:
    calibration = calibration_of((16, 7 + 20), (80, 7 + 100))
    assert (calibration.fixed, calibration.per_word) == pytest.approx((7.0, 1.25))
    assert calibration.measured
    assert calibration.words(107) == 80
    assert calibration.words(1) == 1


def test_a_prompt_has_the_words_the_calibration_asks_for() -> None:
    calibration = Calibration(fixed=7.0, per_word=1.0)
    for tokens in (8, 10, 15, 16, 500, 20_000):
        assert len(prompt_text(planned(tokens), calibration, "run").split()) == tokens - 7


def test_texts_repeat_by_name_and_differ_between_requests_and_runs() -> None:
    one = Calibration()
    text = prompt_text(planned(100), one, "run")
    assert text == prompt_text(planned(100), one, "run")
    assert text.split()[:8] != prompt_text(planned(100, "r1"), one, "run").split()[:8]
    assert text.split()[:8] != prompt_text(planned(100), one, "other").split()[:8]


def test_equal_blocks_are_equal_text() -> None:
    one = Calibration()
    a = prompt_text(planned(50, "a", (11, 12, 13), 16), one, "run").split()
    b = prompt_text(planned(50, "b", (11, 12, 99), 16), one, "run").split()
    assert len(a) == len(b) == 50
    assert a[:32] == b[:32]
    assert a[32:48] != b[32:48]
    other_run = prompt_text(planned(50, "a", (11, 12, 13), 16), one, "later").split()
    assert other_run[:16] != a[:16]
