"""What a wrong profile costs the calibrated policy, and how much of it live refinement repairs, in simulation.

    python benchmarks/wrong_profile.py --seconds 100 --seeds 101 102 103

Near saturation (where round robin meets about 82 % of the SLOs) the router believes in constants that are off
by a factor; engines cost what they cost. Prints attainment in per cent, mean over the seeds, as a Markdown table.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import fmean

from weighbridge.core.actions import Action
from weighbridge.core.events import Event
from weighbridge.core.instance import StepTerms
from weighbridge.core.metrics import summarise
from weighbridge.routing.refinement import Refinement
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings
from weighbridge.sim.fleet import SimulatedFleet
from weighbridge.sim.lab import REGIMES
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.simulation import Simulation

# factors on (prefill, everything else), as the router believes them
ARMS = {
    "right": (1.0, 1.0),
    "all 7 times too cheap": (1 / 7, 1 / 7),
    "decode 7 times too cheap": (1.0, 1 / 7),
    "decode 7 times too dear": (1.0, 7.0),
}


class RefiningRouter(Router):
    """A router whose driver refines, as the gateway's does."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.refinement = Refinement()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        actions = super().handle(event, now_s)
        for update in self.refinement.observe(event, actions, now_s):
            actions += super().handle(update, now_s)
        return actions


def believing(fleet: SimulatedFleet, prefill: float, decode: float) -> SimulatedFleet:
    """The same fleet, of which the router is told other constants."""

    def wrong(t: StepTerms) -> StepTerms:
        return StepTerms(
            base_s=t.base_s * decode,
            prefill_s=t.prefill_s * prefill,
            attend_s=t.attend_s * prefill,
            sequence_s=t.sequence_s * decode,
            kv_s=t.kv_s * decode,
        )

    return replace(fleet, instances=tuple(replace(i, believed=wrong(i.terms)) for i in fleet.instances))


def attainment(regime: str, arm: str, refine: bool, seed: int, seconds: float) -> float:
    """Share of offered requests that met their SLOs, in per cent."""
    one = REGIMES[regime].run("calibrated", seed)
    settings = RouterSettings(policy="calibrated", tiers=one.tiers, seed=seed)
    router = RefiningRouter(settings) if refine else Router(settings)
    requests = [r for r in one.workload.requests(seed) if r.arrival_s < seconds]
    simulation = Simulation(router, believing(one.fleet, *ARMS[arm]), SimulationSettings(seed=seed))
    records = simulation.run(requests)
    return 100.0 * summarise(records, {tier.name: tier for tier in one.tiers}).attainment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--regimes", nargs="+", default=["8/mixed", "4+4/mixed"])
    args = parser.parse_args()
    print(f"| believed constants | {' | '.join(f'{r}, fixed | {r}, refined' for r in args.regimes)} |")
    print("|---" * (1 + 2 * len(args.regimes)) + "|")
    for arm in ARMS:
        cells = [
            fmean(attainment(regime, arm, refine, seed, args.seconds) for seed in args.seeds)
            for regime in args.regimes
            for refine in (False, True)
        ]
        print(f"| {arm} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
