"""Arrival processes against their own theory: rate, coefficient of variation, distribution of gaps."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy import stats

from weighbridge.core.errors import WeighbridgeError
from weighbridge.workload.arrivals import Arrivals, Bursts, Constant, Gamma, Poisson, parse_arrivals, replayed

COUNT = 40_000


def gaps_of(process: Arrivals, seed: int = 1, count: int = COUNT) -> np.ndarray:
    times = np.fromiter(itertools.islice(process.times(random.Random(seed)), count), float)
    assert (np.diff(times) >= 0).all()
    return np.diff(times)


def test_poisson_is_exact_and_untruncated() -> None:
    gaps = gaps_of(Poisson(5.0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)
    assert stats.kstest(gaps, "expon", args=(0, 0.2)).pvalue > 0.01
    # Nothing clips long gaps: of 40,000 some exceed ten means.
    assert gaps.max() > 8 * 0.2


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_has_the_rate_and_variation_asked_for(cv: float) -> None:
    gaps = gaps_of(Gamma(5.0, cv))
    shape = 1 / cv**2
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    assert stats.kstest(gaps, "gamma", args=(shape, 0, 0.2 / shape)).pvalue > 0.01


def test_bursts_keep_the_mean_rate_and_are_overdispersed() -> None:
    times = np.fromiter(itertools.takewhile(lambda t: t < 20_000, Bursts(5.0).times(random.Random(3))), float)
    assert len(times) / 20_000 == pytest.approx(5.0, rel=0.03)
    counts, _ = np.histogram(times, np.arange(0, 20_001, 5.0))
    assert counts.var() / counts.mean() > 2.0


def test_bursts_of_factor_one_are_poisson() -> None:
    gaps = gaps_of(Bursts(5.0, factor=1.0))
    assert stats.kstest(gaps, "expon", args=(0, 0.2)).pvalue > 0.01


def test_constant_gaps() -> None:
    assert list(itertools.islice(Constant(20.0).times(random.Random(0)), 3)) == pytest.approx([0.0, 0.05, 0.1])


def test_replay_repeats_the_record_at_the_rate_asked_for() -> None:
    process = replayed([10.0, 10.1, 12.0], rate=3.0)
    times = list(itertools.islice(process.times(random.Random(0)), 7))
    assert times[0] == 0.0
    assert times[3] == pytest.approx(1.0)
    assert times[6] == pytest.approx(2.0)
    assert (times[1] - times[0]) / (times[2] - times[1]) == pytest.approx(0.1 / 1.9)


def test_short_forms() -> None:
    assert parse_arrivals("poisson", 4.0) == Poisson(4.0)
    assert parse_arrivals("gamma:2", 4.0) == Gamma(4.0, 2.0)
    assert parse_arrivals("mmpp", 4.0) == Bursts(4.0)
    assert parse_arrivals("mmpp:10:1:9", 4.0) == Bursts(4.0, 10.0, 1.0, 9.0)


@pytest.mark.parametrize("text", ["poison", "gamma", "gamma:x", "gamma:0", "mmpp:3", "poisson:3"])
def test_a_wrong_form_is_named(text: str) -> None:
    with pytest.raises(WeighbridgeError, match="arrivals"):
        parse_arrivals(text, 1.0)
