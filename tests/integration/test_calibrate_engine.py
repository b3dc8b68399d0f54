"""Calibration against the real embedded engine: what it tells, what a probe counts, and whose profile is whose."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.support.engines import Listening, listening
from tests.support.loop import run
from weighbridge.calibrate.check import check_url
from weighbridge.calibrate.endpoint import busy, read_endpoint, read_load
from weighbridge.calibrate.engines import scheduling_of
from weighbridge.calibrate.probe import Probe, Prober
from weighbridge.calibrate.quick import quick_profile
from weighbridge.calibrate.transfer import measure_transfer
from weighbridge.core.errors import ProfileError
from weighbridge.engine.instance import InstanceOptions
from weighbridge.http.client import HttpClient

pytestmark = pytest.mark.engine


def test_the_engine_tells_kind_limits_device_and_load(listener: Listening) -> None:
    async def main() -> None:
        client = HttpClient()
        endpoint = await read_endpoint(client, listener.url)
        load, _ = await read_load(client, endpoint)
        await client.close()
        assert endpoint.kind == "embedded"
        assert endpoint.model == "smollm2-135m-instruct"
        assert endpoint.limits.max_sequences == 4
        assert endpoint.limits.max_context == 512
        assert endpoint.limits.kv_tokens == 2048
        assert endpoint.device.startswith("CPU")
        assert endpoint.quantisation == "Q4_1"
        assert scheduling_of("embedded", endpoint.limits, endpoint.scheduler).busy_prefill_tokens == 64
        assert not busy(load)

    run(main())


def test_a_probe_has_exactly_the_asked_size_and_hits_no_cache(listener: Listening) -> None:
    async def main() -> None:
        client = HttpClient()
        endpoint = await read_endpoint(client, listener.url)
        prober = Prober(client, endpoint, random.Random())
        results = [await prober.send("alone", Probe(70, 6)) for _ in range(2)]
        await client.close()
        for r in results:
            assert (r.prompt_tokens, r.output_tokens, r.cached_tokens) == (70, 6, 0)
            assert r.sent_s < r.first_token_s < r.last_token_s
            assert len(r.pieces_s) == 6

    run(main())


def test_a_quick_profile_fits_its_engine_and_no_other(listener: Listening) -> None:
    async def main() -> None:
        profile = await quick_profile(listener.url)
        assert profile.step is not None
        assert profile.provenance.engine == "embedded"
        report = await check_url(listener.url, profile, name="p.json", load=0.3, seconds=1.5, seed=1)
        assert report.failed == 0
        assert report.requests >= 1
        other = msgspec.structs.replace(
            profile, provenance=msgspec.structs.replace(profile.provenance, model="another")
        )
        with pytest.raises(ProfileError, match="made for model 'another'"):
            await check_url(listener.url, other, name="p.json", load=0.3, seconds=3.0)

    run(main())


def test_moving_kv_between_two_instances_is_measured(listener: Listening) -> None:
    with listening(InstanceOptions(slots=2, context_tokens=512, threads=1, probe=False)) as other:
        terms = run(measure_transfer(other.url, listener.url, sizes=(16, 160), rounds=2), timeout_s=110.0)
    assert terms.count == 4
    assert terms.latency_s >= 0.0
    # KV of this model is 23 KB a token, so 160 tokens are 4 MB: more than any latency hides
    assert terms.seconds_per_byte > 0.0
    assert terms.seconds(4_000_000) < 5.0
