"""A supervised process: killed and started again when it stands still, left alone while it answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import msgspec

from tests.support.loop import run, until
from weighbridge.children.kept_child import LOOKS
from weighbridge.gateway.relays.worker import Order, Word, Worker

PATIENCE_S = 0.4


@contextlib.asynccontextmanager
async def supervised(heard: list[Word], patience_s: float = 1.0) -> AsyncIterator[Worker]:
    worker = Worker("it", "tests.support.supervised", lambda: b"{}", heard.append, patience_s)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


def test_one_that_stands_still_is_killed_and_started_again() -> None:
    async def main() -> None:
        async with supervised([], PATIENCE_S) as worker:
            stopped = worker.pid
            os.kill(stopped, signal.SIGSTOP)
            begun = time.monotonic()
            await until(lambda: worker.pid not in (0, stopped), 15.0)
            assert time.monotonic() - begun >= PATIENCE_S * (LOOKS - 1) / LOOKS

    run(main(), 30.0)


def test_one_that_answers_is_left_alone_also_by_a_supervisor_that_stood_still_itself() -> None:
    async def main() -> None:
        heard: list[Word] = []
        async with supervised(heard) as worker:
            pid = worker.pid
            await asyncio.sleep(1.5)
            assert worker.pid == pid
            assert heard == [], "that it runs is no news"
            time.sleep(1.6)
            await asyncio.sleep(0.5)
            assert worker.pid == pid
            text = b'"' + b"x" * 3_000_000 + b'"'
            worker.tell(Order(settings=msgspec.Raw(text)))
            await until(lambda: heard)
            assert heard == [Word(reloaded=[str(len(text))])], "a large order arrives whole"

    run(main(), 30.0)
