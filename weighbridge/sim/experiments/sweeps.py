"""The common shape of several experiments: policies compared along one parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weighbridge.sim.experiments.base import (
    Options,
    Outcome,
    Panel,
    best_of,
    compare_policies,
    overall,
    paired,
    points,
    table,
)
from weighbridge.sim.runs import Result, Run


def sweep_policies(
    name: str,
    parameter: str,
    make: Mapping[str, Callable[[str, int], Run]],
    policies: Sequence[str],
    options: Options,
    *,
    ours: str = "calibrated",
    against: Sequence[str],
    values: Sequence[float],
    log_x: bool = False,
    seeds: Sequence[int] | None = None,
) -> Outcome:
    """Attainment of every policy at every value, and ours minus the best of `against`, paired by seed."""
    seeds = list(seeds or options.seed_list(2))
    results = compare_policies(make, policies, seeds, options)
    by_trace, differences = table(results), paired(results, ours)
    findings: list[str] = []
    loses: list[str] = []
    gains: list[float] = []
    for place, row in by_trace.items():
        best = best_of(row, against)
        gain = differences[place][best]
        gains.append(gain.mean)
        line = f"{parameter} {place}: {ours} {100 * row[ours].mean:.1f} %, best of the rest {best}: {points(gain)}"
        (findings if gain.mean >= 0 else loses).append(line)
    x = list(values)
    return Outcome(
        experiment=name,
        quick=options.quick,
        seeds=list(seeds),
        attainment=overall(by_trace),
        by_trace=by_trace,
        differences=differences,
        data={
            "gain": dict(zip(by_trace, gains, strict=True)),
            "ttft_p99_s": _means(results, "ttft"),
            "shed_rate": _means(results, "shed"),
        },
        findings=findings,
        loses=loses,
        panels=[
            Panel(
                title="attainment by policy",
                x=parameter,
                y="attainment",
                log_x=log_x,
                curves={p: (x, [by_trace[place][p].mean for place in by_trace]) for p in policies},
            ),
            Panel(
                title=f"{ours} minus the best of {len(against)} others",
                x=parameter,
                y="points",
                log_x=log_x,
                curves={"gain": (x, [100 * g for g in gains])},
            ),
        ],
    )


def _means(results: Mapping[tuple[str, str], Sequence[Result]], what: str) -> dict[str, float]:
    out = {}
    for (place, policy), rows in results.items():
        values = [r.summary.ttft_s.p99 if what == "ttft" else r.summary.shed_rate for r in rows]
        out[f"{place}/{policy}"] = sum(values) / len(values)
    return out
