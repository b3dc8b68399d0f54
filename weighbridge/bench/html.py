"""One self-contained HTML page for one run or several side by side; no script, no link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec

from weighbridge.bench.charts import Series, bars, cdf_points, lines
from weighbridge.core.metrics import RequestRecord, percentile

BUCKETS = 60


@dataclass(frozen=True, slots=True)
class View:
    """A run as the page shows it. `running` are requests in flight at every 10 ms beat (may be empty)."""

    name: str
    report: Mapping[str, Any]
    records: Sequence[RequestRecord]
    running: Sequence[int] = ()
    gauges: Mapping[str, Sequence[tuple[float, float]]] | None = None


def page(title: str, views: Sequence[View], extra: Sequence[str] = ()) -> str:
    """The whole document; `extra` are further pictures (SVG)."""
    pictures = [*_pictures(views), *extra]
    body = "".join(f"<figure>{picture}</figure>" for picture in pictures)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{''.join(_verdict(v) for v in views)}{_table(views)}"
        f'<div class="pictures">{body}</div>{_errors(views)}{_provenance(views)}</body></html>\n'
    )


def _pictures(views: Sequence[View]) -> list[str]:
    out = []
    for title, metric in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("End to end", "e2e_s")):
        series = []
        for view in views:
            groups = _groups(view) if len(views) == 1 else {view.name: view.records}
            for name, records in groups.items():
                values = [math.inf if (v := getattr(r, metric)) is None else v for r in records]
                if metric == "tpot_s":
                    values = [v for v in values if math.isfinite(v)]
                series.append(Series(name, cdf_points(values)))
        out.append(
            lines(
                f"{title}: share of requests within",
                "seconds",
                "share of all offered",
                series,
                log_x=True,
                y_range=(0.0, 1.02),
            )
        )
    for view in views:
        prefix = f"{view.name}: " if len(views) > 1 else ""
        out.append(_over_time(view, prefix))
        if view.running:
            out.append(_in_flight(view, prefix))
        for name, points in (view.gauges or {}).items():
            out.append(lines(f"{prefix}{name}", "seconds", "", [Series("", points, step=True)]))
        share = view.report.get("share_by_instance") or {}
        if share:
            out.append(bars(f"{prefix}Share of requests by instance", "share", list(share.items()), percent=True))
    return out


def _groups(view: View) -> dict[str, Sequence[RequestRecord]]:
    """By tier, where there are several; otherwise all."""
    tiers = sorted({r.tier for r in view.records})
    if not 1 < len(tiers) <= 6:
        return {"": view.records}
    return {tier: [r for r in view.records if r.tier == tier] for tier in tiers}


def _over_time(view: View, prefix: str) -> str:
    """Median and 95th percentile of TTFT by the time of arrival."""
    end = max((r.scheduled_s for r in view.records), default=0.0) or 1.0
    buckets: list[list[float]] = [[] for _ in range(BUCKETS)]
    for r in view.records:
        value = r.ttft_s
        if value is not None:
            buckets[min(BUCKETS - 1, int(r.scheduled_s / end * BUCKETS))].append(value)
    middle, tail = [], []
    for k, values in enumerate(buckets):
        if values:
            values.sort()
            at = (k + 0.5) * end / BUCKETS
            middle.append((at, percentile(values, 50.0)))
            tail.append((at, percentile(values, 95.0)))
    title = f"{prefix}TTFT by time of arrival"
    return lines(title, "seconds since the start", "seconds", [Series("p50", middle), Series("p95", tail)])


def _in_flight(view: View, prefix: str) -> str:
    step = max(1, len(view.running) // 400)
    points = [(k * 0.01, float(max(view.running[k : k + step]))) for k in range(0, len(view.running), step)]
    return lines(f"{prefix}Requests in flight or waiting", "seconds", "requests", [Series("", points, step=True)])


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("offered requests", "offered", "count"), ("answered well", "by_status.ok", "count"),
    ("offered rate", "offered_rate", "rate"), ("SLO attainment of all offered", "attainment", "share"),
    ("goodput", "goodput_per_s", "rate"), ("shed", "shed_rate", "share"),
    ("output tokens per second", "output_tokens_per_s", "rate"),
    ("TTFT p50", "ttft_s.p50", "time"), ("TTFT p95", "ttft_s.p95", "time"), ("TTFT p99", "ttft_s.p99", "time"),
    ("TTFT p99 of all offered", "adjusted.ttft_s.p99", "time"), ("first content p50", "first_content_s.p50", "time"),
    ("TPOT p50", "tpot_s.p50", "time"), ("TPOT p99", "tpot_s.p99", "time"),
    ("ITL p50", "itl_s.p50", "time"), ("ITL p99", "itl_s.p99", "time"), ("longest gap", "longest_gap_s", "time"),
    ("E2E p50", "e2e_s.p50", "time"), ("E2E p99", "e2e_s.p99", "time"),
    ("send lag p99", "generator.send_lag_s.p99", "time"), ("event-loop lag p99", "generator.loop_lag_s.p99", "time"),
)  # fmt: skip


def _table(views: Sequence[View]) -> str:
    head = "".join(f"<th>{escape(v.name)}</th>" for v in views)
    both = len(views) == 2
    rows = []
    for label, path, kind in _ROWS:
        values = [_lookup(v.report, path) for v in views]
        if all(value is None for value in values):
            continue
        cells = "".join(f"<td>{_shown(value, kind)}</td>" for value in values)
        if both:
            cells += f"<td>{_change(values[0], values[1])}</td>"
        rows.append(f"<tr><th>{label}</th>{cells}</tr>")
    change = "<th>change</th>" if both else ""
    return f"<table><thead><tr><th></th>{head}{change}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _lookup(report: Mapping[str, Any], path: str) -> Any:
    value: Any = report
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any, kind: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "&ndash;"
    if isinstance(value, float) and math.isinf(value):
        return "never"
    if kind == "time":
        return f"{value:.2f} s" if value >= 1.0 else f"{1e3 * value:.1f} ms"
    if kind == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.2f}" if kind == "rate" else f"{value:,}"


def _change(a: Any, b: Any) -> str:
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in (a, b)) or not a:
        return "&ndash;"
    return f"{100 * (b / a - 1):+.1f} %"


def _verdict(view: View) -> str:
    word = view.report.get("verdict")
    if word is None:
        return ""
    generator = view.report["generator"]
    said = [*generator["reasons"], *generator["warnings"], *view.report.get("notes", ())]
    notes = "".join(f"<li>{escape(text)}</li>" for text in said)
    return f'<p><span class="{word.lower()}">{word}</span> {escape(view.name)}</p>' + (
        f"<ul>{notes}</ul>" if notes else ""
    )


def _errors(views: Sequence[View]) -> str:
    parts = []
    for view in views:
        items = "".join(f"<li>{n} &times; {escape(t)}</li>" for t, n in (view.report.get("errors") or {}).items())
        if items:
            parts.append(
                f"<h2>Not answered well{': ' + escape(view.name) if len(views) > 1 else ''}</h2><ul>{items}</ul>"
            )
    return "".join(parts)


def _provenance(views: Sequence[View]) -> str:
    parts = []
    for view in views:
        shown = {k: view.report[k] for k in ("provenance", "formulas") if k in view.report}
        if shown:
            text = msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()
            parts.append(
                f"<details><summary>How it was made: {escape(view.name)}</summary><pre>{escape(text)}</pre></details>"
            )
    return "".join(parts)


_STYLE = """
:root{--ink:#222;--grid:#e3e3e3;--rule:#999;--page:#fff;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--grid:#333;--rule:#777;--page:#161616}}
body{font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1180px;margin:24px auto;
padding:0 16px}
table{border-collapse:collapse;margin:16px 0}td,th{padding:3px 14px 3px 0;text-align:right;font-weight:400;
font-variant-numeric:tabular-nums}
th:first-child{text-align:left}thead th{font-weight:600;border-bottom:1px solid var(--rule)}
.pictures{display:flex;flex-wrap:wrap;gap:18px}figure{margin:0}svg{max-width:100%;height:auto}
.valid,.invalid{color:#fff;padding:2px 10px;border-radius:4px;font-weight:600}.valid{background:#1f8a55}
.invalid{background:#c0392b}pre{overflow:auto;font-size:12px}
"""
