"""Error bands: nine tenths of what happens lies inside the 90 % band, in a queue too; and the forecast capacity."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import numpy as np
import pytest

from tests.unit.test_calibrate_replay import CONFIG, TRUE, recorded
from weighbridge.calibrate.bands import draw_residuals, request_bands
from weighbridge.calibrate.check import Traffic, forecast_capacity, require_match
from weighbridge.calibrate.endpoint import Endpoint
from weighbridge.calibrate.engines import config_of
from weighbridge.calibrate.fitting import METRICS, pairs, residual_quantiles
from weighbridge.calibrate.replay import RecordedRequest, replay
from weighbridge.core.errors import ProfileError
from weighbridge.core.instance import Limits, Rates, StepTerms
from weighbridge.cost.profile import Profile, Provenance, Quantiles

RATES = Rates(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0)


def noisy(count: int, rate: float, seed: int) -> list[RecordedRequest]:
    """A run whose waiting and decoding are off the model by 6 % a request."""
    rng = random.Random(seed)
    found = []
    for r in recorded(count, rate, seed):
        first = r.arrival_s + r.ttft_s * rng.lognormvariate(0.0, 0.06)
        last = first + (r.last_token_s - r.first_token_s) * rng.lognormvariate(0.0, 0.06)
        found.append(dataclasses.replace(r, first_token_s=first, last_token_s=last))
    return found


@pytest.mark.parametrize("rate", [8.0, 16.0])
def test_nine_tenths_lie_inside(rate: float) -> None:
    believed = StepTerms(
        base_s=TRUE.base_s * 1.01,
        prefill_s=TRUE.prefill_s * 0.98,
        attend_s=TRUE.attend_s,
        sequence_s=TRUE.sequence_s,
        kv_s=TRUE.kv_s,
    )
    held_out = replay(noisy(150, rate, 1), believed, CONFIG)
    residuals = {m: residual_quantiles([o / f - 1 for o, f in pairs(held_out, m) if f > 0]) for m in METRICS}
    profile = Profile(
        rates=RATES,
        step=believed,
        step_errors=StepTerms(base_s=0.02 * TRUE.base_s, prefill_s=0.02 * TRUE.prefill_s),
        residuals=residuals,
    )
    requests = noisy(150, rate, 2)
    bands = request_bands(requests, profile, CONFIG, rng=np.random.default_rng(0), draws=16)
    for metric in METRICS:
        low, high = bands[metric]
        observed = np.asarray([np.nan if (v := getattr(r, metric)) is None else v for r in requests])
        known = ~np.isnan(observed)
        inside = (low <= observed) & (observed <= high)
        assert inside[known].mean() >= 0.86, metric
        assert float(np.nanmedian((high - low) / observed)) < 1.0, "a band of everything holds everything"


def test_drawn_residuals_have_the_quantiles_they_come_from() -> None:
    q = Quantiles(p05=-0.1, p25=-0.02, p50=0.01, p75=0.04, p95=0.2, count=100_000)
    drawn = draw_residuals(q, (20_000,), np.random.default_rng(1))
    for level, value in ((5, q.p05), (25, q.p25), (50, q.p50), (75, q.p75), (95, q.p95)):
        assert float(np.percentile(drawn, level)) == pytest.approx(value, abs=0.01)
    few = msgspec.structs.replace(q, count=16)
    wider = draw_residuals(few, (20_000,), np.random.default_rng(1))
    assert float(np.percentile(wider, 95)) == pytest.approx(q.p50 + 1.5 * (q.p95 - q.p50), abs=0.01)
    assert not draw_residuals(Quantiles(), (3,), np.random.default_rng(1)).any()


def test_the_forecast_capacity_is_where_the_queue_begins_to_grow() -> None:
    limits = Limits(token_budget=1024, max_sequences=64, kv_blocks=4000)
    profile = Profile(rates=RATES, step=TRUE, limits=limits, provenance=Provenance(engine="vllm"))
    rng = random.Random(3)
    traffic = Traffic(prompt_median=300, output_mean=80, output_most=400)
    capacity = forecast_capacity(profile, traffic.sizes(600, 4000, rng))

    def growth(load: float) -> float:
        now, requests = 0.0, []
        for index, (prompt, output) in enumerate(traffic.sizes(900, 4000, rng)):
            now += rng.expovariate(load * capacity)
            requests.append(RecordedRequest(str(index), now, now, now, prompt, output))
        done = replay(requests, TRUE, config_of(profile))
        late = sum(r.ttft_s for r in done[-100:]) / 100
        return late / (sum(r.ttft_s for r in done[300:400]) / 100)

    assert growth(1.3) > 2.0
    assert growth(0.8) < 1.6


def test_a_profile_of_something_else_is_refused() -> None:
    endpoint = Endpoint(url="http://x", model="m", kind="vllm", device="H200")
    profile = Profile(rates=RATES, step=TRUE, provenance=Provenance(engine="vllm", model="m", device="H200"))
    assert require_match(profile, endpoint, "p.json") == TRUE
    for changes, message in (
        ({"engine": "sglang"}, "made for engine 'sglang'"),
        ({"model": "n"}, "made for model 'n'"),
        ({"device": "L4"}, "made for device 'L4'"),
    ):
        other = Profile(rates=RATES, step=TRUE, provenance=Provenance(**changes))
        with pytest.raises(ProfileError, match=message):
            require_match(other, endpoint, "p.json")
    with pytest.raises(ProfileError, match="no step-time model"):
        require_match(Profile(rates=RATES), endpoint, "p.json")
