"""A key's tokens per minute change while the gateway serves."""

import asyncio
import hashlib
from pathlib import Path

import msgspec
import pytest

from tests.support.gateway import answer, chat, front
from tests.support.loop import run, until
from tests.support.relays import pair
from tests.support.upstream import FakeUpstream
from weighbridge.gateway import KeySettings
from weighbridge.gateway.budget import TokenBucket

ALL = 1_000_000  # a minute: a few thousand come in the moment between two requests


def key(limit: int | None) -> KeySettings:
    return KeySettings(sha256=hashlib.sha256(b"k").hexdigest(), tenant="t", tokens_per_minute=limit)


def test_a_bucket_keeps_its_level_and_fills_at_the_new_rate() -> None:
    bucket = TokenBucket(600, 0.0)
    assert bucket.take(600, 0.0) == 0.0
    bucket.resize(6000, 30.0)  # half of the old size has come back
    assert bucket.take(301, 30.0) == pytest.approx(0.01)
    assert bucket.take(400, 31.0) == 0.0
    bucket.resize(60, 31.0)
    assert bucket.take(1, 31.0) == pytest.approx(1.0)
    bucket.give_back(500)
    assert bucket.take(60, 31.0) == 0.0, "no more than a minute's tokens, whatever comes back"
    assert bucket.take(1, 31.0) == pytest.approx(1.0)


@pytest.mark.parametrize("limit", [ALL, None])
def test_a_raised_limit_holds_at_once(limit: int | None) -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, keys=(key(60),)) as f:

            async def status() -> int:
                return int((await f.post(chat(stream=False), authorization="Bearer k")).status)

            async def reload(to: int | None) -> None:
                await f.gateway.reload(msgspec.structs.replace(f.gateway.settings, keys=(key(to),)))

            while await status() != 429:
                pass
            await reload(limit)
            await asyncio.sleep(0.05)
            assert [await status() for _ in range(6)] == [200] * 6
            await reload(60)
            statuses = [await status() for _ in range(6)]
            assert statuses[-1] == 429, "a lowered one as well"
            f.assert_idle()

    run(main())


def test_through_relays(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream, relays=2, keys=(key(60),)) as both:
            router = both.router
            assert router is not None

            async def reload(to: int) -> None:
                await router.reload(msgspec.structs.replace(router.settings, keys=(key(to),)))

            while (await both.post()).status != 429:
                pass
            await reload(ALL)
            await asyncio.sleep(0.05)
            assert [(await both.post(relay=n % 2)).status for n in range(6)] == [200] * 6
            await reload(60)
            assert [(await both.post(relay=n % 2)).status for n in range(6)][-1] == 429
            await until(lambda: not router.driver.flights)
            both.assert_idle()

    asyncio.run(main())
