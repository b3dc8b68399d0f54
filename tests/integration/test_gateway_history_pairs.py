"""The history checker over disaggregated fleets of every protocol, and over llama.cpp's assembled replies."""

import asyncio

import pytest

from tests.support.history_pairs import SHAPES, pair_history
from tests.support.loop import run

SEEDS = 12


@pytest.mark.parametrize("shape", SHAPES)
def test_histories(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    totals: dict[str, int] = {}

    async def main() -> None:
        for ends in await asyncio.gather(*(pair_history(shape, seed) for seed in range(SEEDS))):
            for end, number in ends.items():
                totals[end] = totals.get(end, 0) + number

    run(main(), 100.0)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []
    assert totals["ok"] > 20
    assert totals["cancelled"] > 5
