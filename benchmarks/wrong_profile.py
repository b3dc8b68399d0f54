"""What a wrong profile costs the calibrated policy, and how much of it live refinement repairs, in simulation.

    python benchmarks/wrong_profile.py --seconds 100 --seeds 101 102 103

Near saturation (where round robin meets about 82 % of the SLOs) the router believes in constants that are off
by a factor; engines cost what they cost. Prints attainment in per cent, mean over the seeds, as a Markdown table.

    python benchmarks/wrong_profile.py --regimes 8/chat --loads 1 1.25 --seconds 180 --windows 0 10 120 --seeds 101

With `--windows` (where each begins; the last ends with the arrivals) one row per arm, regime and load instead, without
the driver's refinement: attainment of what arrived within each window, and the worst seed's difference to the right
constants there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import inf
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
WINDOW_ARMS = {**ARMS, "all 7 times too dear": (7.0, 7.0)}


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


def attainment(
    regime: str, factors: tuple[float, float], refine: bool, seed: int, seconds: float, load: float = 1.0,
    windows: Sequence[float] = (0.0,),
) -> list[float]:  # fmt: skip
    """Share of the requests offered within each window that met their SLOs, in per cent."""
    one = replace(REGIMES[regime], duration_s=max(seconds, REGIMES[regime].duration_s)).run(
        "calibrated", seed, load=load
    )
    settings = RouterSettings(policy="calibrated", tiers=one.tiers, seed=seed)
    router = RefiningRouter(settings) if refine else Router(settings)
    requests = [r for r in one.workload.requests(seed) if r.arrival_s < seconds]
    simulation = Simulation(router, believing(one.fleet, *factors), SimulationSettings(seed=seed))
    records = simulation.run(requests)
    tiers = {tier.name: tier for tier in one.tiers}
    ends = [*windows[1:], inf]
    return [
        100.0 * summarise([r for r in records if begin <= r.scheduled_s < end], tiers).attainment
        for begin, end in zip(windows, ends, strict=True)
    ]


def by_window(args: argparse.Namespace) -> None:
    """One row per regime, load and arm; per window the mean, and the worst seed against the right constants."""
    ends = [*(f"{begin:g}" for begin in args.windows[1:]), f"{args.seconds:g}"]
    columns = [f"{begin:g} to {end} s (worst seed)" for begin, end in zip(args.windows, ends, strict=True)]
    print(
        "| regime | load | believed constants | " + " | ".join(columns) + " |\n|---|---|---" + "|---" * len(ends) + "|"
    )
    for regime in args.regimes:
        for load in args.loads:
            right: list[list[float]] = []
            for arm, factors in WINDOW_ARMS.items():
                made = [attainment(regime, factors, False, s, args.seconds, load, args.windows) for s in args.seeds]
                right = right or made
                cells = []
                for k in range(len(args.windows)):
                    worst = min(each[k] - base[k] for each, base in zip(made, right, strict=True))
                    cells.append(f"{fmean(each[k] for each in made):.1f} ({worst:+.1f})")
                print(f"| {regime} | {load:g} | {arm} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--regimes", nargs="+", default=["8/mixed", "4+4/mixed"])
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0])
    parser.add_argument("--windows", type=float, nargs="+", help="where each window of arrivals begins, in seconds")
    args = parser.parse_args()
    if args.windows:
        by_window(args)
        return
    print(f"| believed constants | {' | '.join(f'{r}, fixed | {r}, refined' for r in args.regimes)} |")
    print("|---" * (1 + 2 * len(args.regimes)) + "|")
    for arm in ARMS:
        cells = [
            fmean(attainment(regime, ARMS[arm], refine, seed, args.seconds)[0] for seed in args.seeds)
            for regime in args.regimes
            for refine in (False, True)
        ]
        print(f"| {arm} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
