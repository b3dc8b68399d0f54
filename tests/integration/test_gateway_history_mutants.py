"""The history checker can fail: faults put into the queue on purpose, one at a time, must all be found."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.history import history
from tests.support.loop import run
from weighbridge.core.actions import Action
from weighbridge.routing import hold
from weighbridge.routing.live import Live
from weighbridge.routing.pump import Pump

SEEDS = range(40)


def reversed_order(patch: pytest.MonkeyPatch) -> None:
    """The least urgent tier first."""
    push = hold.HoldQueue.push

    def wrong(self: Any, live: Live) -> None:
        push(self, live)
        self._order.sort(key=lambda level: -level.priority)

    patch.setattr(hold.HoldQueue, "push", wrong)


def ages_too_often(patch: pytest.MonkeyPatch) -> None:
    """Whoever has waited long enough goes first, not one in four."""
    patch.setattr(hold, "AGED_EVERY", 1)


def jumps(patch: pytest.MonkeyPatch) -> None:
    """Whoever arrives, or is tried again, is asked for before those who wait."""

    def wrong(self: Any, live: Live, now_s: float) -> list[Action]:
        sent, _ = self._at_once(live, now_s)
        return [sent] if sent is not None else [*self.hold(live, now_s), *self.run(now_s)]

    patch.setattr(Pump, "arrive", wrong)


def model_by_model(patch: pytest.MonkeyPatch) -> None:
    """All of one model's queue, then all of the next one's, on the same engines."""
    patch.setattr(Pump, "_most_urgent", lambda self, turns, now_s: turns[0])


def sheds_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """Of too many the first is refused, whatever its tier."""

    def wrong(self: Any) -> Live | None:
        return next((live for queue in self._held.values() for live in queue if live.tier.sheddable), None)

    patch.setattr(Pump, "_least_urgent", wrong)


@pytest.mark.parametrize("fault", [reversed_order, ages_too_often, jumps, model_by_model, sheds_the_oldest])
def test_a_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found: list[str] = []

    async def main() -> None:
        for first in SEEDS[::10]:
            jobs = (history(seed) for seed in range(first, first + 10))
            found.extend(
                str(e) for e in await asyncio.gather(*jobs, return_exceptions=True) if isinstance(e, Exception)
            )
            if found:
                return

    run(main(), 60.0)
    assert found, "nobody noticed"
    assert all(why.startswith("priority:") for why in found), found
