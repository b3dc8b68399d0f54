"""What the router is told from time to time: load reports, token counts of running requests, ticks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from weighbridge.core.events import InstanceReported, Tick, TokensProgressed

if TYPE_CHECKING:
    from weighbridge.sim.simulation import Simulation

# Order of things that happen at the same time. A step ends last, so that what arrives at its boundary gets into the
# next one.
ARRIVAL, FAULT, TRANSFER, CANCEL, REPORT, PROGRESS, TICK, STEP = range(8)


class Feed:
    """The periodic part of a simulation's events, as late and as incomplete as its settings say."""

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self._simulation = simulation
        self._settings = simulation.settings
        self._rng = rng

    def start(self) -> None:
        """Schedule the first of each."""
        settings = self._settings
        for every, priority in ((settings.poll_s, REPORT), (settings.progress_s, PROGRESS), (settings.tick_s, TICK)):
            if every is not None:
                self._simulation.push(every, priority, None)

    def report(self, late: list[InstanceReported] | None, now: float) -> None:
        """Poll every engine that is up; or deliver reports that were under way."""
        simulation, settings = self._simulation, self._settings
        if late is not None:
            simulation.tell_all(late, now)
            return
        reports = [
            InstanceReported(
                instance=instance.name,
                generation=simulation.generation[k],
                sampled_s=now,
                report=instance.report(now),
            )
            for k, instance in enumerate(simulation.instances)
            if simulation.up[k] and not (settings.report_loss and self._rng.random() < settings.report_loss)
        ]
        assert settings.poll_s is not None
        simulation.push(now + settings.poll_s, REPORT, None)
        if settings.report_delay_s > 0:
            simulation.push(now + settings.report_delay_s, REPORT, reports)
        else:
            simulation.tell_all(reports, now)

    def progress(self, what: None, now: float) -> None:
        """Token counts of everything that decodes."""
        assert self._settings.progress_s is not None
        for instance in self._simulation.instances:
            self._simulation.tell_all(
                [TokensProgressed(request_id=name, output_tokens=n) for name, n in instance.progress(now)], now
            )
        self._simulation.push(now + self._settings.progress_s, PROGRESS, None)

    def tick(self, what: None, now: float) -> None:
        """A tick, if the router wants one."""
        assert self._settings.tick_s is not None
        if self._simulation.router.wants_tick:
            self._simulation.tell(Tick(), now)
        self._simulation.push(now + self._settings.tick_s, TICK, None)
