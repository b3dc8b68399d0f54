"""Replay, and the fit to whole requests, against a simulated engine whose cost is known."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from weighbridge.calibrate.fitting import compare, fit_requests
from weighbridge.calibrate.replay import RecordedRequest, replay
from weighbridge.core.instance import StepTerms
from weighbridge.cost.fit import Design
from weighbridge.scheduling.mixing import Mixing
from weighbridge.scheduling.scheduler import SchedulerConfig

TRUE = StepTerms(base_s=0.012, prefill_s=5e-5, attend_s=4e-9, sequence_s=4e-5, kv_s=6e-8)
FIRST_80 = [index < 80 for index in range(240)]
CONFIG = SchedulerConfig(token_budget=1024, max_sequences=64, blocks=4000)


def recorded(count: int, rate: float, seed: int, config: SchedulerConfig = CONFIG) -> list[RecordedRequest]:
    """A run of an engine that costs exactly TRUE."""
    rng = random.Random(seed)
    now, drafts = 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        prompt, output = 1 + int(rng.expovariate(1 / 400)), 1 + int(rng.expovariate(1 / 100))
        drafts.append(RecordedRequest(str(index), now, now, now, prompt, output))
    done = replay(drafts, TRUE, config)
    return [dataclasses.replace(r.request, first_token_s=r.first_token_s, last_token_s=r.last_token_s) for r in done]


@pytest.mark.parametrize("mixing", ["mixed", "split", "prefill_first"])
@pytest.mark.parametrize("blocks", [4000, 400])
def test_replayed_work_times_coefficients_is_the_replayed_time(blocks: int, mixing: Mixing) -> None:
    config = dataclasses.replace(CONFIG, blocks=blocks, mixing=mixing)
    done = replay(recorded(120, 12.0, 3, config), TRUE, config)
    if blocks == 400 and mixing != "prefill_first":
        assert any(r.preemptions for r in done), "the small cache should preempt"
    design = Design(("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s"))
    coefficients = np.array([getattr(TRUE, term) for term in design.terms])
    for r in done:
        for observation in r.observations(overhead=False):
            assert float(design.matrix([observation])[0] @ coefficients) == pytest.approx(observation.seconds, rel=1e-9)


def test_overhead_delays_arrival_at_the_scheduler_only() -> None:
    lone = [RecordedRequest("a", 1.0, 1.0, 1.0, 100, 10)]
    plain, late = replay(lone, TRUE, CONFIG)[0], replay(lone, TRUE, CONFIG, overhead_s=0.2)[0]
    assert late.ttft_s == pytest.approx(plain.ttft_s + 0.2)
    assert late.tpot_s == pytest.approx(plain.tpot_s)


def test_fit_on_the_first_requests_forecasts_the_rest() -> None:
    requests = recorded(240, 14.0, 5)
    result = fit_requests(requests, CONFIG, fitted=FIRST_80, rng=np.random.default_rng(0))
    errors = compare(result.replayed[80:])
    assert errors["e2e_s"].mape < 0.03
    assert errors["tpot_s"].mape < 0.03
    assert abs(errors["ttft_s"].bias_mean) < 0.05  # of each one the phase of the running step is chance
    assert result.fit.terms.base_s == pytest.approx(TRUE.base_s, rel=0.15)
    assert result.fit.terms.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.15)


def test_a_wrong_kv_capacity_spoils_the_forecast() -> None:
    config = dataclasses.replace(CONFIG, blocks=400)
    requests = recorded(240, 14.0, 6, config)
    right = fit_requests(requests, config, fitted=FIRST_80, rng=np.random.default_rng(0))
    wrong = fit_requests(requests, CONFIG, fitted=FIRST_80, rng=np.random.default_rng(0))
    assert compare(right.replayed[80:])["e2e_s"].mape < 0.05
    assert compare(wrong.replayed[80:])["e2e_s"].mape > 0.1
