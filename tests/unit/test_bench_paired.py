"""Paired differences against scipy, and what is said of few runs."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from weighbridge.bench.paired import METRICS, interval, paired


def row(attainment: float) -> dict[str, float]:
    return {**dict.fromkeys(METRICS, 1.0), "attainment": attainment}


def test_the_interval_is_students() -> None:
    values = [0.91, 0.94, 0.90, 0.97, 0.93]
    found = interval(values)
    low, high = stats.t.interval(0.95, 4, loc=found["mean"], scale=stats.sem(values))
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-4)
    assert found["sd"] == pytest.approx(float(stats.tstd(values)))


def test_one_value_has_no_interval_and_infinity_is_left_out() -> None:
    assert interval([0.5])["low"] is None
    assert interval([0.5, math.inf])["count"] == 1
    assert interval([])["mean"] is None


def test_pairing_removes_what_the_schedules_have_in_common() -> None:
    # schedules differ much, the arms differ by a constant: only the paired difference sees it
    base, better = [0.50, 0.70, 0.90], [0.53, 0.73, 0.93]
    table = paired({"a": [row(v) for v in base], "b": [row(v) for v in better]})
    difference = table["b"]["difference"]["attainment"]
    assert difference["mean"] == pytest.approx(0.03)
    assert difference["decided"]
    assert table["a"]["attainment"]["sd"] == pytest.approx(0.2)
    assert "difference" not in table["a"]


def test_noise_is_not_decided() -> None:
    table = paired({"a": [row(v) for v in (0.5, 0.6, 0.7)], "b": [row(v) for v in (0.6, 0.5, 0.75)]})
    assert not table["b"]["difference"]["attainment"]["decided"]
