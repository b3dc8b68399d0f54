"""The online cost model: it follows within the profile's error, and breaks free only for a lasting change."""

from __future__ import annotations

import math
import random

import pytest

from weighbridge.core.instance import Rates, StepTerms
from weighbridge.cost.online import BOUND_ERRORS, DecodeSample, OnlineCost, PrefillSample
from weighbridge.cost.step import attended_tokens, step_seconds

STEP = StepTerms(base_s=0.01, prefill_s=1e-3, attend_s=1e-7, sequence_s=2e-3, kv_s=1e-6)


def decode(factor: float, rng: random.Random, noise: float = 0.03) -> DecodeSample:
    sequences, kv, steps = rng.randint(1, 4), rng.randint(100, 2000), rng.randint(4, 30)
    seconds = steps * step_seconds(STEP, sequences=sequences, kv_tokens=kv) * factor * rng.lognormvariate(0.0, noise)
    return DecodeSample(steps, sequences, kv, seconds)


def prefill(factor: float, rng: random.Random, noise: float = 0.03) -> PrefillSample:
    tokens = rng.randint(50, 800)
    seconds = step_seconds(STEP, prefill_tokens=tokens, attended_tokens=attended_tokens(0, tokens))
    return PrefillSample(tokens, seconds * factor * rng.lognormvariate(0.0, noise))


def test_true_observations_change_nothing() -> None:
    rng = random.Random(1)
    cost = OnlineCost(STEP, None, 0.05)
    for _ in range(2000):
        cost.observe_decode(decode(1.0, rng))
        cost.observe_prefill(prefill(1.0, rng))
    assert cost.level == "profile"
    assert cost.drifts == 0
    assert cost.step.base_s == pytest.approx(STEP.base_s, rel=0.03)
    assert cost.step.prefill_s == pytest.approx(STEP.prefill_s, rel=0.03)


def test_noise_above_the_profile_error_raises_no_alarm() -> None:
    rng = random.Random(2)
    cost = OnlineCost(STEP, None, 0.05)
    for _ in range(2000):
        cost.observe_decode(decode(1.0, rng, noise=0.15))
    assert cost.drifts == 0


def test_a_small_bias_is_learned_and_stays_within_the_error() -> None:
    rng = random.Random(3)
    cost = OnlineCost(STEP, None, 0.10)
    for _ in range(60):
        cost.observe_decode(decode(1.12, rng))
    assert cost.level == "profile"
    assert cost.step.sequence_s / STEP.sequence_s == pytest.approx(1.12, rel=0.03)
    assert cost.step.prefill_s == STEP.prefill_s, "prefill was not observed"
    assert math.log(cost.step.sequence_s / STEP.sequence_s) <= BOUND_ERRORS * 0.10


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.4])
def test_a_lasting_change_is_noticed_within_ten_observations_and_then_followed(factor: float) -> None:
    rng = random.Random(4)
    cost = OnlineCost(STEP, None, 0.05)
    for _ in range(50):
        cost.observe_decode(decode(1.0, rng))
    needed = 0
    while cost.level == "profile":
        cost.observe_decode(decode(factor, rng))
        needed += 1
        assert needed <= 10
    assert cost.error > 0.05
    for _ in range(12):
        cost.observe_decode(decode(factor, rng))
        cost.observe_prefill(prefill(factor, rng))
    assert cost.step.base_s / STEP.base_s == pytest.approx(factor, rel=0.06)
    assert cost.step.prefill_s / STEP.prefill_s == pytest.approx(factor, rel=0.08)


def test_one_outlier_is_not_a_change() -> None:
    rng = random.Random(5)
    cost = OnlineCost(STEP, None, 0.05)
    for index in range(300):
        cost.observe_decode(decode(20.0 if index % 25 == 24 else 1.0, rng))
    assert cost.level == "profile"
    assert cost.step.base_s == pytest.approx(STEP.base_s, rel=0.05)


def test_rates_alone_are_refined_too_and_short_prompts_are_left_out() -> None:
    cost = OnlineCost(None, Rates(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0), None)
    assert not cost.has_step
    for _ in range(30):
        cost.observe_prefill(PrefillSample(200, 0.02 + 0.25))
    assert cost.step.prefill_s == pytest.approx(0.00125, rel=0.05)
    cost.observe_prefill(PrefillSample(5, 1.0))
    assert cost.excluded == 1


def test_news_is_told_once() -> None:
    rng = random.Random(6)
    cost = OnlineCost(STEP, None, 0.10)
    assert not cost.news()
    for _ in range(20):
        cost.observe_decode(decode(1.1, rng))
    assert cost.news()
    assert not cost.news()
    with pytest.raises(ValueError, match="needs a step-time model or rates"):
        OnlineCost(None, None, None)


def test_a_profile_wrong_from_the_start_is_mended_where_it_is_seen_and_a_change_is_carried_over() -> None:
    rng = random.Random(7)
    wrong, changed = OnlineCost(STEP, None, 0.05), OnlineCost(STEP, None, 0.05)
    for _ in range(30):
        changed.observe_decode(decode(1.0, rng))
    for cost in (wrong, changed):
        for _ in range(30):
            cost.observe_decode(decode(3.0, rng))
        assert cost.level == "online"
        assert cost.step.base_s / STEP.base_s == pytest.approx(3.0, rel=0.06)
    assert wrong.step.prefill_s == STEP.prefill_s
    assert changed.step.prefill_s / STEP.prefill_s == pytest.approx(3.0, rel=0.1)
