"""An instance that has left its profile is measured again when it is idle, and only then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.support.gateway import QUICK
from tests.support.loop import run, until
from tests.support.paced_engine import PacedEngine
from weighbridge.calibrate.reprobe import Reprober
from weighbridge.calibrate.settings import ReprobeSettings
from weighbridge.config.document import Document
from weighbridge.config.settings import Settings
from weighbridge.core.errors import ConfigError
from weighbridge.core.events import ProfileUpdated
from weighbridge.core.instance import Limits, Rates, StepTerms
from weighbridge.cost.online import DecodeSample, OnlineCost
from weighbridge.cost.profile import Profile
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings
from weighbridge.http import HttpClient

BELIEVED = StepTerms(base_s=1e-4, prefill_s=2e-6)


@asynccontextmanager
async def drifted(engine: PacedEngine, settings: ReprobeSettings) -> AsyncIterator[Gateway]:
    """A gateway in front of `engine`, whose profile is ten times too fast and has been found out."""
    instance = InstanceSettings(name="a", url=engine.url, kind="vllm", limits=Limits(max_sequences=4, token_budget=512))
    gateway = Gateway(GatewaySettings(port=0, admin_port=0, instances=(instance,), health=QUICK))
    task = None
    try:
        await gateway.start()
        assert await gateway.wait_ready(10.0)
        rates = Rates(prefill_tokens_per_s=5e5, decode_tokens_per_s=1e4)
        gateway.driver.endpoints["a"].profile = Profile(rates=rates, step=BELIEVED)
        gateway.driver.feed(ProfileUpdated(instance="a", rates=rates, step=BELIEVED, error=0.05))
        cost = cost_of(gateway)
        for _ in range(30):
            cost.observe_decode(DecodeSample(steps=20, sequences=1, kv_tokens=100, seconds=0.02))
        assert cost.level == "online"
        task = asyncio.create_task(Reprober(gateway, settings, look_every_s=0.01).run())
        yield gateway
    finally:
        if task is not None:
            task.cancel()
        await gateway.stop()


def cost_of(gateway: Gateway) -> OnlineCost:
    cost = gateway.driver.refinement.cost("a")
    assert cost is not None
    return cost


def test_an_idle_instance_is_measured_again_and_trusted_again() -> None:
    async def main() -> None:
        async with PacedEngine() as engine, drifted(engine, ReprobeSettings(idle_s=0.05, budget_s=6.0)) as gateway:
            await until(lambda: gateway.stats.reprobes.get(("a", "measured")) == 1, 30.0)
            cost = cost_of(gateway)
            assert cost.level == "profile"
            assert cost.rates.decode_tokens_per_s < 5e3, "its pace is a millisecond a token, not a tenth of one"
            assert gateway.driver.router.fleet.instances["a"].spec.step == cost.profile
            profile = gateway.driver.endpoints["a"].profile
            assert profile is not None
            assert "idle time" in profile.provenance.method
            served = engine.served
            await asyncio.sleep(0.3)
            assert engine.served == served, "it rests afterwards"

    run(main())


def test_a_request_ends_the_probing_and_does_not_wait_for_it() -> None:
    async def main() -> None:
        settings = ReprobeSettings(idle_s=0.05, budget_s=60.0)
        async with PacedEngine() as engine, drifted(engine, settings) as gateway:
            await until(lambda: engine.served > 5)
            client = HttpClient()
            body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 100, "stream": True}
            url = f"http://127.0.0.1:{gateway.port}/v1/completions"
            reply = await client.request("POST", url, body=json.dumps(body).encode(), timeout_s=10.0)
            await client.close()
            assert reply.status == 200
            assert gateway.stats.reprobes.get(("a", "interrupted")) == 1
            assert cost_of(gateway).level == "online"
            assert cost_of(gateway).profile == BELIEVED, "half a measurement changes nothing"
            served = engine.served
            await asyncio.sleep(0.3)
            assert engine.served == served

    run(main())


def test_an_instance_with_work_is_left_alone() -> None:
    async def main() -> None:
        async with PacedEngine(token_s=0.05) as engine, drifted(engine, ReprobeSettings(idle_s=30.0)) as gateway:
            client = HttpClient()
            body = json.dumps({"model": "m", "prompt": [1], "max_tokens": 8, "stream": True}).encode()
            url = f"http://127.0.0.1:{gateway.port}/v1/completions"
            await client.request("POST", url, body=body, timeout_s=10.0)
            await asyncio.sleep(0.2)
            await client.close()
            assert engine.served == 1, "it was busy a moment ago"
            assert not gateway.stats.reprobes.values

    run(main())


def test_it_is_off_by_default_and_its_settings_are_checked() -> None:
    assert Settings().reprobe is None
    text = "instances: [{name: a, url: 'http://127.0.0.1:1'}]\nreprobe: {budget_s: 1}\n"
    with pytest.raises(ConfigError, match=r"reprobe\.budget_s"):
        Document(text, "w.yaml", {}).to(Settings)
    known = Document("reprobe: {idle_s: 5}", "w.yaml", {}).to(Settings)
    assert known.reprobe == msgspec.structs.replace(ReprobeSettings(), idle_s=5.0)
