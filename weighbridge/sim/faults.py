"""What happens to instances while a simulation runs: slow-downs, deaths, restarts with a cold start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weighbridge.core.events import InstanceDown, InstanceUp
from weighbridge.sim.feed import FAULT
from weighbridge.sim.fleet import Fault

if TYPE_CHECKING:
    from weighbridge.sim.live import Live
    from weighbridge.sim.simulation import Simulation


class Faults:
    """Carries out the fleet's faults. Requests on an instance that dies fail at once; the router learns of the death
    itself only with the next health check."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def happen(self, fault: Fault | tuple[str, int], now: float) -> None:
        """A fault, or what follows from one: `noticed` or `started` with the instance's index."""
        simulation = self._simulation
        if isinstance(fault, tuple):
            what, index = fault
            if what == "noticed":
                self._noticed(index, now)
            else:
                simulation.up[index] = True
                spec, generation = simulation.specs[index], simulation.generation[index]
                simulation.tell(InstanceUp(spec=spec, generation=generation), now)
            return
        index = simulation.index[fault.instance]
        if fault.kind == "slow":
            simulation.instances[index].slow_down(fault.factor, now)
            simulation.sync(index)
        elif fault.kind == "start":
            simulation.push(now + simulation.fleet.cold_start_s, FAULT, ("started", index))
        else:
            self._die(index, now)

    def _noticed(self, index: int, now: float) -> None:
        simulation = self._simulation
        if not simulation.up[index]:
            name = simulation.instances[index].name
            simulation.tell(InstanceDown(instance=name, reason="health check failed"), now)

    def _die(self, index: int, now: float) -> None:
        """All that ran or waited there fails, and so does what had its prompt's KV there."""
        simulation = self._simulation
        simulation.up[index] = False
        simulation.generation[index] += 1
        lost: list[Live] = [job.owner for job in simulation.instances[index].crash() if not job.cancelled]
        kept = [v for v in simulation.live.values() if v.prefill == index and v.state in ("handoff", "transfer")]
        for live in kept:
            if live.job is not None:
                live.job.keeps_blocks = False
        simulation.push(now + simulation.fleet.detect_s, FAULT, ("noticed", index))
        for live in lost + kept:
            if live.request.id in simulation.live:
                simulation.fail(live, index, "connection reset", now)
