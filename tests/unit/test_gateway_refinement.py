"""The driver feeds the router what its refinement has learned, and the log holds it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.compiled import interpreted
from tests.support.loop import run
from weighbridge.core.actions import Action
from weighbridge.core.events import Event, InstanceUp, ProfileUpdated, Tick
from weighbridge.core.instance import InstanceSpec, StepTerms
from weighbridge.gateway.driver import Driver
from weighbridge.gateway.stats import Stats
from weighbridge.routing.refinement import Refinement
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings

LEARNED = ProfileUpdated(instance="a", step=StepTerms(base_s=0.02, prefill_s=2e-3), error=0.1)


@interpreted
def test_what_is_learned_reaches_the_router() -> None:
    class Teacher(Refinement):
        """Learns LEARNED from a tick."""

        def observe(self, event: Event, actions: Iterable[Action], now_s: float) -> list[ProfileUpdated]:
            super().observe(event, actions, now_s)
            return [LEARNED] if isinstance(event, Tick) else []

    async def main() -> None:
        driver = Driver(Router(RouterSettings()), {}, None, Stats())
        driver.refinement = Teacher()
        spec = InstanceSpec(name="a", step=StepTerms(base_s=0.01, prefill_s=1e-3), error=0.05)
        driver.feed(InstanceUp(spec=spec, generation=1))
        driver.feed(Tick())
        known = driver.router.fleet.instances["a"].spec
        assert known.step == LEARNED.step
        assert known.error == LEARNED.error
        driver.stop()

    run(main())
