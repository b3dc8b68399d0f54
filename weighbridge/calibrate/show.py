"""A profile on the terminal, and two of them side by side."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.table import Table

from weighbridge.calibrate.fitting import MetricError
from weighbridge.core.instance import StepTerms
from weighbridge.cost.profile import Profile

_UNITS: dict[str, tuple[float, str]] = {
    "base_s": (1e3, "ms per step"),
    "prefill_s": (1e6, "us per prefill token"),
    "attend_s": (1e9, "ns per attended token"),
    "sequence_s": (1e6, "us per decoding sequence"),
    "kv_s": (1e9, "ns per KV token read"),
    "scan_s": (1e9, "ns per token and used cell"),
}


def formula(step: StepTerms) -> str:
    """The model in words, terms of no weight left out."""
    found = [
        f"{getattr(step, name) * scale:.4g} {unit}" for name, (scale, unit) in _UNITS.items() if getattr(step, name)
    ]
    text = "step = " + " + ".join(found)
    if step.sequence_knots:
        points = ", ".join(f"{count:g}: {seconds * 1e3:.4g} ms" for count, seconds in step.sequence_knots)
        text += f"; by number of sequences: {points}"
    return text


def profile_tables(profile: Profile) -> list[Table]:
    """Where it comes from, the model, and its errors."""
    p = profile.provenance
    about = Table(title="profile", show_header=False)
    about.add_column()
    about.add_column(overflow="fold")
    rows = (
        ("engine", f"{p.engine} {p.engine_version}".strip()),
        ("model", f"{p.model} {p.quantisation}".strip()),
        ("device", p.device or "not told"),
        ("hardware", p.hardware or "not known"),
        ("measured", f"{p.measured_at}, {p.method}".strip(", ")),
        ("source", profile.source),
        ("limits", _limits(profile)),
        ("rates", _rates(profile)),
        ("cold first request", _cold(profile)),
        ("probed range", ", ".join(f"{k} {low:g} to {high:g}" for k, (low, high) in profile.ranges.items())),
    )
    for name, value in rows:
        if value:
            about.add_row(name, value)
    tables = [about]
    if profile.step is not None:
        tables.append(_terms(profile, profile.step))
    if any(q.count for q in profile.residuals.values()):
        tables.append(_residuals(profile))
    return tables


def error_table(title: str, metrics: Mapping[str, MetricError]) -> Table:
    """How forecasts compared with what happened."""
    table = Table(title=title)
    for column in ("metric", "mean error", "median", "p90", "p99", "bias of mean", "bias of p99"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, e in metrics.items():
        shares = [f"{share:.1%}" for share in (e.mape, e.median, e.p90, e.p99)]
        table.add_row(metric.removesuffix("_s").upper(), *shares, f"{e.bias_mean:+.1%}", f"{e.bias_p99:+.1%}")
    return table


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a comparison; `ratio` is the second over the first where both are numbers above 0."""

    name: str
    first: float | str | None
    second: float | str | None
    ratio: float | None = None


def differences(a: Profile, b: Profile) -> list[Difference]:
    """Everything in which two profiles may differ, in a fixed order."""
    found = [
        Difference(name=name, first=getattr(a.provenance, name), second=getattr(b.provenance, name))
        for name in ("engine", "engine_version", "model", "quantisation", "device", "measured_at")
    ]
    numbers: list[tuple[str, float | None, float | None]] = [
        ("prefill_tokens_per_s", a.rates.prefill_tokens_per_s, b.rates.prefill_tokens_per_s),
        ("decode_tokens_per_s", a.rates.decode_tokens_per_s, b.rates.decode_tokens_per_s),
    ]
    for name in _UNITS:
        left, right = (None if p.step is None else float(getattr(p.step, name)) for p in (a, b))
        numbers.append((name, left, right))
    limits = ("token_budget", "max_sequences", "kv_blocks", "max_context")
    numbers += [(name, getattr(a.limits, name), getattr(b.limits, name)) for name in limits]
    numbers.append(("error", a.error, b.error))
    for name, left, right in numbers:
        ratio = right / left if left and right else None
        found.append(Difference(name=name, first=left, second=right, ratio=ratio))
    return found


def difference_table(a: Profile, b: Profile, names: tuple[str, str]) -> Table:
    """Two profiles side by side, lines that are empty in both left out."""
    table = Table(title="two profiles")
    for column in ("", *names, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for d in differences(a, b):
        if d.first or d.second:
            scale, label = _UNITS.get(d.name, (1.0, d.name.replace("_", " ")))
            cells = ["" if v is None else v if isinstance(v, str) else f"{v * scale:.4g}" for v in (d.first, d.second)]
            note = f"{d.ratio:.3f}" if d.ratio is not None else "" if d.first == d.second else "differs"
            table.add_row(label, *cells, note)
    return table


def _terms(profile: Profile, step: StepTerms) -> Table:
    table = Table(title="step time")
    for column in ("term", "value", "standard error", "stands on its own"):
        table.add_column(column, justify="left" if column == "term" else "right")
    errors = profile.step_errors
    for name, (scale, unit) in _UNITS.items():
        value, error = getattr(step, name), getattr(errors, name) if errors is not None else 0.0
        if value or error or name in profile.unidentified:
            own = "no" if name in profile.unidentified else "yes"
            table.add_row(unit, f"{value * scale:.4g}", f"{error * scale:.2g}" if error else "", own)
    for count, seconds in step.sequence_knots:
        table.add_row(f"ms, {count:g} sequence{'' if count == 1 else 's'}", f"{seconds * 1e3:.4g}", "", "")
    if profile.overhead_s:
        table.add_row("ms per request outside steps", f"{profile.overhead_s * 1e3:.4g}", "", "")
    return table


def _residuals(profile: Profile) -> Table:
    table = Table(title="observed against forecast, requests that were not fitted")
    for column in ("metric", "count", "median error", "mean error", "5 %", "95 %"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, q in profile.residuals.items():
        if q.count:
            shares = (f"{q.median:.1%}", f"{q.mape:.1%}", f"{q.p05:+.1%}", f"{q.p95:+.1%}")
            table.add_row(metric.removesuffix("_s").upper(), str(q.count), *shares)
    return table


def _limits(profile: Profile) -> str:
    limits = profile.limits
    known = (
        ("token budget", limits.token_budget),
        ("sequences", limits.max_sequences),
        ("KV blocks", limits.kv_blocks),
        ("context", limits.max_context),
    )
    return ", ".join(f"{name} {value:,}" for name, value in known if value is not None)


def _rates(profile: Profile) -> str:
    rates = profile.rates
    return f"prefill {rates.prefill_tokens_per_s:.1f} tokens/s, decode {rates.decode_tokens_per_s:.1f} tokens/s alone"


def _cold(profile: Profile) -> str:
    cold = profile.extra.get("cold_first_request_s")
    return f"{cold:.3f} s to its first token" if isinstance(cold, float) else ""
