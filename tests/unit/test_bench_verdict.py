"""When a measurement is not to be trusted."""

from __future__ import annotations

from array import array

from weighbridge.bench.load import LoadResult
from weighbridge.bench.record import BenchRecord
from weighbridge.bench.verdict import judge


def result(lags: list[float], e2e: float = 0.2, **changes: object) -> LoadResult:
    rows = [
        BenchRecord(id=f"r{k}", scheduled_s=0.0, status="ok", sent_s=lag, lag_s=lag, last_token_s=e2e, output_tokens=1)
        for k, lag in enumerate(lags)
    ]
    found = LoadResult(rows, array("d"), array("d"), array("l"), wall_s=10.0, cpu_s=1.0)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_a_punctual_run_is_valid() -> None:
    verdict = judge(result([0.001] * 100), 100)
    assert verdict.valid
    assert verdict.word == "VALID"
    assert verdict.lag_limit_s == 0.005


def test_a_late_generator_is_invalid_and_says_why() -> None:
    verdict = judge(result([0.001] * 90 + [0.1] * 10), 100)
    assert verdict.word == "INVALID"
    assert "send lag p99 100.0 ms exceeds 5.0 ms" in verdict.reasons[0]


def test_the_limit_grows_with_what_is_measured_and_can_be_set() -> None:
    slow = result([0.02] * 100, e2e=10.0)
    assert judge(slow, 100).valid
    assert not judge(slow, 100, max_lag_s=0.01).valid


def test_requests_that_were_never_offered_make_it_invalid() -> None:
    assert not judge(result([0.0] * 99), 100).valid
    died = judge(result([0.0] * 100, failure="load process 1 died; ..."), 100)
    assert not died.valid


def test_oddities_are_warnings() -> None:
    verdict = judge(result([0.0] * 100, clock_jump_s=3600.0, cpu_s=9.9, failure="cannot write x: disk full"), 100)
    assert verdict.valid
    text = " ".join(verdict.warnings)
    assert "the wall clock jumped by +3600.0 s; latencies are unaffected" in text
    assert "99 % of a processor" in text
    assert "disk full" in text
