"""`/tiers`: who gets what they were promised?"""

from __future__ import annotations

from weighbridge.dashboard import judge, svg
from weighbridge.dashboard.html import Child, Html, h, join
from weighbridge.dashboard.judge import SIGN
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import Latency, Snapshot, TierView
from weighbridge.dashboard.view import View, panel, scroller
from weighbridge.dashboard.words import NONE, count, percent, plural, seconds


def page(snapshot: Snapshot, query: Query) -> View:
    """All tiers, or one tenant's part of them (`?tenant=`)."""
    tenant = query.get("tenant")
    parts = {
        "first": _first(snapshot),
        "slo": _promises(snapshot),
        "lat": _latencies(snapshot),
        "shed": _shed(snapshot),
        "queue": _queue(snapshot, tenant),
        "served": _served(snapshot, tenant),
    }
    body = join(
        h("h1.vh", "Tiers"), parts["first"], _filter(snapshot, tenant), parts["slo"], parts["lat"],
        h("div.two", parts["shed"], parts["queue"]), parts["served"],
    )  # fmt: skip
    return View("Tiers", body, parts, "|".join(t.name for t in snapshot.tiers) + tenant, live=True)


def _bounds(t: TierView) -> str:
    return ", ".join(f"{name} ≤ {seconds(value)}" for name, value in t.bounds) or "throughput, no bound"


def _first(s: Snapshot) -> Html:
    judged = [(t, t.attainment) for t in s.tiers if t.attainment is not None and t.bounds]
    if not judged:
        return h("section.first#first", h("p", "No request with an SLO was offered in the window yet."))
    text: list[Child] = []
    for k, (t, share) in enumerate(judged):
        sign = SIGN[judge.above(share, t.target)]
        text += ["; " if k else None, h("b", f"{t.name} {percent(share, 1)}"), f" {sign} (target {percent(t.target)})"]
    return h("section.first#first", h("p", *text, f". Over the last {s.window_s:.0f} s, of all offered requests."))


def _filter(s: Snapshot, tenant: str) -> Html | None:
    names = sorted({t.name for tier in s.tiers for t in tier.tenants})
    if not names:
        return None
    options = [h("option", "all tenants", value=""), *(h("option", n, value=n, selected=n == tenant) for n in names)]
    return h(
        "form.filters", h("label", "Tenant", h("select", *options, name="tenant")), h("button", "Apply", type="submit"),
        method="get", action="/tiers", data_auto=True,
    )  # fmt: skip


def _promises(s: Snapshot) -> Html:
    rows = []
    for t in s.tiers:
        share = t.attainment
        judged = judge.above(share, t.target) if t.bounds else "none"
        label = f"{t.name}: {percent(share, 1)} of {t.offered} offered, target {percent(t.target)}"
        rows.append(
            h(
                "tr",
                h("th", h("a", t.name, href=Query().url("/decisions", tier=t.name)), h("small", _bounds(t)),
                  scope="row"),
                h("td.bars.grow", svg.bar(share, label, t.target if t.bounds else None, judged)),
                h("td.num", h("b", SIGN[judged], " "), percent(share, 1), class_="hot" if judged == "bad" else None),
                h("td.num.wide", percent(t.target) if t.bounds else NONE), h("td.num", count(t.offered)),
                h("td.num", count(t.met)), h("td.num.wide", count(t.failed)), h("td.num.wide", count(t.cancelled)),
            )
        )  # fmt: skip
    names = (("Tier", ""), ("Attainment against target", ""), ("Attained", "num"), ("Target", "num wide"),
             ("Offered", "num"), ("Met", "num"), ("Failed", "num wide"), ("Cancelled", "num wide"))  # fmt: skip
    return panel("Promises", scroller("Promises", _grid(names, rows)), anchor="slo")


def _grid(names: tuple[tuple[str, str], ...], rows: list[Html]) -> Html:
    head = h("tr", *(h("th", text, scope="col", class_=c or None) for text, c in names))
    return h("table.grid", h("thead", head), h("tbody", *rows))


