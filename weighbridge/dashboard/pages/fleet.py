"""`/`: is the fleet well, and if not, where?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weighbridge.dashboard import judge, svg
from weighbridge.dashboard.html import Child, Html, h, join
from weighbridge.dashboard.judge import SIGN, WORD, Judgement
from weighbridge.dashboard.pages.decisions import why
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import InstanceView, Snapshot
from weighbridge.dashboard.view import View, command, panel, scroller
from weighbridge.dashboard.words import NONE, age, count, percent, plural, rate, seconds, signed

SORTS: dict[str, tuple[str, Callable[[InstanceView], float]]] = {
    "headroom": ("least head-room first", lambda i: -(i.load or 0.0)),
    "queue": ("longest queue first", lambda i: -float(i.waiting)),
    "kv": ("fullest KV cache first", lambda i: -(i.kv_used or 0.0)),
    "error": ("largest forecast error first", lambda i: -abs(e.median) if (e := judge.spread(i)) else 0.0),
}
MOST_ATTENTION = 6


def page(snapshot: Snapshot, query: Query) -> View:
    """The first page."""
    chosen = _selected(snapshot, query)
    rows, order = _rows(snapshot, query, chosen)
    latest = next((d for d in snapshot.decisions if d.candidates), None)
    parts = {
        "kpi": _headline(snapshot),
        "att": _attention(snapshot),
        **rows,
        "detail": _detail(chosen),
        "latest": panel(
            "Latest decision", why(latest, compact=True) if latest else h("p.dim", "No decision yet."), anchor="latest"
        ),
    }
    body = join(
        _stale(snapshot),
        parts["kpi"],
        parts["att"],
        _table(snapshot, query, list(rows.values())) if snapshot.instances else _empty(snapshot),
        h("div.two", parts["detail"], parts["latest"]),
    )
    shape = "|".join((*order, query.get("sort"), chosen.name if chosen else "", snapshot.error))
    return View("Fleet", body, parts, shape, live=True)


def _selected(snapshot: Snapshot, query: Query) -> InstanceView | None:
    return snapshot.instance(query.get("i")) or judge.worst(snapshot) or next(iter(snapshot.instances), None)


def _stale(snapshot: Snapshot) -> Html | None:
    if not snapshot.error:
        return None
    return h(
        "section.alert", h("strong", "✕ The gateway's admin API cannot be read. "), snapshot.error,
        f" Everything below is {seconds(snapshot.age_s)} old. ", command("weighbridge doctor"), role="alert",
    )  # fmt: skip


def _empty(snapshot: Snapshot) -> Html:
    text = "No instance is known yet." if not snapshot.error else "No instance was seen before the admin API went away."
    return h("section.panel", h("p", text))


def tile(
    name: str, value: str, note: Child, series: Sequence[float], judgement: Judgement, floor: float | None = None
) -> Html:
    """One headline number with its recent history and, where it is judged, sign and word."""
    mark = h("span.sign", SIGN[judgement], " ", h("span", WORD[judgement])) if judgement != "none" else None
    return h(
        "div.tile", h("div.k", name, mark), h("div.v", value), h("div.n", note),
        svg.spark(series, f"{name}, last {len(series)} s", floor), class_=f"j-{judgement}",
    )  # fmt: skip


def _headline(s: Snapshot) -> Html:
    worst = judge.worst(s)
    room = 1 - worst.load if worst and worst.load is not None else None
    bound = f"{s.ttft_tier}; bound {seconds(s.ttft_bound_s)}" if s.ttft_bound_s is not None else s.ttft_tier or "all"
    bar = f"; error bar {percent(s.error_bar, 1)}" if s.error_bar is not None else ""
    target = judge.ATTAINMENT_TARGET
    return h(
        "section.kpis#kpi",
        tile("SLO attainment", percent(s.attainment, 1), f"of all offered; target {percent(target)}",
             s.series.attainment, judge.above(s.attainment, target)),
        tile("Goodput", rate(s.goodput_per_s), "requests that met every SLO", s.series.goodput, "none", 0.0),
        tile("Shed", percent(s.shed, 2), f"held in the router: {count(s.queued)}", s.series.shed,
             judge.below(s.shed, 0.01, 0.05), 0.0),
        tile("P99 TTFT", seconds(s.ttft_p99_s), bound, s.series.ttft, judge.below(s.ttft_p99_s, s.ttft_bound_s), 0.0),
        tile("Least head-room", signed(room), _subject(worst.name) if worst else NONE,
             s.series.headroom, judge.headroom(worst.load if worst else None)),
        tile("Forecast error", percent(s.forecast_error, 1), f"median |E2E|{bar}", s.series.error,
             judge.below(s.forecast_error, s.error_bar), 0.0),
        aria_label=f"Headline numbers over the last {s.window_s:.0f} s",
    )  # fmt: skip


def _attention(snapshot: Snapshot) -> Html:
    found = judge.attention(snapshot)
    items = [
        h(
            "li", h("span.sign", SIGN[a.judgement], " ", h("span.vh", WORD[a.judgement])), _subject(a.subject), " ",
            a.text, join(" ", command(a.command)) if a.command else None, class_=f"j-{a.judgement}",
        )
        for a in found[:MOST_ATTENTION]
    ]  # fmt: skip
    more = len(found) - len(items)
    if more > 0:
        items.append(h("li", f"and {plural(more, 'more point')}; sort the table by head-room or error to see them."))
    inside = h("ul", *items) if items else h("p", h("span.sign", "✓ "), "Nothing needs attention.")
    return h("section.att#att", h("h2.vh", "Needs attention"), inside)


def _subject(subject: str) -> Html:
    if subject.startswith("tier:"):
        return h("a", f"Tier {subject[5:]}", href="/tiers")
    return h("a", subject, href=Query().url("/", i=subject))


def _rows(s: Snapshot, query: Query, chosen: InstanceView | None) -> tuple[dict[str, Html], list[str]]:
    """Table rows by element id, in display order, and the names in that order."""
    rows: dict[str, Html] = {}
    sort = SORTS.get(query.get("sort"))
    instances = sorted(s.instances, key=sort[1]) if sort else list(s.instances)
    if sort:
        groups = [("", instances)]
    else:
        groups = [(pool, [i for i in instances if i.pool == pool]) for pool in dict.fromkeys(i.pool for i in instances)]
    for pool, members in groups:
        if pool:
            running, waiting = sum(i.running for i in members), sum(i.waiting for i in members)
            text = f"{plural(len(members), 'instance')}, {count(running)} running, {count(waiting)} waiting"
            rows[f"p-{pool}"] = h(
                "tr.pool", h("th", pool, h("small", text), colspan="11", scope="rowgroup"), id=f"p-{pool}"
            )
        for i in members:
            rows[f"i-{i.name}"] = _row(i, query, i is chosen)
    return rows, list(rows)


def _row(i: InstanceView, query: Query, chosen: bool) -> Html:
    error = judge.spread(i)
    last = i.pairs[-1] if i.pairs else None
    room = None if i.load is None else 1 - i.load
    judged = judge.headroom(i.load)
    drift = judge.drifted(i, error)
    of = f"/{i.max_sequences}" if i.max_sequences else ""
    share = i.running / i.max_sequences if i.max_sequences else None
    peak = f", forecast peak {percent(i.kv_peak)}" if i.kv_peak is not None else ""
    return h(
        "tr",
        h("th", h("a", h(f"span.dot.{i.state}", aria_hidden="true"), i.name, href=query.url("/", i=i.name)),
          h("small", i.engine if i.state == "up" else i.state), scope="row"),
        h("td.wide", h(f"span.lvl.l-{i.level}", h("i", aria_hidden="true"), i.level, title=judge.LEVEL_TEXT[i.level])),
        h("td.bars", svg.bar(share, f"{i.running} running{f' of {i.max_sequences}' if of else ''}"),
          h("span.num", count(i.running), h("small", of))),
        h("td.num", count(i.waiting), class_="hot" if i.waiting > 3 else None),
        h("td.bars", svg.bar(i.kv_used, f"KV cache {percent(i.kv_used)}{peak}", i.kv_peak,
                             "bad" if (i.kv_peak or 0) > 1 else ""), h("span.num", percent(i.kv_used))),
        h("td.bars", svg.bar(i.load, f"load {percent(i.load)} of what it sustains", None, judged),
          h("span.num", h("b.sign", SIGN[judged] if judged in ("watch", "bad") else ""), signed(room),
            class_="hot" if judged == "bad" else None)),
        h("td.num.wide", seconds(last.forecast_s if last else None)),
        h("td.num.wide", seconds(last.observed_s if last else None)),
        h("td.wide", svg.strip(error.low, error.median, error.high, i.error_bar,
                               f"error {signed(error.median)}, error bar {percent(i.error_bar)}") if error else NONE),
        h("td.num.wide", signed(error.median) if error else NONE, " ▲" if drift else None,
          class_="hot" if drift else None),
        h("td.num.dim", age(i.age_s)),
        id=f"i-{i.name}", class_="sel" if chosen else None,
    )  # fmt: skip


def _heading(text: Child, query: Query, sort: str = "", classes: str = "") -> Html:
    active = bool(sort) and query.get("sort") == sort
    inner: Child = (
        h("a", text, " ↓" if active else None, href=query.url("/", sort=None if active else sort)) if sort else text
    )
    return h("th", inner, scope="col", class_=classes or None, aria_sort="descending" if active else None)


def _table(s: Snapshot, query: Query, rows: list[Html]) -> Html:
    head = h(
        "tr",
        _heading("Instance", query),
        _heading("Calibration", query, classes="wide"),
        _heading("Running", query),
        _heading("Queue", query, "queue", "num"),
        _heading("KV cache", query, "kv"),
        _heading(join(h("span.wide", "Load, head-room"), h("span.narrow", "Head-room")), query, "headroom"),
        _heading("Forecast", query, classes="num wide"),
        _heading("Observed", query, classes="num wide"),
        _heading("Error 10–90 %", query, "error", "wide"),
        _heading("Median", query, classes="num wide"),
        _heading("Age", query, classes="num"),
    )
    how = SORTS[query.get("sort")][0] if query.get("sort") in SORTS else "by pool and name"
    caption = h("caption.vh", f"Instances, {how}. TTFT forecast and observed are of the last request.")
    return scroller("Instances", h("table.grid#fleet", caption, h("thead", head), h("tbody", *rows)))


def _facts(i: InstanceView) -> Html:
    pairs = (
        ("Engine", f"{i.engine or 'unknown'}, {i.role}"),
        ("Calibration", f"{i.level}: {judge.LEVEL_TEXT[i.level]}"),
        ("Prefill", f"{count(i.rates.prefill_tokens_per_s)} tokens/s" if i.rates else NONE),
        ("Decode", f"{count(i.rates.decode_tokens_per_s)} tokens/s" if i.rates else NONE),
        ("KV capacity", f"{count(i.limits.kv_tokens)} tokens"),
        ("Token budget", f"{count(i.limits.token_budget)} per step"),
        ("Arrivals", rate(i.rate_per_s)),
        ("Reported", f"{age(i.age_s)} ago"),
    )
    return h("dl.facts", *(h("div", h("dt", k), h("dd", v)) for k, v in pairs))


def _detail(i: InstanceView | None) -> Html:
    if i is None:
        return panel("Instance", h("p.dim", "None selected."), anchor="detail")
    links = h(
        "p.links",
        h("a", "Its decisions", href=Query().url("/decisions", instance=i.name)),
        h("a", "What fits on it", href=Query().url("/capacity", **{"from": i.name})),
    )
    if len(i.pairs) < 2:
        picture: Html = h("p.dim", "No request of this instance has both a forecast and a first token yet.")
    else:
        xs = [float(k - len(i.pairs) + 1) for k in range(len(i.pairs))]
        forecast, observed = [p.forecast_s for p in i.pairs], [p.observed_s for p in i.pairs]
        high = max(*forecast, *observed, *(p.forecast_s + p.error_s for p in i.pairs))
        first = xs[0]
        marks = tuple(
            (first * f, "now" if f == 0 else f"{first * f:.0f}".replace("-", "−")) for f in (1, 0.75, 0.5, 0.25, 0)
        )
        picture = svg.chart(
            [svg.Line("forecast", xs, forecast, "s0"), svg.Line("observed", xs, observed, "s1")],
            svg.Axis(first, 0.0, "requests ago", marks), svg.nice_axis(high, "s"),
            f"TTFT of the last {len(xs)} requests of {i.name}: forecast {seconds(forecast[-1])}, "
            f"observed {seconds(observed[-1])}",
            band=[(x, max(0.0, p.forecast_s - p.error_s), p.forecast_s + p.error_s)
                  for x, p in zip(xs, i.pairs, strict=True)],
        )  # fmt: skip
    legend = h("span.legend", h("span", h("i.k0"), "forecast, error bar"), h("span", h("i.k1"), "observed"))
    return panel(f"{i.name}: TTFT of its last requests", picture, _facts(i), links, anchor="detail", legend=legend)
