"""The search for the knee, on servers whose capacity is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weighbridge.bench import sweep as sweep_module
from weighbridge.bench.run import RunOptions
from weighbridge.bench.schedule import DrawOptions
from weighbridge.bench.sweep import SweepOptions, picture, sweep
from weighbridge.core.errors import ConfigError


@dataclass
class Ended:
    stopped: bool


@dataclass
class Measured:
    report: dict[str, Any]
    result: Ended


def serve(monkeypatch: pytest.MonkeyPatch, capacity: float, stop_at: float = float("inf")) -> list[float]:
    """Replaces the measurement by a server that attains everything up to `capacity` and half of it above.

    From the rate `stop_at` on the measurement is interrupted.
    """
    tried: list[float] = []

    def measure(options: RunOptions) -> Measured:
        rate = options.plan.rate
        assert rate is not None
        tried.append(rate)
        attained = 1.0 if rate <= capacity else 0.5
        spread = {"p50": 0.1, "p99": 0.2}
        report: dict[str, Any] = {"attainment": attained, "goodput_per_s": attained * rate, "offered": 100}
        report |= {"offered_rate": rate, "verdict": "VALID", "by_status": {"ok": 100}, "shed_rate": 0.0}
        report |= {"output_tokens_per_s": 1.0, "ttft_s": spread, "tpot_s": spread, "e2e_s": spread}
        return Measured({**report, "adjusted": {"ttft_s": spread}}, Ended(rate >= stop_at))

    monkeypatch.setattr(sweep_module, "measure", measure)
    return tried


OPTIONS = RunOptions(url="http://127.0.0.1:1", plan=DrawOptions(rate=1.0, duration_s=1.0))


def run(tmp_path: Path, how: SweepOptions, rates: list[float] | None = None) -> dict[str, Any]:
    return sweep(OPTIONS, how, tmp_path, lambda text: None, rates)


def test_the_knee_is_closed_in_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = serve(monkeypatch, capacity=40.0)
    found = run(tmp_path, SweepOptions(start=1.0, refine=5))
    assert 38.0 <= found["knee_rate"] <= 40.0
    assert [row["rate"] for row in found["rows"]] == sorted(tried)
    assert "lies between" in found["why"]
    assert "knee" in picture(found)


def test_a_start_above_the_knee_and_a_server_that_never_saturates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, capacity=5.0)
    above = run(tmp_path, SweepOptions(start=10.0))
    assert above["knee_rate"] is None
    assert "start lower" in above["why"]
    serve(monkeypatch, capacity=1e9)
    endless = run(tmp_path, SweepOptions(start=1.0, steps=3))
    assert "not saturated after 3 steps" in endless["why"]


def test_given_rates_are_measured_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve(monkeypatch, capacity=8.0)
    found = run(tmp_path, SweepOptions(), rates=[16.0, 2.0, 4.0])
    assert [row["rate"] for row in found["rows"]] == [2.0, 4.0, 16.0]
    assert found["knee_rate"] == 4.0


def test_a_start_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--from"):
        run(tmp_path, SweepOptions(start=0.0))


def test_an_interrupt_ends_the_search_and_not_only_one_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = serve(monkeypatch, capacity=40.0, stop_at=4.0)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SweepOptions(start=1.0))
    assert max(tried) >= 4.0
    assert sum(rate >= 4.0 for rate in tried) == 1
