"""The history checker: misbehaving engines, impatient clients and urgent ones, from seeds; what failed once stays."""

import asyncio

import pytest

from tests.support.history import history
from tests.support.loop import run

SEEDS = 200
ONCE_FAILED: tuple[int, ...] = (24, 28, 39, 52, 58, 500081, 501466, 502762, 509180, 504644)
"""A less urgent request went first where an engine is known by two model names."""


@pytest.mark.parametrize("block", range(8))
def test_histories(block: int, caplog: pytest.LogCaptureFixture) -> None:
    size = SEEDS // 8
    totals: dict[str, int] = {}

    async def main() -> None:
        seeds = range(block * size, (block + 1) * size)
        for ends in await asyncio.gather(*(history(seed) for seed in seeds)):
            for end, number in ends.items():
                totals[end] = totals.get(end, 0) + number

    run(main(), 100.0)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []
    assert totals["ok"] > 20
    assert totals["error_frame"] > 5
    assert totals["cancelled"] > 5
    assert totals["contests"] > 20, "somebody of another tier waited"


@pytest.mark.parametrize("seed", ONCE_FAILED)
def test_histories_that_failed_once(seed: int) -> None:
    run(history(seed), 60.0)
