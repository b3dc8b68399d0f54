"""Does the advantage grow with the spread of lengths and SLOs, and vanish when requests are alike?"""

from __future__ import annotations

from functools import partial

from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import Experiment, Options, Outcome, variant
from weighbridge.sim.experiments.saturation import saturated_rate, saturating
from weighbridge.sim.experiments.sweeps import sweep_policies
from weighbridge.sim.lab import tiers_of
from weighbridge.sim.runs import Generated, Run
from weighbridge.workload import mixes

POLICIES = ("round_robin", "least_requests", "least_tokens", "paper_score", "calibrated", "calibrated/immediate")
AGAINST = ("round_robin", "least_requests", "least_tokens", "paper_score")


def make_run(degree: float, rate: float, duration_s: float, policy: str, seed: int) -> Run:
    """Eight equal instances and the mixed bursty workload with its spread scaled by `degree`."""
    one = Run(
        fleet=fleets.mixed(8),
        workload=Generated(mixes.mixed_bursty(rate, "mixed", degree), duration_s=duration_s),
        seed=seed,
        tiers=tiers_of(mixes.classes("mixed", degree)),
        skip=0.05,
        label=str(degree),
    )
    return variant(one, policy)


def run(options: Options) -> Outcome:
    """Every degree at the rate where round robin attains 83.5 % of it."""
    degrees = [0.0, 1.0] if options.quick else [0.0, 0.5, 1.0]
    duration = 10.0 if options.quick else 40.0
    seeds = [seed + 1000 for seed in options.seed_list(2)]
    make, rates = {}, {}
    for degree in degrees:
        rates[str(degree)] = saturated_rate(
            saturating(make_run, degree, duration),
            seeds,
            options,
            start=45.0,
        )
        make[str(degree)] = partial(make_run, degree, rates[str(degree)], duration)
    outcome = sweep_policies("heterogeneity", "degree", make, POLICIES, options, against=AGAINST, values=degrees)
    outcome.data["saturated_rate"] = rates
    return outcome


EXPERIMENT = Experiment("heterogeneity", __doc__ or "", run)
