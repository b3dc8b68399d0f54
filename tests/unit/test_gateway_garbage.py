"""Requests, polls and reloads leave no cycles behind: what they used is freed when they end, not when the collector
comes round, which it does once in many thousand requests."""

from __future__ import annotations

import asyncio
import collections
import gc
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support import pairs, relays
from tests.support.gateway import Front, answer, chat, frame, front
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from tests.unit.test_gateway_cascade import ask, cascading, says
from weighbridge.config.settings import load_settings
from weighbridge.core.instance import Limits
from weighbridge.gateway import KeySettings
from weighbridge.http import ExchangeFailed, HttpClient
from weighbridge.routing.router import RouterSettings

TIMES = 20
KEYS = (KeySettings(sha256=hashlib.sha256(b"k").hexdigest(), tenant="t"),)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if what is done within leaves objects of ours that only the collector can free."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (type(each) for each in gc.garbage)
        left = collections.Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {name: count for name, count in left.items() if name.startswith(("weighbridge.", "yaml."))}, left


async def good(f: Front) -> None:
    for stream in (True, False):
        assert (await f.post(chat(stream), authorization="Bearer k")).status == 200


async def wrong(f: Front) -> None:
    assert (await f.post(chat(), authorization="Bearer x")).status == 401
    assert (await f.post(b'{"model":', authorization="Bearer k")).status == 400


async def leaves(f: Front) -> None:
    with pytest.raises(TimeoutError):
        async with (
            asyncio.timeout(0.02),
            f.client.stream(
                "POST", f.url + "/v1/chat/completions", body=chat(stop="wait"), headers=[("authorization", "Bearer k")]
            ) as reply,
        ):
            async for _ in reply:
                pass
    await until(lambda: not f.gateway.driver.flights)


async def broken(f: Front) -> None:
    for how in ("reset", "half", "no"):
        reply = await f.post(chat(stop=how), authorization="Bearer k")
        assert reply.status in (200, 502, 503), reply.body


async def scrape(f: Front) -> None:
    assert (await f.get("/metrics", admin=True)).status == 200
    assert (await f.get("/fleet", admin=True)).status == 200


async def reload(f: Front) -> None:
    settings = f.gateway.settings
    lag_s = 0.25 if settings.max_loop_lag_s == 0.5 else 0.5
    key = KeySettings(sha256=hashlib.sha256(b"other").hexdigest(), tenant=str(lag_s))
    await f.gateway.reload(msgspec.structs.replace(settings, max_loop_lag_s=lag_s, keys=(*KEYS, key)))


async def models(f: Front) -> None:
    for path in ("/v1/models", "/healthz", "/readyz", "/nothing"):
        await f.get(path)
    assert (await f.get("/decisions?last=5", admin=True)).status == 200


async def engine(call: Call) -> None:
    how = json.loads(call.body).get("stop")
    if how == "wait":
        await call.sse_head()
        await call.chunk(frame("a"))
        await call.wait_closed()
    elif how == "reset":
        call.reset()
    elif how == "half":
        await call.sse_head()
        await call.chunk(frame("a"))
        call.close()
    elif how == "no":
        await call.reply(500, b'{"error":{"message":"no"}}')
    else:
        await answer(call)


@pytest.mark.parametrize("act", [good, wrong, leaves, broken, scrape, reload, models], ids=lambda act: act.__name__)
def test_no_request_leaves_a_cycle(act: object, tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeUpstream(engine) as upstream, front(upstream, keys=KEYS, access_log=str(tmp_path)) as f:
            for _ in range(3):
                await act(f)  # type: ignore[operator]
            with nothing_left():
                for _ in range(TIMES):
                    await act(f)  # type: ignore[operator]

    run(main())


def test_no_client_that_leaves_the_queue_leaves_a_cycle() -> None:
    async def main() -> None:
        settings = RouterSettings(policy="least_tokens", dispatch="hold")
        limits = {"limits": Limits(max_context=4096, max_sequences=1)}
        async with FakeUpstream(engine) as upstream, front(upstream, router=settings, instance_fields=limits) as f:
            stuck = asyncio.create_task(f.post(chat(stop="wait")))
            await until(lambda: any(flight.first_token_s for flight in f.gateway.driver.flights.values()))

            async def leave() -> None:
                task = asyncio.create_task(f.post(chat()))
                await until(lambda: f.gateway.driver.router.held_requests == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until(lambda: f.gateway.driver.router.held_requests == 0)

            await leave()
            with nothing_left():
                for _ in range(TIMES):
                    await leave()
            stuck.cancel()
            await asyncio.gather(stuck, return_exceptions=True)

    run(main())


@pytest.mark.parametrize("binding", ["late", "early"])
def test_no_pair_of_legs_leaves_a_cycle(binding: str) -> None:
    async def main() -> None:
        settings = RouterSettings(policy="least_requests", binding=binding)
        async with pairs.pair(pairs.prefill, engine, router=settings) as (f, _, _):
            for act in (good, leaves, good):
                with nothing_left():
                    for _ in range(TIMES):
                        await act(f)

    run(main())


def test_no_cascade_leaves_a_cycle(tmp_path: Path) -> None:
    async def main() -> None:
        big, small = FakeUpstream(says("big")), FakeUpstream(says("4"))
        async with big, small, cascading(tmp_path, big, small) as f:
            for content in ("no", "42"):
                small.script = says(content)
                with nothing_left():
                    for n in range(TIMES):
                        assert (await f.post(ask(n % 2 == 0))).status == 200

    run(main())


def test_nothing_that_goes_through_a_relay_leaves_a_cycle(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeUpstream(engine) as upstream, relays.pair(tmp_path, upstream, keys=KEYS) as both:
            await both.post()
            with nothing_left():
                for n in range(TIMES):
                    assert (await both.post(chat(n % 2 == 0))).status == 200
                await until(lambda: not both.relays[0].desk._cases)

    run(main())


def test_no_exchange_of_the_client_leaves_a_cycle() -> None:
    async def once(client: HttpClient, url: str) -> None:
        await client.request("GET", url + "/metrics")
        with pytest.raises(ExchangeFailed):
            await client.request("POST", url, body=chat(stop="reset"))
        async with client.stream("POST", url, body=chat(stop="wait")) as reply:
            assert reply.status == 200

    async def main() -> None:
        async with FakeUpstream(engine) as upstream:
            client = HttpClient()
            await once(client, upstream.url)
            with nothing_left():
                for _ in range(TIMES):
                    await once(client, upstream.url)
            await client.close()

    run(main())


def test_no_reading_of_the_settings_leaves_a_cycle(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    rows = [{"name": f"i{n}", "url": "http://127.0.0.1:1", "models": ["m"]} for n in range(3)]
    file.write_text(json.dumps({"instances": rows, "max_loop_lag_s": 0.5}))
    load_settings(file, {})
    with nothing_left():
        for _ in range(TIMES):
            load_settings(file, {})
