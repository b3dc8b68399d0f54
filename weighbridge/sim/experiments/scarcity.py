"""Under scarcity, does a greedy router herd, is blind spreading better, and what mitigates it?

Two kinds of herding are shown: too few decode instances with little KV (the paper's 1 prefill + 2 decode), and stale
load reports (a router that trusts reports sends everything to the instance that was free when they were taken).
"""

from __future__ import annotations

from functools import partial

from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import (
    Experiment,
    Options,
    Outcome,
    Panel,
    attainments,
    compare_policies,
    overall,
    paired,
    points,
    table,
    variant,
)
from weighbridge.sim.lab import REGIMES, late_reports, tiers_of
from weighbridge.sim.runs import Generated, Run
from weighbridge.workload import mixes

POLICIES = (
    "round_robin",
    "random",
    "power_of_two",
    "least_requests",
    "least_tokens",
    "paper_score",
    "calibrated/immediate",
    "calibrated",
)
BLIND = ("round_robin", "random")
PLACES = ("1P+2D/mixed", "1P+2D-small/reasoning")
STALE = ("kv_free", "drain_time", "power_of_two", "random", "least_requests", "calibrated")


def scarce(place: str, duration_s: float, policy: str, seed: int) -> Run:
    """One of the scarce regimes at 1.2 times its near-saturated rate."""
    regime = REGIMES[place]
    one = regime.run(policy, seed, load=1.2)
    work = Generated(mixes.mixed_bursty(regime.rate * 1.2, regime.mix), duration_s=duration_s)
    return variant(Run(one.fleet, work, seed=seed, tiers=one.tiers, skip=0.05, label=place), policy)


def stale(poll_s: float, duration_s: float, policy: str, seed: int) -> Run:
    """Eight mixed instances whose reports are taken every `poll_s` and arrive half of that later."""
    return variant(
        Run(
            fleet=fleets.mixed(8),
            workload=Generated(mixes.mixed_bursty(60.0), duration_s=duration_s),
            seed=seed,
            tiers=tiers_of(mixes.classes("mixed")),
            settings=late_reports(poll_s, poll_s / 2.0),
            skip=0.05,
            label=str(poll_s),
        ),
        policy,
    )


def run(options: Options) -> Outcome:
    """Both kinds of herding."""
    seeds = options.seed_list(2)
    duration = 20.0 if options.quick else 60.0
    results = compare_policies({place: partial(scarce, place, duration) for place in PLACES}, POLICIES, seeds, options)
    by_trace, differences = table(results), paired(results, "calibrated")
    polls = [0.05, 1.0] if options.quick else [0.05, 1.0, 5.0]
    stale_results = compare_policies({str(p): partial(stale, p, duration) for p in polls}, STALE, seeds[:2], options)
    curves = {p: (polls, [attainments(stale_results[str(at), p]).mean for at in polls]) for p in STALE}
    findings: list[str] = []
    loses: list[str] = []
    for place, row in by_trace.items():
        blind = max(BLIND, key=lambda name: row[name].mean)
        greedy = min(("paper_score", "calibrated/immediate"), key=lambda name: row[name].mean)
        findings.append(
            f"{place}: blind spreading ({blind}) {100 * row[blind].mean:.1f} %, worst greedy placement ({greedy}) "
            f"{100 * row[greedy].mean:.1f} %, held and ordered {100 * row['calibrated'].mean:.1f} %"
        )
        gain = differences[place][blind]
        (findings if gain.mean >= 0 else loses).append(f"{place}: calibrated against {blind}: {points(gain)}")
    for policy in STALE:
        y = curves[policy][1]
        findings.append(
            f"reports every {polls[0]} s -> {polls[-1]} s: {policy} {100 * y[0]:.1f} -> {100 * y[-1]:.1f} %"
        )
    return Outcome(
        experiment="scarcity",
        quick=options.quick,
        seeds=seeds,
        attainment=overall(by_trace),
        by_trace=by_trace,
        differences=differences,
        data={"stale": {p: dict(zip(map(str, x), y, strict=True)) for p, (x, y) in curves.items()}},
        findings=findings,
        loses=loses,
        panels=[
            *(
                Panel(
                    title=place,
                    x="attainment",
                    bars={p: v.mean for p, v in row.items()},
                    errors={p: v.standard_error or 0.0 for p, v in row.items()},
                )
                for place, row in by_trace.items()
            ),
            Panel(title="stale reports, 8 mixed", x="poll interval [s]", y="attainment", curves=curves, log_x=True),
        ],
    )


EXPERIMENT = Experiment("scarcity", __doc__ or "", run)
