"""The embedded engine behind the gateway, held to what other people's engines are held to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import pytest

from tests.real.asking import CALM, HOUSE, body, gone, post, via
from tests.support.engines import Listening, listening
from tests.support.gateway import Front, front
from tests.support.loop import run, until
from weighbridge.engine.instance import InstanceOptions
from weighbridge.gateway import InstanceSettings
from weighbridge.gateway.settings import KeySettings
from weighbridge.routing.router import RouterSettings

LONG = {"max_tokens": 300, "ignore_eos": True}
IMMEDIATE = RouterSettings(policy="least_requests", dispatch="immediate")


@pytest.fixture(scope="module")
def own() -> Iterator[Listening]:
    any_port = "tcp://127.0.0.1:*"
    options = InstanceOptions(
        name="own",
        slots=8,
        context_tokens=1024,
        threads=1,
        probe=False,
        kv_events=any_port,
        kv_events_replay=any_port,
    )
    with listening(options) as running:
        yield running


@asynccontextmanager
async def alone(own: Listening, keys: tuple[KeySettings, ...] = (), **fields: Any) -> AsyncIterator[Front]:
    aliases = {"smol": own.instance.server.model_id}
    row = InstanceSettings(name="own", url=own.url, kind="embedded", aliases=aliases, **fields)
    async with front(instances=(row,), keys=keys, router=IMMEDIATE, **CALM) as f:
        yield f


def test_its_load_and_clients_that_leave(own: Listening) -> None:
    async def main() -> None:
        async with alone(own) as f:
            endpoint = f.gateway.driver.endpoints["own"]
            asked = [asyncio.create_task(via(f, stream=n % 2 == 0, **LONG)) for n in range(12)]
            await until(lambda: endpoint.report is not None and endpoint.report.running == 8, 30.0)
            await until(lambda: endpoint.report is not None and endpoint.report.waiting == 4, 30.0)
            begun = time.monotonic()
            for task in asked:
                await gone(task)
            await until(lambda: endpoint.report is not None and endpoint.report.running == 0, 10.0)
            took_s = time.monotonic() - begun
            print(f"\nembedded: 8 running, 4 waiting of 12; 0 running reported {took_s:.2f} s after all left")
            f.assert_idle()

    run(main(), 90.0)


def test_urgent_requests_overtake_in_its_queue(own: Listening) -> None:
    async def main() -> None:
        async with alone(own) as f:
            ends: list[str] = []

            async def one(tier: str, n: int) -> None:
                await via(f, max_tokens=40, ignore_eos=True, user=f"{tier}{n}", headers={"x_weighbridge_tier": tier})
                ends.append(tier)

            endpoint = f.gateway.driver.endpoints["own"]
            batch = [asyncio.create_task(one("batch", n)) for n in range(20)]
            await until(lambda: endpoint.report is not None and endpoint.report.waiting == 12, 30.0)
            urgent = [asyncio.create_task(one("interactive", n)) for n in range(2)]
            await asyncio.gather(*batch, *urgent)
            places = [n + 1 for n, tier in enumerate(ends) if tier == "interactive"]
            print(f"\nembedded: urgent requests ended at places {places} of 22")
            assert places[-1] < 18
            f.assert_idle()

    run(main(), 120.0)


def test_kv_events_and_tenants(own: Listening) -> None:
    keys = tuple(KeySettings(sha256=sha256(k.encode()).hexdigest(), tenant=k) for k in ("red", "blue"))
    asks = [[{"role": "system", "content": HOUSE}, {"role": "user", "content": f"Say {n}."}] for n in ("one", "two")]

    async def main() -> None:
        async with alone(own, keys, kv_events="auto") as f:
            watch = f.gateway.kv.watches["own"]
            await until(lambda: bool(watch.subscribers), 10.0)
            cached, forecast = [], []
            for key, messages in (("red", asks[0]), ("red", asks[1]), ("blue", asks[1])):
                reply = await via(f, messages=messages, headers={"authorization": f"Bearer {key}"})
                cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
                forecast.append(f.gateway.driver.decisions[-1].decision.candidates[0].cached_tokens)
                await until(lambda: watch.state == "live", 10.0)
                await until(lambda: f.gateway.driver.router.fleet.instances["own"].prefix.precise, 10.0)
            print(f"\nembedded: cached {cached}, forecast {forecast} of red, red again, blue")
            assert cached[0] == cached[2] == 0
            assert cached[1] >= 64
            assert forecast[1] == pytest.approx(cached[1], abs=64)

    run(main(), 90.0)


def test_errors_usage_and_what_is_sent(own: Listening) -> None:
    keys = (KeySettings(sha256=sha256(b"red").hexdigest(), tenant="red"),)

    async def main() -> None:
        async with alone(own, keys) as f:
            endpoint = f.gateway.driver.endpoints["own"]
            sent: list[dict[str, Any]] = []
            made = endpoint.request_bytes

            def noted(path: str, data: bytes, request_id: str, headers: bytes) -> bytes:
                sent.append(json.loads(data))
                return made(path, data, request_id, headers)

            endpoint.request_bytes = noted  # type: ignore[method-assign]
            red = {"authorization": "Bearer red"}
            for stream in (False, True):
                too_long = body(messages=[{"role": "user", "content": "word " * 3000}], stream=stream)
                reply = await post(f, too_long, **red)
                assert reply.status == 400
                print(f"\nembedded: {reply.json()['error']}")
                reply = await via(f, stream=stream, headers=red)
                outcome = f.gateway.driver.decisions[-1].outcome
                assert outcome is not None
                assert outcome.output_tokens > 0
                assert b'"usage":{' not in reply.body or not stream
            clients = set(json.loads(body(stream=True)))
            print(f"embedded: sent besides the client's fields: {sorted({k for each in sent for k in each} - clients)}")
            f.assert_idle()

    run(main(), 90.0)
