"""Figures of runs as JSON and as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weighbridge.core.metrics import Distribution
from weighbridge.sim.runs import Result
from weighbridge.sim.sweep import Spread, compare

if TYPE_CHECKING:
    from weighbridge.sim.experiments.base import Outcome


def as_dict(result: Result) -> dict[str, Any]:
    """One run, flat: the summary's fields beside the simulator's own."""
    fields = msgspec.to_builtins(result)
    summary = fields.pop("summary")
    fields.pop("hits", None)
    return {**fields, **summary}


def comparison(results: Sequence[Result]) -> dict[str, Any]:
    """Several runs: mean attainment by policy, spreads by policy, and every run."""
    table = compare(results)
    return {
        "attainment": {name: row["attainment"].mean for name, row in table.items()},
        "policies": msgspec.to_builtins(table),
        "requests_per_cpu_s": sum(r.requests for r in results) / max(sum(r.cpu_s for r in results), 1e-9),
        "runs": [as_dict(r) for r in results],
    }


def to_json(value: Any, indent: int = 0) -> str:
    """JSON text; what was not measured (NaN) and what is infinite become null."""
    data = msgspec.json.encode(_finite(value))
    return (msgspec.json.format(data, indent=indent) if indent else data).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_result(result: Result, console: Any) -> None:
    """One run as a table."""
    from rich import box
    from rich.table import Table

    summary = result.summary
    console.print(
        f"{result.requests:,} requests, policy {result.policy}, seed {result.seed}: "
        f"{result.simulated_s:,.0f} s simulated in {result.cpu_s:.2f} CPU-s "
        f"({result.requests_per_cpu_s:,.0f} requests per CPU-second, {result.peak_rss_mb:,.0f} MB)",
        highlight=False,
    )
    table = Table("", "mean", "p50", "p90", "p95", "p99", "max", box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, distribution, scale, unit in (
        ("TTFT", summary.ttft_s, 1e3, "ms"),
        ("TPOT", summary.tpot_s, 1e3, "ms"),
        ("E2E", summary.e2e_s, 1.0, "s"),
    ):
        table.add_row(f"{name} [{unit}]", *_row(distribution, scale))
    console.print(table)
    tiers = ", ".join(f"{tier} {value:.1%}" for tier, value in summary.attainment_by_tier.items())
    ends = ", ".join(f"{status} {count:,}" for status, count in sorted(summary.by_status.items()))
    console.print(f"attainment {summary.attainment:.2%} of all offered requests ({tiers})", highlight=False)
    console.print(
        f"goodput {summary.goodput_per_s:.2f} requests/s, shed {summary.shed_rate:.2%}, "
        f"{result.preemptions:,} preemptions; ends: {ends}",
        highlight=False,
    )


def _row(distribution: Distribution, scale: float) -> list[str]:
    values = (
        distribution.mean,
        distribution.p50,
        distribution.p90,
        distribution.p95,
        distribution.p99,
        distribution.max,
    )
    return ["-" if math.isnan(value) else f"{value * scale:,.2f}" for value in values]


def print_comparison(results: Sequence[Result], console: Any) -> None:
    """Policies side by side; differences are paired by seed, with their standard error and the worst seed."""
    from rich import box
    from rich.table import Table

    table = Table("policy", "attained %", "diff", "worst", "TTFT99 s", "TPOT99 ms", "shed %", box=box.SIMPLE)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in compare(results).items():
        difference: Spread | None = row.get("difference")
        table.add_row(
            name,
            _share(row["attainment"]),
            "" if difference is None else _points(difference),
            "" if difference is None else f"{100 * difference.min:+.1f}",
            f"{row['ttft_p99_s'].mean:.2f}",
            f"{1e3 * row['tpot_p99_s'].mean:.1f}",
            f"{100 * row['shed_rate'].mean:.1f}",
        )
    console.print(table)


def _share(value: Spread) -> str:
    error = "" if value.standard_error is None else f" ± {100 * value.standard_error:.1f}"
    return f"{100 * value.mean:.1f}{error}"


def _points(value: Spread) -> str:
    error = "" if value.standard_error is None else f" ± {100 * value.standard_error:.1f}"
    return f"{100 * value.mean:+.1f}{error}"


def print_outcome(outcome: Outcome, console: Any) -> None:
    """An experiment: attainment by trace and policy, what was found, and where ours loses."""
    from rich import box
    from rich.table import Table

    if outcome.by_trace:
        policies = list(next(iter(outcome.by_trace.values())))
        long = len(outcome.by_trace) > len(policies)
        table = Table("attained %", *(policies if long else outcome.by_trace), box=box.SIMPLE)
        for column in table.columns[1:]:
            column.justify = "right"
        if long:
            for trace, row in outcome.by_trace.items():
                table.add_row(trace, *(_share(row[policy]) for policy in policies))
        else:
            for policy in policies:
                table.add_row(policy, *(_share(row[policy]) for row in outcome.by_trace.values()))
        console.print(table)
    for line in outcome.findings:
        console.print(f"- {line}", markup=False, highlight=False)
    if outcome.loses:
        console.print("Where it loses:")
        for line in outcome.loses:
            console.print(f"- {line}", markup=False, highlight=False)
    seeds = ", ".join(map(str, outcome.seeds))
    console.print(f"seeds {seeds}" + (" (quick size)" if outcome.quick else ""), highlight=False)
