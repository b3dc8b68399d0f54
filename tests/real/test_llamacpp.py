"""llama.cpp's own server behind the gateway, beside an embedded instance of the same model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.real.asking import CALM, direct, get, gone, post, text, via
from tests.real.launch import MODEL, Server, llamacpp
from tests.support.engines import Listening, listening
from tests.support.gateway import Front, front
from tests.support.loop import run, until
from weighbridge.engine.instance import InstanceOptions
from weighbridge.gateway import InstanceSettings
from weighbridge.routing.router import RouterSettings


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with llamacpp() as running:
        yield running


@pytest.fixture(scope="module")
def own() -> Iterator[Listening]:
    with listening(InstanceOptions(name="own", slots=2, context_tokens=512, threads=1, probe=False)) as running:
        yield running


@asynccontextmanager
async def alone(server: Server, **fields: Any) -> AsyncIterator[Front]:
    async with front(
        instances=(InstanceSettings(name="llama", url=server.url, kind="llamacpp"),), **CALM, **fields
    ) as f:
        yield f


async def slots(server: Server) -> int:
    return sum(slot["is_processing"] for slot in (await get(server, "/slots")).json())


def test_what_the_engine_tells(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            endpoint = f.gateway.driver.endpoints["llama"]
            assert endpoint.models == (MODEL,)
            assert (endpoint.spec.limits.max_sequences, endpoint.spec.limits.max_context) == (2, 1024)
            asked = [asyncio.create_task(via(f, max_tokens=200, ignore_eos=True)) for _ in range(4)]
            await until(lambda: endpoint.report is not None and endpoint.report.running == 2, 20.0)
            assert endpoint.report is not None
            assert endpoint.report.kv_usage is not None
            await until(lambda: endpoint.report is not None and endpoint.report.waiting == 2, 20.0)
            row = f.gateway.admin.fleet()["instances"][0]
            assert 0 <= row["report_age_s"] < 2.0
            assert row["in_flight"] == 4
            for task in asked:
                await gone(task)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()

    run(main(), 60.0)


def test_the_text_is_the_engines_own_streamed_and_whole(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            expected = text(await direct(server))
            assert text(await via(f)) == expected
            assert text(await via(f, stream=True)) == expected
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.output_tokens == 12
            assert outcome.cached_tokens, "it tells what it had cached"

    run(main(), 60.0)


def test_errors_and_odd_requests(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            for stream in (False, True):
                long = [{"role": "user", "content": "word " * 3000}]
                reply = await post(f, _json(messages=long, stream=stream))
                assert reply.status == 400
                error = reply.json()["error"]
                assert error["type"] == "exceed_context_size_error"
                assert (await post(f, _json(model="another"))).status == 404, "it would have answered as itself"
                assert (await post(f, _json(max_tokens=0))).status == 400, "it would have made one token"
            assert (await via(f, priority=5, cache_salt="x", made_up={"a": 1})).status == 200
            f.assert_idle()

    run(main(), 60.0)


def test_a_client_that_leaves_a_stream_frees_the_slot(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            task = asyncio.create_task(via(f, stream=True, max_tokens=700, ignore_eos=True))
            await until(lambda: any(x.first_token_s for x in f.gateway.driver.flights.values()), 20.0)
            begun = time.monotonic()
            await gone(task)
            while await slots(server):
                assert time.monotonic() - begun < 2.0
                await asyncio.sleep(0.02)
            print(f"\nllama.cpp: slot free {time.monotonic() - begun:.2f} s after a stream's client left")

    run(main(), 60.0)


def test_a_client_that_leaves_a_whole_reply_frees_the_slot(server: Server) -> None:
    """The engine itself would generate to the end: the gateway asks it for a stream and puts the reply together."""

    async def main() -> None:
        async with alone(server) as f:
            task = asyncio.create_task(via(f, max_tokens=900, ignore_eos=True))
            while not await slots(server):
                await asyncio.sleep(0.05)
            begun = time.monotonic()
            await gone(task)
            while await slots(server):
                assert time.monotonic() - begun < 2.0
                await asyncio.sleep(0.02)
            print(f"\nllama.cpp: slot free {time.monotonic() - begun:.2f} s after a whole reply's client left")
            f.assert_idle()

    run(main(), 60.0)


def test_a_whole_reply_has_what_the_engines_own_has(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            for path, fields in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "Paris is"})):
                made = (await via(f, path=path, **fields)).json()
                own = (await direct(server, path, **fields)).json()
                assert made.keys() == own.keys()
                assert made["choices"] == own["choices"]
                assert made["object"] == own["object"]
                assert made["usage"]["completion_tokens"] == own["usage"]["completion_tokens"]

    run(main(), 60.0)


def test_one_fleet_with_an_embedded_instance(server: Server, own: Listening) -> None:
    async def main() -> None:
        instances = (
            InstanceSettings(name="llama", url=server.url, kind="llamacpp"),
            InstanceSettings(
                name="own", url=own.url, kind="embedded", aliases={MODEL: own.instance.server.model_id}, models=(MODEL,)
            ),
        )
        async with front(instances=instances, **CALM, router=RouterSettings(policy="round_robin")) as f:
            replies = await asyncio.gather(*(via(f, stream=n % 2 == 0, user=str(n)) for n in range(8)))
            assert all(text(reply) for reply in replies)
            used = [record.decision.chosen for record in f.gateway.driver.decisions]
            assert used.count("llama") == used.count("own") == 4
            f.assert_idle()

    run(main(), 90.0)


def _json(**fields: Any) -> bytes:
    from tests.real.asking import body

    return body(**fields)
