"""Histories whose gateway is a process that is stopped, killed by SIGKILL and started again."""

import asyncio

from tests.support.history_process import process_history
from tests.support.loop import run

SEEDS = 20


def test_histories_of_a_gateway_that_is_killed() -> None:
    totals: dict[str, int] = {}

    async def main() -> None:
        for first in range(0, SEEDS, 10):
            for ends in await asyncio.gather(*(process_history(seed) for seed in range(first, first + 10))):
                for end, number in ends.items():
                    totals[end] = totals.get(end, 0) + number

    run(main(), 100.0)
    assert totals["lives"] >= 2 * SEEDS
    assert totals["ok"] > 20
    assert totals["cut"] > 20
    assert totals["error_frame"] > 5