def _latencies(s: Snapshot) -> Html:
    def cells(value: Latency, bound: float | None) -> list[Html]:
        over = bound is not None and value.p99_s is not None and value.p99_s > bound
        mark = " ▲" if over else None
        return [
            h("td.num", seconds(value.p50_s)),
            h("td.num", seconds(value.p99_s), mark, class_="hot" if over else None),
        ]

    rows = []
    for t in s.tiers:
        bounds = dict(t.bounds)
        rows.append(
            h("tr", h("th", t.name, scope="row"), *cells(t.ttft, bounds.get("TTFT")),
              *cells(t.tpot, bounds.get("TPOT")), *cells(t.e2e, bounds.get("E2E")))
        )  # fmt: skip
    names = (("Tier", ""), ("TTFT P50", "num"), ("P99", "num"), ("TPOT P50", "num"), ("P99", "num"), ("E2E P50", "num"),
             ("P99", "num"))  # fmt: skip
    note = h("p.dim", "▲ P99 is over the tier's bound. Times are from arrival at the gateway.")
    return panel("Latency", scroller("Latency", _grid(names, rows)), note, anchor="lat")


def _shed(s: Snapshot) -> Html:
    rows = []
    for t in s.tiers:
        reasons = ", ".join(f"{name} {number}" for name, number in t.reasons) or NONE
        share = t.shed / t.offered if t.offered else None
        promise = NONE
        if t.retry_after_s is not None:
            promise = f"{seconds(t.retry_after_s)} given, {seconds(t.drain_s)} needed"
        rows.append(
            h("tr", h("th", t.name, scope="row"), h("td.num", percent(share, 2)), h("td.num", count(t.shed_429)),
              h("td.num", count(t.shed_503)), h("td", reasons), h("td", promise))
        )  # fmt: skip
    names = (("Tier", ""), ("Shed", "num"), ("429", "num"), ("503", "num"), ("Reasons", ""), ("Retry-After", ""))
    note = h("p.dim", "429: capacity exists but is contended. 503: there is none. A client's cancel is neither.")
    return panel("Turned away", scroller("Turned away", _grid(names, rows)), note, anchor="shed")


def _queue(s: Snapshot, tenant: str) -> Html:
    most = max((t.queued for t in s.tiers), default=0)
    rows = []
    for t in s.tiers:
        tenants = [x for x in t.tenants if x.queued and (not tenant or x.name == tenant)]
        who = ", ".join(f"{x.name} {x.queued}" for x in tenants) or NONE
        share = t.queued / most if most else 0.0
        rows.append(
            h("tr", h("th", t.name, scope="row"),
              h("td.bars", svg.bar(share, f"{t.queued} held"), h("span.num", count(t.queued))),
              h("td.num", count(t.queued_tokens)), h("td", who))
        )  # fmt: skip
    names = (("Tier", ""), ("Held", ""), ("Prompt tokens", "num"), ("By tenant", ""))
    total = sum(t.queued for t in s.tiers)
    return panel(
        f"Router queue: {plural(total, 'request')}", scroller("Router queue", _grid(names, rows)), anchor="queue"
    )


def _served(s: Snapshot, tenant: str) -> Html:
    served: dict[str, int] = {}
    for t in s.tiers:
        for x in t.tenants:
            served[x.name] = served.get(x.name, 0) + x.served_tokens
    total = sum(served.values())
    rows = [
        h("tr", h("th", h("a", name or "no tenant", href=Query().url("/tiers", tenant=name)), scope="row"),
          h("td.bars.grow", svg.bar(value / max(1, total), f"{name}: {percent(value / max(1, total))}")),
          h("td.num", percent(value / total if total else None, 1)), h("td.num", count(value)))
        for name, value in sorted(served.items(), key=lambda item: -item[1])
        if not tenant or name == tenant
    ]  # fmt: skip
    names = (("Tenant", ""), ("Share of served tokens", ""), ("Share", "num"), ("Tokens", "num"))
    inside = (
        scroller("Served tokens", _grid(names, rows)) if rows else h("p.dim", "No token was served in the window yet.")
    )
    return panel("Served tokens by tenant", inside, anchor="served")
