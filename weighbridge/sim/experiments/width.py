"""Does the advantage of a calibrated router grow with the number of decode instances, and vanish at three?"""

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


def make_run(width: int, rate: float, duration_s: float, policy: str, seed: int) -> Run:
    """A fleet of `width` equal mixed instances at its own saturation."""
    one = Run(
        fleet=fleets.mixed(width),
        workload=Generated(mixes.mixed_bursty(rate), duration_s=duration_s),
        seed=seed,
        tiers=tiers_of(mixes.classes("mixed")),
        skip=0.05,
        label=str(width),
    )
    return variant(one, policy)


def run(options: Options) -> Outcome:
    """Every width at the rate where round robin attains 83.5 % of it."""
    widths = [2, 3] if options.quick else [2, 3, 4, 8]
    duration = 15.0 if options.quick else 40.0
    seeds = [seed + 1000 for seed in options.seed_list(2)]
    make, rates = {}, {}
    for width in widths:
        rates[str(width)] = saturated_rate(
            saturating(make_run, width, duration),
            seeds,
            options,
            start=6.0 * width,
        )
        make[str(width)] = partial(make_run, width, rates[str(width)], duration)
    outcome = sweep_policies(
        "width", "instances", make, POLICIES, options, against=AGAINST, values=[float(w) for w in widths]
    )
    outcome.data["saturated_rate"] = rates
    return outcome


EXPERIMENT = Experiment("width", __doc__ or "", run)
