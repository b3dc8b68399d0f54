"""`/reports`: what did the runs say? A list, one run, or two to four beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from weighbridge.dashboard import svg
from weighbridge.dashboard.html import Child, Html, h, join
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.reports import Report
from weighbridge.dashboard.view import View, command, panel, scroller
from weighbridge.dashboard.words import NONE, count, percent, plural, rate, seconds

MOST_COMPARED = 4
KINDS = ("s0", "s1", "s2", "s3")
TARGET = 0.95
NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}


def page(query: Query, listed: Sequence[Report], chosen: Sequence[Report]) -> View:
    """`chosen` are those of `?id=` with their samples."""
    if not chosen:
        body: Child = [_list(query, listed, ()), _goodput([r for r in listed if r.kind in ("bench", "simulation")])]
    else:
        body = [_table(chosen), *_pictures(chosen), _goodput(chosen), _list(query, listed, chosen)]
    return View("Reports", join(h("h1.vh", "Reports"), _first(listed, chosen), h("div.stacked", body)))


def verdict(r: Report) -> Html | None:
    """VALID or INVALID as word and sign."""
    if not r.verdict:
        return None
    return h("b.valid", "✓ VALID") if r.verdict == "VALID" else h("b.invalid", f"✕ {r.verdict}")


def _first(listed: Sequence[Report], chosen: Sequence[Report]) -> Html:
    if not chosen:
        return h("section.first", h("p", plural(len(listed), "run"), " known. Tick two to four to compare them."))
    best = max(chosen, key=lambda r: r.goodput_per_s or 0.0)
    if len(chosen) == 1:
        text: Child = join(
            verdict(best), " " if best.verdict else None, h("b", rate(best.goodput_per_s)),
            f" goodput; {percent(best.attainment, 1)} of {count(best.offered)} offered requests met their SLO.",
        )  # fmt: skip
    else:
        text = join(h("b", best.policy or best.name), " has the highest goodput: ", h("b", rate(best.goodput_per_s)))
        if any(r.verdict == "INVALID" for r in chosen):
            text = join(text, "; ", h("b.invalid", "✕ one of these runs is INVALID"))
    return h("section.first", h("p", text))


def _list(query: Query, listed: Sequence[Report], chosen: Sequence[Report]) -> Html:
    if not listed:
        return panel(
            "Runs",
            h("p", "No report was found. Write some and name their folder: ",
              command("weighbridge bench --url URL --model M --rate 5 --out runs/a"), " then ",
              command("weighbridge dashboard --reports runs")),
        )  # fmt: skip
    ids = {r.id for r in chosen}
    rows = [
        h("tr",
          h("td", h("input", type="checkbox", name="id", value=r.id, checked=r.id in ids,
                    aria_label=f"compare {r.name}")),
          h("th", h("a", r.name, href=Query().url("/reports", id=r.id)), scope="row"),
          h("td.wide", r.kind), h("td", verdict(r) or (h("span.hot", "unreadable") if r.error else NONE)),
          h("td.wide", r.policy or NONE), h("td.num", rate(r.offered_rate)), h("td.num", rate(r.goodput_per_s)),
          h("td.num", percent(r.attainment, 1)), h("td.num.wide", seconds((r.metrics.get("ttft_s") or {}).get("p99"))),
          h("td.wide", r.created.replace("+00:00", "").replace("T", " ") or NONE), h("td.wide", r.commit or NONE))
        for r in listed
    ]  # fmt: skip
    names = (("", ""), ("Run", ""), ("Kind", "wide"), ("Verdict", ""), ("Policy", "wide"), ("Offered", "num"),
             ("Goodput", "num"), ("Attained", "num"), ("P99 TTFT", "num wide"), ("Created (UTC)", "wide"),
             ("Commit", "wide"))  # fmt: skip
    head = h("tr", *(h("th", text or h("span.vh", "compare"), scope="col", class_=c or None) for text, c in names))
    return h(
        "section.panel", h("h2", "Runs"),
        h("form", scroller("Runs", h("table.grid", h("thead", head), h("tbody", *rows))),
          h("p.links", h("button.go", "Compare ticked", type="submit"), h("a", "None", href="/reports")),
          method="get", action="/reports"),
    )  # fmt: skip


def _table(chosen: Sequence[Report]) -> Html:
    lines: list[tuple[str, list[Child]]] = [
        ("Kind", [r.kind for r in chosen]),
        ("Verdict", [verdict(r) or NONE for r in chosen]),
        ("Policy", [r.policy or NONE for r in chosen]),
        ("Model", [r.model or NONE for r in chosen]),
        ("Offered", [f"{count(r.offered)} at {rate(r.offered_rate)}" if r.offered else NONE for r in chosen]),
        ("Goodput", [rate(r.goodput_per_s) for r in chosen]),
        ("Attainment", [percent(r.attainment, 1) for r in chosen]),
        ("Shed", [percent(r.shed, 2) for r in chosen]),
    ]
    tiers = sorted({t for r in chosen for t in r.by_tier})
    lines += [(f"Attainment, {tier}", [percent(r.by_tier.get(tier), 1) for r in chosen]) for tier in tiers]
    for metric, name in NAMES.items():
        for q in ("p50", "p99"):
            lines.append((f"{name} {q.upper()}", [seconds((r.metrics.get(metric) or {}).get(q)) for r in chosen]))
    lines += [("Machine", [r.machine or NONE for r in chosen]), ("Commit", [r.commit or NONE for r in chosen]),
              ("Created", [r.created or NONE for r in chosen])]  # fmt: skip
    remarks = [(r, text) for r in chosen for text in (r.error, *r.reasons, *r.notes) if text]
    known = [(name, values) for name, values in lines if any(v != NONE for v in values)]
    rows = [h("tr", h("th", name, scope="row"), *(h("td.num", v) for v in values)) for name, values in known]
    head = h("tr", h("th", h("span.vh", "figure"), scope="col"), *(h("th.num", r.name, scope="col") for r in chosen))
    downloads = [
        h("a", f"JSON of {r.name}", href=Query().url("/reports.json", id=r.id), download=r.path.name)
        for r in chosen
        if r.kind != "event log"
    ]
    return panel(
        chosen[0].name if len(chosen) == 1 else "Compared",
        scroller("Figures", h("table.grid", h("thead", head), h("tbody", *rows))),
        h("ul.notes", *(h("li", f"{r.name}: {text}") for r, text in remarks)) if remarks else None,
        h("p.links", *downloads) if downloads else None,
    )  # fmt: skip


def _label(r: Report, chosen: Sequence[Report]) -> str:
    alone = r.policy and sum(o.policy == r.policy for o in chosen) == 1
    return r.policy if alone else r.name


def _pictures(chosen: Sequence[Report]) -> list[Html]:
    made = []
    for metric, name in NAMES.items():
        curves = [(_label(r, chosen), r.samples.get(metric) or _sketch(r, metric)) for r in chosen]
        made.append(_cdfs(f"{name} distribution", [(label, values) for label, values in curves if values]))
    if len(chosen) == 1:
        tiers = chosen[0].tiers
        if len(tiers) > 1:
            made.append(_cdfs("TTFT distribution per tier", list(tiers.items())[:4]))
        if chosen[0].pairs:
            made.append(_scatter(chosen[0]))
    drawn = [m for m in made if m is not None]
    return [h("div.two", *drawn)] if drawn else []


def _sketch(r: Report, metric: str) -> list[float]:
    """A distribution from percentiles alone, where no per-request values are kept: coarse, but true at its corners."""
    known = r.metrics.get(metric) or {}
    corners = [(known.get(k), share) for k, share in (("min", 1), ("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99))]
    points = [(value, share) for value, share in corners if value is not None]
    if len(points) < 3:
        return []
    values: list[float] = []
    for (a, low), (b, high) in pairwise(points):
        values += [a + (b - a) * k / (high - low) for k in range(high - low)]
    return [*values, points[-1][0]]


def _cdfs(title: str, curves: Sequence[tuple[str, Sequence[float]]]) -> Html | None:
    lines = [svg.cdf(label, values, kind) for kind, (label, values) in zip(KINDS, curves, strict=False)]
    ends = [_quantile(values, 0.99) for _, values in curves]
    known = [end for end in ends if math.isfinite(end)]
    if not known:
        return None
    highest = max(known)
    cut = []
    for line in lines:
        points = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if x <= highest]
        cut.append(svg.Line(line.name, [x for x, _ in points], [y for _, y in points], line.kind))
    y = svg.Axis(0.0, 1.0, "", tuple((k / 4, f"{25 * k} %") for k in range(5)))
    label = "; ".join(
        f"{name}: P50 {seconds(_quantile(v, 0.5))}, P99 {seconds(_quantile(v, 0.99))}" for name, v in curves
    )
    legend = h("span.legend", *(h("span", h(f"i.k{k}"), name) for k, (name, _) in enumerate(curves)))
    return panel(title, svg.chart(cut, svg.nice_axis(highest, "s"), y, label), legend=legend)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def _scatter(r: Report) -> Html:
    highest = sorted(max(f, o) for f, o, _ in r.pairs)[int(0.98 * (len(r.pairs) - 1))]
    outside = sum(out for _, _, out in r.pairs)
    text = f"{plural(len(r.pairs), 'decision')}, {outside} outside their error bar (◆)"
    return panel(
        "Forecast (across) against observed (up), s from dispatch",
        svg.scatter(r.pairs, svg.nice_axis(highest, ""), text), h("p.dim", text + "; on the line they are equal."),
    )  # fmt: skip


def _goodput(reports: Sequence[Report]) -> Html | None:
    """Goodput against offered rate, one line per policy or model, with the last rate that held the target."""
    groups: dict[str, list[Report]] = {}
    for r in reports:
        if r.offered_rate is not None and r.goodput_per_s is not None:
            groups.setdefault(r.policy or r.model or r.kind, []).append(r)
    drawn = {name: sorted(rs, key=lambda r: r.offered_rate or 0.0) for name, rs in groups.items()}
    drawn = {name: rs for name, rs in drawn.items() if len({r.offered_rate for r in rs}) > 1}
    if not drawn:
        return None
    lines, markers = [], []
    for kind, (name, rs) in zip(KINDS, list(drawn.items())[:4], strict=False):
        lines.append(svg.Line(name, [r.offered_rate or 0.0 for r in rs], [r.goodput_per_s or 0.0 for r in rs], kind))
        held = [r.offered_rate or 0.0 for r in rs if (r.attainment or 0.0) >= TARGET]
        if held:
            markers.append((max(held), f"{name} holds {percent(TARGET)}"))
    x = svg.nice_axis(max(max(line.xs) for line in lines), "/s")
    y = svg.nice_axis(max(max(line.ys) for line in lines), "/s")
    label = "; ".join(f"{line.name}: {rate(line.ys[-1])} goodput at {rate(line.xs[-1])} offered" for line in lines)
    legend = h("span.legend", *(h("span", h(f"i.k{k}"), line.name) for k, line in enumerate(lines)))
    picture = svg.chart(lines, x, y, label, markers=markers)
    return h("div.two", panel("Goodput against offered rate", picture, legend=legend))
