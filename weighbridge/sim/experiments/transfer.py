"""Prefill and decode apart or together; what the KV transfer costs, and which side must match.

Six GPUs as 2 prefill + 4 decode against 6 mixed ones, by link bandwidth and by the split of the six.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from weighbridge.routing.router import Router, RouterSettings
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
from weighbridge.sim.fleet import Link, SimulatedFleet
from weighbridge.sim.lab import tiers_of
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.runs import Generated, Run
from weighbridge.sim.simulation import Simulation
from weighbridge.sim.sweep import Spread
from weighbridge.workload import mixes

RATE = 19.0
POLICIES = ("least_tokens", "calibrated")
SPLITS = {"1P+5D": (1, 5), "2P+4D": (2, 4), "3P+3D": (3, 3), "4P+2D": (4, 2)}


def make_run(fleet: SimulatedFleet, duration_s: float, policy: str, seed: int) -> Run:
    """The mixed bursty workload at a fixed rate."""
    one = Run(
        fleet=fleet,
        workload=Generated(mixes.mixed_bursty(RATE), duration_s=duration_s),
        seed=seed,
        tiers=tiers_of(mixes.classes("mixed")),
        skip=0.05,
    )
    return variant(one, policy)


def parts(fleet: SimulatedFleet, duration_s: float, seed: int) -> dict[str, float]:
    """Mean seconds of each part of TTFT, from the event trace of one run; they sum to it."""
    router = Router(RouterSettings(policy="least_tokens", record_decisions=False, dispatch="immediate"))
    simulation = Simulation(router, fleet, SimulationSettings(seed=seed), keep_stages=True)
    records = simulation.run(mixes.mixed_bursty(RATE).generate(seed, duration_s=duration_s))
    done = [simulation.stages[r.id] for r in records if r.status == "ok"]
    return {
        "held": fmean(s.dispatched - s.arrived for s in done),
        "queue and prefill": fmean(s.prefilled - s.dispatched for s in done),
        "wait for the link": fmean(s.transfer_started - s.prefilled for s in done),
        "transfer": fmean(s.decode_added - s.transfer_started for s in done),
        "first decode step": fmean(s.first_token - s.decode_added for s in done),
        "ttft": fmean(r.ttft_s or 0.0 for r in records if r.status == "ok"),
    }


def _findings(
    by_trace: Mapping[str, Mapping[str, Spread]],
    tpot: Mapping[str, Mapping[str, float]],
    split_parts: Mapping[str, Mapping[str, float]],
) -> tuple[list[str], list[str]]:
    """What is gained, and where disaggregation loses."""
    findings: list[str] = []
    loses: list[str] = []
    for policy in POLICIES:
        colocated = by_trace["6 mixed"][policy].mean
        best = max(SPLITS, key=lambda split: by_trace[split][policy].mean)
        apart = by_trace[best][policy].mean
        line = (
            f"{policy}: 6 mixed {100 * colocated:.1f} %, best split {best} {100 * apart:.1f} %; TPOT p99 "
            f"{1e3 * tpot[policy]['6 mixed']:.1f} ms together, {1e3 * tpot[policy]['2P+4D']:.1f} ms apart"
        )
        (findings if apart >= colocated else loses).append(line)
        worst = min(SPLITS, key=lambda split: by_trace[split][policy].mean)
        findings.append(f"{policy}: a mismatched split ({worst}) attains {100 * by_trace[worst][policy].mean:.1f} %")
    for name, row in split_parts.items():
        findings.append(
            f"{name}: TTFT {1e3 * row['ttft']:.0f} ms = queue and prefill {1e3 * row['queue and prefill']:.0f} "
            f"+ link wait {1e3 * row['wait for the link']:.0f} + transfer {1e3 * row['transfer']:.0f} + first decode "
            f"{1e3 * row['first decode step']:.0f}"
        )
    return findings, loses


def _panels(by_trace: Mapping[str, Mapping[str, Spread]], bandwidths: Sequence[float]) -> list[Panel]:
    at = [f"{b / 1e9:g} GB/s" for b in bandwidths]
    return [
        Panel(
            title="2P+4D by link bandwidth",
            x="GB/s",
            y="attainment",
            log_x=True,
            curves={p: ([b / 1e9 for b in bandwidths], [by_trace[n][p].mean for n in at]) for p in POLICIES},
        ),
        *(
            Panel(
                title=f"six GPUs by split, {policy}",
                x="attainment",
                bars={n: by_trace[n][policy].mean for n in (*SPLITS, "6 mixed")},
            )
            for policy in POLICIES
        ),
    ]


def run(options: Options) -> Outcome:
    """Bandwidths, then splits, then colocated."""
    seeds = options.seed_list(3)
    duration = 30.0 if options.quick else 100.0
    bandwidths = [1e9, 1e10] if options.quick else [2.5e8, 5e8, 1e9, 2.5e9, 1e10, 5e10]

    def builder(fleet: SimulatedFleet) -> Any:
        from functools import partial

        return partial(make_run, fleet, duration)

    make = {f"{b / 1e9:g} GB/s": builder(fleets.disaggregated(2, 4, link=Link(bandwidth=b))) for b in bandwidths}
    make |= {split: builder(fleets.disaggregated(*counts)) for split, counts in SPLITS.items()}
    make["6 mixed"] = builder(fleets.mixed(6))
    results = compare_policies(make, POLICIES, seeds, options)
    by_trace = table(results)
    at = [f"{b / 1e9:g} GB/s" for b in bandwidths]
    split_parts = {
        name: parts(replace(fleets.disaggregated(2, 4), link=Link(bandwidth=b)), duration, seeds[0])
        for name, b in zip(at, bandwidths, strict=True)
    }
    tpot = {
        p: {name: fmean(r.summary.tpot_s.p99 for r in results[name, p]) for name in ("2P+4D", "6 mixed")}
        for p in POLICIES
    }
    findings, loses = _findings(by_trace, tpot, split_parts)
    return Outcome(
        experiment="transfer",
        quick=options.quick,
        seeds=seeds,
        attainment=overall(by_trace),
        by_trace=by_trace,
        data={"ttft_parts": split_parts, "tpot_p99_s": tpot},
        findings=findings,
        loses=loses,
        panels=_panels(by_trace, bandwidths),
    )


EXPERIMENT = Experiment("transfer", __doc__ or "", run)
