"""Two recorded runs side by side, live or simulated: the same records, the same summary, one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.bench.html import View
from weighbridge.bench.record_table import read_any
from weighbridge.bench.report import adjusted_percentiles
from weighbridge.bench.run import RECORDS, REPORT
from weighbridge.core.metrics import summarise
from weighbridge.core.request import Tier


def read_run(text: str, tiers: Mapping[str, Tier]) -> View:
    """A run from `NAME=PATH` or a path: a folder of `bench`, its records, or those of `simulate --records`.

    Records are JSON lines or the Parquet copy of `--records`.

    The summary is computed anew from the records, so that both sides meet the same bounds. Raises `InputError`.
    """
    name, sign, rest = text.partition("=")
    path = Path(rest if sign else text)
    name = name if sign else path.name
    records = read_any(path / RECORDS if path.is_dir() else path)
    kept = [r for r in records if not r.warmup]
    report: dict[str, Any] = {}
    whole = path / REPORT if path.is_dir() else None
    if whole is not None and whole.exists():
        report = msgspec.json.decode(whole.read_bytes())
    report |= msgspec.to_builtins(summarise(kept, tiers))
    report["adjusted"] = adjusted_percentiles(kept)
    return View(name, report, kept)


def differences(views: Sequence[View]) -> dict[str, Any]:
    """Relative change of every percentile from the first run to each other one."""
    first = views[0]
    out: dict[str, Any] = {"base": first.name, "runs": {}}
    for view in views:
        entry: dict[str, Any] = {
            name: view.report[name] for name in ("offered", "attainment", "goodput_per_s", "shed_rate")
        }
        for metric in ("ttft_s", "tpot_s", "e2e_s"):
            entry[metric] = {}
            for q in ("mean", "p50", "p90", "p95", "p99"):
                value, base = view.report[metric][q], first.report[metric][q]
                entry[metric][q] = {"value": value, "change": value / base - 1.0 if base else None}
        out["runs"][view.name] = entry
    return out


def print_differences(found: dict[str, Any], console: Any) -> None:
    """Percentiles of every run, with the change from the first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in found["runs"]:
        table.add_column(name, justify="right", no_wrap=True)
    rows = list(found["runs"].values())
    table.add_row("offered", *(str(row["offered"]) for row in rows))
    for name in ("attainment", "shed_rate"):
        table.add_row(name.replace("_", " "), *(f"{100 * row[name]:.1f} %" for row in rows))
    for metric, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        for q in ("mean", "p50", "p90", "p95", "p99"):
            cells = []
            for k, row in enumerate(rows):
                value, change = row[metric][q]["value"], row[metric][q]["change"]
                moved = f" ({100 * change:+.1f} %)" if k and change is not None else ""
                cells.append("-" if value is None else f"{1e3 * value:.1f} ms{moved}")
            table.add_row(f"{label} {q}", *cells)
    console.print(table)
