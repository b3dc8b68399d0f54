"""At measured saturation, on three mixed bursty traces, is a calibrated router better, and does calibration matter?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, pstdev

from weighbridge.core.instance import StepTerms
from weighbridge.core.metrics import RequestRecord
from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import (
    Experiment,
    Options,
    Outcome,
    Panel,
    best_of,
    compare_policies,
    overall,
    paired,
    points,
    table,
    variant,
)
from weighbridge.sim.experiments.saturation import saturated_rate, saturating
from weighbridge.sim.fleet import SimulatedFleet
from weighbridge.sim.lab import tiers_of
from weighbridge.sim.runs import Generated, Run, run_with_records
from weighbridge.workload import mixes
from weighbridge.workload.arrivals import Arrivals, Bursts, Gamma

SIMPLE = ("round_robin", "least_requests", "length_threshold")
POLICIES = (
    *SIMPLE,
    "least_tokens",
    "paper_score",
    "calibrated",
    "uncalibrated",
    "miscalibrated",
    "calibrated/immediate",
    "uncalibrated/immediate",
)


def traces(rate: float) -> dict[str, Arrivals]:
    """Three bursty arrival processes of one mean rate."""
    return {
        "bursts": Bursts(rate),
        "spikes": Bursts(rate, 8.0, 2.0, 28.0),
        "gamma": Gamma(rate, 4.0),
    }


def uncalibrated(fleet: SimulatedFleet) -> SimulatedFleet:
    """The router is told no costs at all."""
    return fleet.changed(knows_costs=False)


def miscalibrated(fleet: SimulatedFleet) -> SimulatedFleet:
    """The router believes wrong constants: decoding 7 times cheaper than it is, prefill right."""

    def wrong(t: StepTerms) -> StepTerms:
        return StepTerms(base_s=t.base_s / 7, prefill_s=t.prefill_s, sequence_s=t.sequence_s / 7, kv_s=t.kv_s / 7)

    return replace(fleet, instances=tuple(replace(i, believed=wrong(i.terms)) for i in fleet.instances))


def make_run(trace: str, rate: float, duration_s: float, policy: str, seed: int) -> Run:
    """One run on 2 prefill + 4 decode instances."""
    fleet = fleets.disaggregated(2, 4)
    name = policy
    for arm, change in (("uncalibrated", uncalibrated), ("miscalibrated", miscalibrated)):
        if policy.startswith(arm):
            name, fleet = policy.replace(arm, "calibrated"), change(fleet)
    one = Run(
        fleet=fleet,
        workload=Generated(mixes.workload("mixed", traces(rate)[trace]), duration_s=duration_s),
        seed=seed,
        tiers=tiers_of(mixes.classes("mixed")),
        skip=0.05,
        label=trace,
    )
    return variant(one, name)


def balance(records: Sequence[RequestRecord]) -> dict[str, float]:
    """How unevenly decode instances were loaded: coefficient of variation of requests, and of tokens."""
    requests: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for r in records:
        requests[r.instance] = requests.get(r.instance, 0) + 1
        tokens[r.instance] = tokens.get(r.instance, 0) + r.prompt_tokens + r.output_tokens
    return {"requests_cv": _cv(list(requests.values())), "tokens_cv": _cv(list(tokens.values()))}


def _cv(values: Sequence[int]) -> float:
    return pstdev(values) / fmean(values) if values else 0.0


def run(options: Options) -> Outcome:
    """Find saturation per trace, then compare."""
    seeds = options.seed_list(3)
    duration = 20.0 if options.quick else 120.0
    finding = options.seed_list(2)
    names = list(traces(1.0))
    rates = {}
    for trace in names:
        rates[trace] = saturated_rate(
            saturating(make_run, trace, duration),
            [seed + 1000 for seed in finding],
            options,
            start=20.0,
        )
    make = {trace: partial(make_run, trace, rates[trace], duration) for trace in names}
    results = compare_policies(make, POLICIES, seeds, options)
    by_trace = table(results)
    differences = paired(results, "calibrated")
    balances = {}
    for policy in ("least_requests", "least_tokens", "uncalibrated", "calibrated"):
        _, records = run_with_records(make["bursts"](policy, seeds[0]))
        balances[policy] = balance([r for r in records if r.status == "ok"])
    findings: list[str] = []
    loses: list[str] = []
    for trace, row in by_trace.items():
        best = best_of(row, SIMPLE)
        difference = differences[trace][best]
        line = (
            f"{trace}: calibrated {100 * row['calibrated'].mean:.1f} %, best simple rule {best}: {points(difference)}"
        )
        (findings if difference.mean > 0 else loses).append(line)
        findings += [
            f"{trace}: calibrated against {arm}: {points(differences[trace][arm])}"
            for arm in ("uncalibrated", "miscalibrated")
        ]
    return Outcome(
        experiment="calibrate-then-route",
        quick=options.quick,
        seeds=seeds,
        attainment=overall(by_trace),
        by_trace=by_trace,
        differences=differences,
        data={
            "saturated_rate": rates,
            "balance": balances,
            "ttft_p99_s": {f"{t}/{p}": fmean(r.summary.ttft_s.p99 for r in rows) for (t, p), rows in results.items()},
            "shed_rate": {f"{t}/{p}": fmean(r.summary.shed_rate for r in rows) for (t, p), rows in results.items()},
        },
        findings=findings,
        loses=loses,
        panels=[
            Panel(
                title=f"{trace}: {rates[trace]:.1f} requests/s, 2P+4D",
                x="attainment",
                bars={policy: value.mean for policy, value in row.items()},
                errors={policy: value.standard_error or 0.0 for policy, value in row.items()},
            )
            for trace, row in by_trace.items()
        ],
    )


EXPERIMENT = Experiment("calibrate-then-route", __doc__ or "", run)
