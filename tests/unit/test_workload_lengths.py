"""Length distributions: means, ranges and short forms."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weighbridge.core.errors import WeighbridgeError
from weighbridge.workload.lengths import Exponential, Fixed, Lengths, Uniform, empirical, lognormal_cv, parse_lengths


def drawn(lengths: Lengths, count: int = 30_000) -> np.ndarray:
    rng = random.Random(5)
    return np.array([lengths.draw(rng) for _ in range(count)])


@pytest.mark.parametrize(
    "lengths",
    [Fixed(7), Exponential(150.0), Exponential(1.0), Uniform(3, 9), lognormal_cv(300.0, 0.8), empirical([1, 1, 50, 9])],
)
def test_the_mean_is_the_mean(lengths: Lengths) -> None:
    values = drawn(lengths)
    assert values.mean() == pytest.approx(lengths.mean, rel=0.03)
    assert values.min() >= 1
    assert values.dtype.kind == "i"


def test_exponential_is_memoryless() -> None:
    values = drawn(Exponential(100.0), 60_000)
    beyond = values[values > 150] - 150
    assert beyond.mean() == pytest.approx(100.0, rel=0.04)


def test_lognormal_has_its_coefficient_of_variation() -> None:
    values = drawn(lognormal_cv(1000.0, 1.5), 60_000)
    assert values.std() / values.mean() == pytest.approx(1.5, rel=0.1)


def test_short_forms() -> None:
    assert parse_lengths("exp:500") == Exponential(500.0)
    assert parse_lengths("fixed:128") == Fixed(128) == parse_lengths("128")
    assert parse_lengths("lognormal:300:0.8") == lognormal_cv(300.0, 0.8)
    assert parse_lengths("uniform:10:50") == Uniform(10, 50)


@pytest.mark.parametrize("text", ["", "exp", "exp:-1", "exp:nan", "uniform:5:1", "fixed:0", "zipf:3", "lognormal:3"])
def test_a_wrong_form_names_the_field(text: str) -> None:
    with pytest.raises(WeighbridgeError, match="--input"):
        parse_lengths(text, "--input")
