"""The gateway in front of real embedded engines: one prefills, the other decodes, and no KV is left behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines import Listening, listening
from tests.support.gateway import Front, front, text_of
from tests.support.loop import run, until
from weighbridge.engine.instance import InstanceOptions
from weighbridge.gateway import InstanceSettings
from weighbridge.routing.router import RouterSettings

pytestmark = pytest.mark.engine
MESSAGES = [{"role": "user", "content": "Name the colours of the rainbow in order, and say one word about each. " * 6}]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Listening, Listening]]:
    shape: dict[str, Any] = {"slots": 2, "context_tokens": 512, "threads": 1, "probe": False}
    with listening(InstanceOptions(name="p", **shape)) as p, listening(InstanceOptions(name="d", **shape)) as d:
        yield p, d


def settings(pair: tuple[Listening, Listening]) -> dict[str, Any]:
    p, d = (f"http://127.0.0.1:{e.instance.info.port}" for e in pair)
    return {
        "instances": (
            InstanceSettings(name="p", url=p, kind="embedded", role="prefill"),
            InstanceSettings(name="d", url=d, kind="embedded", role="decode"),
        ),
        "router": RouterSettings(policy="least_requests"),
    }


def ask(f: Front, **fields: Any) -> bytes:
    model = f.gateway.driver.endpoints["d"].models[0]
    return json.dumps({"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 16, **fields}).encode()


def leases(engine: Listening) -> int:
    return len(engine.instance.server._kv.leases)


def test_a_disaggregated_answer_equals_one_engines_own(pair: tuple[Listening, Listening]) -> None:
    async def main() -> None:
        async with front(**settings(pair)) as f:
            pulled = pair[1].engine.counters.transfer_bytes
            moved = (await f.post(ask(f))).json()
            assert pair[1].engine.counters.transfer_bytes > pulled
            assert moved["choices"][0]["message"]["content"]
            streamed = await f.post(ask(f, stream=True))
            # the decode engine alone, with the prompt already there: the same shapes as after a transfer
            url = f"http://127.0.0.1:{pair[1].instance.info.port}/v1/chat/completions"
            await f.client.request("POST", url, body=ask(f))
            alone = (await f.client.request("POST", url, body=ask(f))).json()
            assert moved["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
            assert text_of(streamed.body) == alone["choices"][0]["message"]["content"]
            assert leases(pair[0]) == 0
            f.assert_idle()

    run(main(), 110.0)


def test_a_client_that_leaves_between_the_legs_leaves_no_kv(pair: tuple[Listening, Listening]) -> None:
    async def main() -> None:
        async with front(**settings(pair)) as f:
            stopped = time.monotonic()
            for n in range(12):
                try:
                    async with asyncio.timeout(0.02 + 0.02 * n):
                        await f.post(ask(f, stream=True, max_tokens=200, user=str(n)))
                except TimeoutError:
                    pass
            await until(lambda: not f.gateway.driver.flights)
            await until(lambda: leases(pair[0]) == 0, 20.0)
            assert time.monotonic() - stopped < 25.0, "given up, not expired"
            f.assert_idle()

    run(main(), 110.0)
