"""Runs a coroutine on the event loop used in production."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
    """Runs `work` to its end on a fresh uvloop; fails if it takes longer than `timeout_s`."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Returns as soon as `condition()` is true; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
