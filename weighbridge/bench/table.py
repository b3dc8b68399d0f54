"""The report as a person reads it in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Verdict first, then outcome, latency, tiers, shares, errors, notes."""
    generator = report["generator"]
    style = "bold green" if report["verdict"] == "VALID" else "bold red"
    lag = generator["send_lag_s"]
    console.print(
        f"[{style}]{report['verdict']}[/]  send lag p50 {_ms(lag['p50'])}, p99 {_ms(lag['p99'])}, max {_ms(lag['max'])}"
        f" (limit {_ms(generator['lag_limit_s'])}); loop lag p99 {_ms(generator['loop_lag_s']['p99'])};"
        f" {_percent(generator['cpu_share'])} of a processor",
        soft_wrap=True,
    )
    for reason in generator["reasons"]:
        console.print(f"  invalid because {reason}", style="red", soft_wrap=True)
    _outcome(report, console)
    _latency(report, console)
    if len(report["by_tier"]) > 1:
        _tiers(report, console)
    if report["share_by_instance"]:
        shares = "  ".join(f"{name} {_percent(share)}" for name, share in report["share_by_instance"].items())
        console.print(f"share    {shares}", soft_wrap=True)
    for text, count in report["errors"].items():
        console.print(f"  {count} x {text}", style="yellow", soft_wrap=True, markup=False)
    for text in [*generator["warnings"], *report["notes"]]:
        console.print(f"note: {text}", style="dim", soft_wrap=True, markup=False)


def _outcome(report: Mapping[str, Any], console: Console) -> None:
    statuses = ", ".join(f"{count} {name}" for name, count in sorted(report["by_status"].items()))
    console.print(f"offered  {report['offered']} requests at {_number(report['offered_rate'])}/s: {statuses}")
    console.print(
        f"served   {_number(report['achieved_rate'])} requests/s, {_number(report['output_tokens_per_s'])} output"
        f" tokens/s over {report['window_s']:.1f} s"
    )
    console.print(
        f"SLO      attainment {_percent(report['attainment'])} of all offered, goodput"
        f" {_number(report['goodput_per_s'])}/s, shed {_percent(report['shed_rate'])}"
    )


def _latency(report: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("p50", "p90", "p95", "p99", "max", "mean", "p99 of all"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = (
        ("TTFT", report["ttft_s"], report["adjusted"]["ttft_s"]["p99"]),
        ("content", report["first_content_s"], None),
        ("TPOT", report["tpot_s"], None),
        ("ITL", report["itl_s"], None),
        ("E2E", report["e2e_s"], report["adjusted"]["e2e_s"]["p99"]),
    )
    for name, values, of_all in rows:
        if not values["count"]:
            continue
        cells = [_ms(values[key]) for key in ("p50", "p90", "p95", "p99", "max", "mean")]
        table.add_row(name, *cells, "" if of_all is None else _ms(of_all))
    console.print(table)


def _tiers(report: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("tier", no_wrap=True)
    for name in ("offered", "met", "TTFT p50", "TTFT p99", "TPOT p50", "E2E p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for tier, part in report["by_tier"].items():
        table.add_row(
            tier, str(part["offered"]), _percent(part["attainment"]), _ms(part["ttft_s"]["p50"]),
            _ms(part["ttft_s"]["p99"]), _ms(part["tpot_s"]["p50"]), _ms(part["e2e_s"]["p99"]),
        )  # fmt: skip
    console.print(table)
    for tier, slo in report["slo"].items():
        bounds = ", ".join(f"{k.removesuffix('_s').upper()} <= {v:g} s" for k, v in slo.items())
        console.print(f"  {tier}: {bounds or 'ends well'}", style="dim", soft_wrap=True)


def _ms(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "-"
    if math.isinf(seconds):
        return "never"
    if seconds >= 1.0:
        return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{1e3 * seconds:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
