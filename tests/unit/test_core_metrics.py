"""Metrics against hand-computed values."""

import math

import pytest

from weighbridge.core.metrics import RequestRecord, adjusted, distribution, percentile, summarise
from weighbridge.core.request import Tier

CHAT = Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.05)


def record(status: str = "ok", first: float | None = 1.2, last: float | None = 2.0, tokens: int = 11) -> RequestRecord:
    return RequestRecord(
        id="r",
        scheduled_s=1.0,
        status=status,  # type: ignore[arg-type]
        first_token_s=first,
        last_token_s=last,
        output_tokens=tokens,
        tier="chat",
        instance="i",
    )


def test_ttft_tpot_e2e() -> None:
    r = record()
    assert r.ttft_s == pytest.approx(0.2)
    assert r.e2e_s == pytest.approx(1.0)
    assert r.tpot_s == pytest.approx(0.08)
    assert record(tokens=1).tpot_s is None
    assert record("cancelled").e2e_s is None


def test_percentiles_interpolate_as_numpy_does() -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted([3.0, 1.0, 7.0, 2.0, 9.5])
    for q in (0, 10, 50, 90, 99, 100):
        assert percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)))
    assert math.isnan(distribution([]).p99)


def test_attainment_counts_everything_offered() -> None:
    records = [
        record(last=1.4),
        record(),  # TPOT 0.08 > 0.05
        record("rejected", None, None, 0),
        record("failed", 1.1, 1.2, 2),
    ]
    summary = summarise(records, {"chat": CHAT}, window_s=2.0)
    assert summary.attainment == 0.25
    assert summary.goodput_per_s == 0.5
    assert summary.shed_rate == 0.25
    assert summary.by_status == {"ok": 2, "rejected": 1, "failed": 1}


def test_adjusted_percentiles_count_a_missing_first_token_as_infinite() -> None:
    records = [record() for _ in range(98)] + [record("failed", None, None, 0)] * 2
    assert adjusted(records, "ttft_s", 50) == pytest.approx(0.2)
    assert adjusted(records, "ttft_s", 99) == math.inf
