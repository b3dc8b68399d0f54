"""How many instances does each policy need for the attainment that round robin reaches with more?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import (
    Experiment,
    Options,
    Outcome,
    Panel,
    compare_policies,
    overall,
    table,
    variant,
)
from weighbridge.sim.lab import tiers_of
from weighbridge.sim.runs import Generated, Run
from weighbridge.workload import mixes
from weighbridge.workload.arrivals import Arrivals, Bursts, Gamma, Poisson

POLICIES = ("round_robin", "least_tokens", "calibrated")
TRACES: dict[str, Arrivals] = {"bursts": Bursts(53.0), "gamma": Gamma(53.0, 3.0), "poisson": Poisson(53.0)}
LEVELS = (0.95, 0.98, 0.99)


def make_run(trace: str, count: int, duration_s: float, policy: str, seed: int) -> Run:
    """The trace on `count` equal instances."""
    one = Run(
        fleet=fleets.mixed(count),
        workload=Generated(mixes.workload("mixed", TRACES[trace]), duration_s=duration_s),
        seed=seed,
        tiers=tiers_of(mixes.classes("mixed")),
        skip=0.05,
        label=f"{trace}/{count}",
    )
    return variant(one, policy)


def needed(counts: Sequence[int], attained: Sequence[float], level: float) -> float | None:
    """Instances for `level`, read off a line between neighbouring counts; None where none of them suffices."""
    for k, value in enumerate(attained):
        if value >= level:
            if k == 0:
                return float(counts[0])
            low = attained[k - 1]
            return counts[k - 1] + (counts[k] - counts[k - 1]) * (level - low) / (value - low)
    return None


def run(options: Options) -> Outcome:
    """A sweep of fleet sizes at one rate, on three traces."""
    seeds = options.seed_list(1)
    duration = 30.0 if options.quick else 60.0
    counts = [5, 7, 9] if options.quick else [6, 7, 8, 9, 10]
    names = list(TRACES)[:1] if options.quick else list(TRACES)
    make = {f"{trace}/{n}": partial(make_run, trace, n, duration) for trace in names for n in counts}
    by_place = table(compare_policies(make, POLICIES, seeds, options))
    iso: dict[str, dict[str, dict[str, float | None]]] = {}
    findings: list[str] = []
    loses: list[str] = []
    panels: list[Panel] = []
    for trace in names:
        curves = {p: [by_place[f"{trace}/{n}"][p].mean for n in counts] for p in POLICIES}
        iso[trace] = {str(level): {p: needed(counts, curves[p], level) for p in POLICIES} for level in LEVELS}
        for level in LEVELS:
            row = iso[trace][str(level)]
            ours, robin = row["calibrated"], row["round_robin"]
            if ours is not None and robin is not None:
                ratio = ours / robin
                line = f"{trace}: {level:.0%} needs {ours:.1f} instances, round robin {robin:.1f}: ratio {ratio:.2f}"
                (findings if ours <= robin else loses).append(line)
        panels.append(
            Panel(
                title=f"{trace}, 53 requests/s",
                x="instances",
                y="attainment",
                curves={p: ([float(n) for n in counts], y) for p, y in curves.items()},
            )
        )
    return Outcome(
        experiment="provisioning",
        quick=options.quick,
        seeds=seeds,
        attainment=overall(by_place),
        by_trace=by_place,
        data={"instances_needed": iso},
        findings=findings,
        loses=loses,
        panels=panels,
    )


EXPERIMENT = Experiment("provisioning", __doc__ or "", run)
