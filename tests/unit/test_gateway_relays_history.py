"""Seeded histories of relays: failing engines, impatient clients, Routers that die. Text is right, counts end at 0."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import DONE, ROLE, chat, data_of, frame, text_of
from tests.support.loop import run as run_loop
from tests.support.loop import until
from tests.support.relays import Pair, RunLog, pair
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.actions import Reject
from weighbridge.core.event_log import Entry
from weighbridge.core.events import RequestAdopted, RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from weighbridge.http import ExchangeFailed
from weighbridge.routing.router import RouterSettings

TEXT = "abcdefgh"
CLIENTS = 40


def counts(entries: list[Entry]) -> tuple[Counter[str], set[str]]:
    """Ends by request, and the requests that were seen to begin."""
    ends: Counter[str] = Counter()
    begun = set()
    for entry in entries:
        event = entry.e
        if isinstance(event, RequestFinished | RequestCancelled | RequestFailed):
            ends[event.request_id] += not getattr(event, "retriable", False)
        elif isinstance(event, RequestArrived | RequestAdopted):
            begun.add(event.request.id)
        ends.update(action.request_id for action in entry.a if isinstance(action, Reject))
    return ends, begun


def engine(rng: random.Random) -> Any:
    async def script(call: Call) -> None:
        kind = rng.choice(("good", "good", "good", "slow", "reset", "status", "cut"))
        if kind == "reset":
            call.reset()
            return
        if kind == "status":
            await call.reply(500, b"{}")
            return
        stop = rng.randrange(1, len(TEXT)) if kind == "cut" else len(TEXT)
        await call.sse_head()
        await call.chunk(ROLE)
        for letter in TEXT[:stop]:
            await asyncio.sleep(rng.random() * (0.03 if kind == "slow" else 0.004))
            await call.chunk(frame(letter))
        if kind == "cut":
            call.reset()
            return
        for data in (frame(finish="stop"), DONE):
            await call.chunk(data)
        await call.last_chunk()

    return script


async def client(both: Pair, rng: random.Random, number: int) -> str:
    await asyncio.sleep(rng.random() * 0.4)
    patience_s = rng.choice((20.0, 20.0, 20.0, 0.02))
    try:
        async with asyncio.timeout(patience_s):
            reply = await both.post(chat(), relay=number % 2)
    except TimeoutError:
        return "left"
    except ExchangeFailed:
        return "cut"
    if reply.status != 200:
        assert reply.status in (502, 503), reply
        return "refused"
    text = text_of(reply.body)
    assert TEXT.startswith(text), "a foreign or repeated byte"
    whole = data_of(reply.body)[-1] == "[DONE]"
    assert whole == (text == TEXT)
    return "whole" if whole else "error"


@pytest.mark.parametrize("holds", ["immediate", "hold"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_text_is_right_ends_are_single_and_counters_zero(tmp_path: Path, seed: int, holds: Any) -> None:
    async def history() -> None:
        rng = random.Random(seed)
        log = RunLog(tmp_path / "log")
        settings = RouterSettings(policy="least_tokens", dispatch=holds)
        async with (
            FakeUpstream(engine(rng)) as one,
            FakeUpstream(engine(rng)) as two,
            pair(tmp_path, one, two, relays=2, router=settings, retry_share=1.0) as both,
        ):
            assert both.router is not None
            both.router.driver.writer = log.writer
            clients = [asyncio.create_task(client(both, rng, n)) for n in range(CLIENTS)]
            for _ in range(3):
                await asyncio.sleep(rng.random() * 0.15)
                await both.die()
                await asyncio.sleep(rng.random() * 0.05)
                await both.open_router(log)
            outcomes = Counter(await asyncio.gather(*clients))
            router = both.router
            await until(lambda: not router.driver.flights and not any(r.desk.flights for r in both.relays), 10.0)
            both.assert_idle()
            router.driver.writer = None
        ends, begun = counts(log.entries())
        log.writer.close()
        ends = +ends
        assert outcomes["whole"] > 0
        assert set(ends) <= begun
        assert max(ends.values()) == 1
        # an end that was on its way when a Router died is in no log; of all others there is one
        assert len(begun) - len(ends) <= 12, (len(begun), len(ends))

    run_loop(history())
