"""Stability: the classical rule by hand, the KV twin, and the fixed point of the step time."""

from __future__ import annotations

import math

import pytest

from weighbridge.core.errors import ConfigError
from weighbridge.core.instance import StepTerms
from weighbridge.plan.stability import demand_of, stability, work_seconds
from weighbridge.plan.stability_report import answer

CONSTANT = StepTerms(base_s=0.01, prefill_s=0.0)
FITTED = StepTerms(base_s=0.011, prefill_s=40e-6, sequence_s=30e-6, kv_s=80e-9)


def test_the_classical_rule() -> None:
    # budget 100 per 0.01 s = 10,000 tokens/s; 100 tokens per request: stable below 100 requests/s
    demand = demand_of([(60, 40)], 100)
    below = stability(99.0, demand, CONSTANT, token_budget=100)
    above = stability(101.0, demand, CONSTANT, token_budget=100)
    assert (below.stable, above.stable) == (True, False)
    assert below.max_rate == pytest.approx(100.0)
    assert below.head_room == pytest.approx(0.01)
    assert "<" in below.expression


def test_kv_binds_when_memory_is_small() -> None:
    # prompt 10 in one step, 3 outputs: steps hold 10, then 11 and 12 tokens read by two decode steps = 33 token-steps
    demand = demand_of([(10, 3)], 100)
    assert demand.kv_token_steps == 10 + 11 + 12
    assert demand.steps == 3
    found = stability(1.0, demand, CONSTANT, token_budget=100, kv_tokens=33, max_sequences=1000)
    assert found.binding == "kv"
    assert found.max_rate == pytest.approx(33 / (33 * 0.01))


def test_sequences_bind_when_the_batch_is_capped() -> None:
    demand = demand_of([(10, 100)], 1000)
    found = stability(1.0, demand, CONSTANT, token_budget=1000, max_sequences=4)
    assert found.binding == "sequences"
    assert found.max_rate == pytest.approx(4 / (100 * 0.01))


def test_step_time_is_the_fixed_point_at_every_limit() -> None:
    demand = demand_of([(500, 150), (3000, 100)], 2048)
    work = work_seconds(FITTED, demand)
    for rate in (1.0, 5.0, 10.0):
        found = stability(rate, demand, FITTED, token_budget=2048, kv_tokens=96_000)
        assert found.step_s == pytest.approx(FITTED.base_s + rate * work * found.step_s)
    edge = stability(1.0, demand, FITTED, token_budget=2048, kv_tokens=96_000).limits
    for limit, need, capacity in (
        (edge[0], demand.prompt_tokens + demand.output_tokens, 2048),
        (edge[1], demand.kv_token_steps, 96_000),
    ):
        step = FITTED.base_s / (1 - limit.max_rate * work)
        assert limit.max_rate * need * step == pytest.approx(capacity)


def test_instances_share_the_rate() -> None:
    demand = demand_of([(60, 40)], 100)
    one = stability(10.0, demand, FITTED, token_budget=100)
    four = stability(40.0, demand, FITTED, token_budget=100, instances=4)
    assert four.max_rate == pytest.approx(4 * one.max_rate)
    assert four.step_s == pytest.approx(one.step_s)


def test_beyond_compute_there_is_no_step_time() -> None:
    demand = demand_of([(1000, 10)], 2048)
    found = stability(1000.0, demand, FITTED, token_budget=2048)
    assert not found.stable
    assert math.isinf(found.step_s)
    assert "exceeds one second per second" in found.expression


def test_answers_name_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="--step-time"):
        answer(rate=1.0)
    with pytest.raises(ConfigError, match="--rate: must be a finite number above 0"):
        answer(rate=0.0, step_time=0.01)
    found = answer(rate=1.0, prompt="exp:500", output="exp:150", step_time=0.02)
    assert found.demand.prompt_tokens == pytest.approx(500, rel=0.03)
    assert found.to_json()["binding"] == "tokens"
