"""Refinement under load: a simulated instance that slows down while Poisson traffic runs through the real router."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.compiled import interpreted
from weighbridge.core.actions import Action
from weighbridge.core.events import Event
from weighbridge.core.instance import StepTerms
from weighbridge.cost.online import OnlineCost
from weighbridge.routing.refinement import Refinement
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import Disturbance
from weighbridge.sim.fleet import Fault, SimulatedFleet, SimulatedInstance
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.simulation import Simulation
from weighbridge.workload.trace import TraceRequest

pytestmark = interpreted
TERMS = StepTerms(base_s=0.003, prefill_s=0.005, attend_s=2e-6, sequence_s=0.009, kv_s=1e-5)
CONFIG = SchedulerConfig(token_budget=128, max_sequences=4, blocks=256)
# by replay of a backlog, 1.17 such requests a second is what this instance carries
CAPACITY = 1.17


class RefiningRouter(Router):
    """A router that is fed what a refinement learns, and keeps when its level changed and what was believed."""

    def __init__(self) -> None:
        super().__init__(RouterSettings(policy="least_requests"))
        self.refinement = Refinement()
        self.noticed_s: float | None = None
        self.believed: list[tuple[float, float, float]] = []

    def handle(self, event: Event, now_s: float) -> list[Action]:
        actions = super().handle(event, now_s)
        for update in self.refinement.observe(event, actions, now_s):
            super().handle(update, now_s)
        cost = self.refinement.cost("a")
        if cost is not None:
            if self.noticed_s is None and cost.level == "online":
                self.noticed_s = now_s
            step = cost.step
            self.believed.append((now_s, step.base_s / TERMS.base_s, step.prefill_s / TERMS.prefill_s))
        return actions

    def cost(self) -> OnlineCost:
        cost = self.refinement.cost("a")
        assert cost is not None
        return cost


def traffic(load: float, seconds: float, seed: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    now, found = 0.0, []
    while (now := now + rng.expovariate(load * CAPACITY)) < seconds:
        prompt = max(4, min(400, round(48 * rng.lognormvariate(0.0, 0.8))))
        found.append(TraceRequest(now, prompt, 1 + min(63, int(rng.expovariate(1 / 20)))))
    return found


def simulate(requests: Sequence[TraceRequest], faults: tuple[Fault, ...], noise: float = 0.05) -> RefiningRouter:
    router = RefiningRouter()
    instance = SimulatedInstance("a", TERMS, CONFIG, disturbance=Disturbance(noise=noise), error=0.05)
    settings = SimulationSettings(max_tokens=None)
    Simulation(router, SimulatedFleet((instance,), faults=faults), settings).run(requests)
    return router


@pytest.mark.parametrize("load", [0.5, 0.9, 1.5])
def test_a_true_profile_stays_trusted_even_in_a_queue(load: float) -> None:
    router = simulate(traffic(load, 600.0, 1), ())
    assert router.noticed_s is None
    for _, base, prefill in router.believed:
        assert base == pytest.approx(1.0, abs=0.11)
        assert prefill == pytest.approx(1.0, abs=0.11)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_throttle_is_noticed_in_a_minute_and_forecast_right_in_five(seed: int) -> None:
    router = simulate(traffic(0.45, 700.0, seed), (Fault(200.0, "slow", "a", 2.0),))
    assert router.noticed_s is not None
    assert 200.0 < router.noticed_s <= 260.0
    settled = [(base, prefill) for at, base, prefill in router.believed if at > 500.0]
    assert settled
    for base, prefill in settled:
        assert base == pytest.approx(2.0, rel=0.1)
        assert prefill == pytest.approx(2.0, rel=0.1)
    assert router.cost().drifts >= 1
