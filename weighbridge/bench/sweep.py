"""Load sweep: raise the rate until the server saturates, then close in on the knee."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weighbridge.bench.charts import Series, lines
from weighbridge.bench.run import RunOptions, measure
from weighbridge.core.errors import ConfigError

FACTOR = 1.6
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Start rate and stop rules. A rate is sustained while attainment and the share of replies are high enough."""

    start: float = 1.0
    attainment: float = 0.9
    served: float = 0.95
    steps: int = 12
    refine: int = 3


def sweep(
    options: RunOptions, how: SweepOptions, folder: Path, say: Say, rates: list[float] | None = None
) -> dict[str, Any]:
    """Measure rising rates; with `rates` exactly those. Returns rows, the knee, and why the sweep ended.

    The knee is the highest rate measured at which the SLO was attained by the wanted share of all offered requests
    and nearly all of them were answered, with every lower rate sustained as well.
    """
    if how.start <= 0:
        raise ConfigError(f"must be above 0, not {how.start:g}", source="--from")
    rows: list[dict[str, Any]] = []

    def run(rate: float) -> bool:
        say(f"{rate:.3g} requests/s")
        out = folder / f"rate-{rate:.4g}"
        measured = measure(replace(options, plan=replace(options.plan, rate=rate), out=out))
        if measured.result.stopped:
            raise KeyboardInterrupt
        report = measured.report
        rows.append(_row(rate, report))
        return bool(report["attainment"] >= how.attainment and rows[-1]["answered"] >= how.served)

    if rates is not None:
        good = {rate: run(rate) for rate in sorted(rates)}
        below = [rate for rate in sorted(good) if all(good[r] for r in good if r <= rate)]
        return _result(rows, max(below, default=None), how, "all rates measured")
    rate, low, high = how.start, None, None
    for _ in range(how.steps):
        if run(rate):
            low, rate = rate, rate * FACTOR
        else:
            high = rate
            break
    if low is None:
        return _result(rows, None, how, f"even {how.start:g} requests/s is not sustained; start lower with --from")
    if high is None:
        return _result(rows, low, how, f"not saturated after {how.steps} steps")
    for _ in range(how.refine):
        middle = (low * high) ** 0.5
        if run(middle):
            low = middle
        else:
            high = middle
    return _result(rows, low, how, f"the knee lies between {low:.3g} and {high:.3g} requests/s")


def _row(rate: float, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "rate": rate,
        "offered_rate": report["offered_rate"],
        "verdict": report["verdict"],
        "attainment": report["attainment"],
        "answered": report["by_status"].get("ok", 0) / report["offered"],
        "goodput_per_s": report["goodput_per_s"],
        "shed_rate": report["shed_rate"],
        "output_tokens_per_s": report["output_tokens_per_s"],
        **{f"{m}_{q}_s": report[f"{m}_s"][q] for m in ("ttft", "tpot", "e2e") for q in ("p50", "p99")},
        "ttft_p99_of_all_s": report["adjusted"]["ttft_s"]["p99"],
    }


def _result(rows: list[dict[str, Any]], knee: float | None, how: SweepOptions, why: str) -> dict[str, Any]:
    rows.sort(key=lambda row: row["rate"])
    return {
        "format": "weighbridge.sweep",
        "version": 1,
        "knee_rate": knee,
        "why": why,
        "rule": f"attainment >= {how.attainment:g} of all offered and {how.served:g} answered, at this and lower rates",
        "rows": rows,
    }


def picture(found: dict[str, Any]) -> str:
    """Goodput and output against the offered rate, as SVG."""
    rows = found["rows"]
    goodput = Series("goodput", [(r["rate"], r["goodput_per_s"]) for r in rows], dots=True)
    ideal = Series("offered", [(r["rate"], r["rate"]) for r in rows])
    marks = [(found["knee_rate"], "knee")] if found["knee_rate"] else []
    return lines("Goodput against offered rate", "offered requests/s", "requests/s", [goodput, ideal], marks=marks)


def print_sweep(found: dict[str, Any], console: Any) -> None:
    """A row for each rate."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("rate", "met", "answered", "goodput", "TTFT p50", "TTFT p99", "TPOT p99", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for r in found["rows"]:
        table.add_row(
            f"{r['rate']:.3g}", f"{100 * r['attainment']:.1f} %", f"{100 * r['answered']:.1f} %",
            f"{r['goodput_per_s']:.2f}", f"{1e3 * r['ttft_p50_s']:.0f} ms", f"{1e3 * r['ttft_p99_s']:.0f} ms",
            f"{1e3 * r['tpot_p99_s']:.1f} ms",
            "" if r["verdict"] == "VALID" else "INVALID",
        )  # fmt: skip
    console.print(table)
    knee = found["knee_rate"]
    console.print(f"knee {knee:.3g} requests/s: {found['why']}" if knee else found["why"], soft_wrap=True)
