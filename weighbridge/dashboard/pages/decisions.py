"""`/decisions`: why did this request go there?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weighbridge.dashboard import svg
from weighbridge.dashboard.html import Child, Html, h, join
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import TERMS, CandidateView, DecisionView, Snapshot
from weighbridge.dashboard.view import View, command, panel, scroller
from weighbridge.dashboard.words import NONE, count, percent, plural, seconds, signed

MOST_ROWS = 40
COMPACT_CANDIDATES = 4
SHOWS = {
    "": "all decisions",
    "outside": "outside the error bar",
    "tie": "equal candidates",
    "shed": "shed",
    "failed": "failed or cancelled",
}
TERM_NAMES = {"delay_to_others": "delay to others"}


def page(snapshot: Snapshot, query: Query, policies: Sequence[str] = (), asked: Html | None = None) -> View:
    """The list and one decision in full. With a chosen request the list stays as it is; only its outcome moves."""
    chosen = snapshot.decision(query.get("id")) if "id" in query else None
    listed = _around(_filtered(snapshot, query), chosen)
    shown = chosen or (next(iter(listed), None) if "id" not in query else None)
    rows = {f"d-{d.id}": _row(d, query, d is shown) for d in listed}
    detail = panel(
        f"Why {shown.chosen or 'no instance'} for {shown.id}" if shown else "Decision",
        why(shown) if shown else _gone(query),
        _actions(shown, query, policies) if shown else None,
        h("div#asked", asked) if asked else None,
        anchor="detail",
    )
    first = _first(shown)
    frozen = "id" in query
    parts = {"first": first, "detail": detail} if frozen else {"first": first, "detail": detail, **rows}
    if frozen:
        parts["newer"] = _newer(snapshot, query)
    body = join(
        h("h1.vh", "Decisions"),
        first,
        _filters(snapshot, query),
        parts.get("newer"),
        h("div.two.list", _table(listed, rows, snapshot), detail),
    )
    shape = query.get("id") if frozen else "|".join(rows)
    return View("Decisions", body, parts, shape, live=True)


def _filtered(snapshot: Snapshot, query: Query) -> list[DecisionView]:
    tier, tenant, instance, show = (query.get(k) for k in ("tier", "tenant", "instance", "show"))
    tests: dict[str, Callable[[DecisionView], bool]] = {
        "outside": lambda d: d.outside,
        "tie": lambda d: d.ties > 1,
        "shed": lambda d: d.outcome == "rejected",
        "failed": lambda d: d.outcome in ("failed", "cancelled"),
    }
    test = tests.get(show)
    return [
        d
        for d in snapshot.decisions
        if (not tier or d.tier == tier)
        and (not tenant or d.tenant == tenant)
        and (not instance or d.chosen == instance)
        and (test is None or test(d))
    ]


def _around(found: list[DecisionView], chosen: DecisionView | None) -> list[DecisionView]:
    """A page of the list that holds the chosen decision, a few newer ones above it."""
    start = 0
    if chosen is not None and chosen in found[MOST_ROWS:]:
        start = found.index(chosen) - 5
    return found[start : start + MOST_ROWS]


def _select(name: str, label: str, options: Sequence[tuple[str, str]], chosen: str) -> Html:
    inside = [h("option", text, value=value, selected=value == chosen) for value, text in options]
    return h("label", label, h("select", *inside, name=name))


def _filters(s: Snapshot, query: Query) -> Html:
    def names(values: Sequence[str], every: str) -> list[tuple[str, str]]:
        return [("", every), *((v, v) for v in sorted({*values} - {""}))]

    tiers = names([*(t.name for t in s.tiers), *(d.tier for d in s.decisions)], "all tiers")
    tenants = names([d.tenant for d in s.decisions], "all tenants")
    instances = names([i.name for i in s.instances], "all instances")
    number = "id" in query
    return h(
        "form.filters",
        _select("tier", "Tier", tiers, query.get("tier")),
        _select("tenant", "Tenant", tenants, query.get("tenant")),
        _select("instance", "Instance", instances, query.get("instance")),
        _select("show", "Show", list(SHOWS.items()), query.get("show")),
        h("label", "Request", h("input", name="id", value=query.get("id") if number else None, size="10",
                                placeholder="id", autocomplete="off", spellcheck="false")),
        h("button", "Apply", type="submit"),
        h("a", "Clear", href="/decisions"),
        method="get", action="/decisions", data_auto=True,
    )  # fmt: skip


def _newer(s: Snapshot, query: Query) -> Html:
    index = next((k for k, d in enumerate(s.decisions) if d.id == query.get("id")), None)
    text = f"{plural(index, 'newer decision')}." if index is not None else "Older than the decisions kept here."
    return h(
        "p.dim#newer",
        "The list stays while a decision is open. ",
        text,
        " ",
        h("a", "Show the newest", href=query.url("/decisions", id=None)),
    )


def _gone(query: Query) -> Html:
    if "id" not in query:
        return h("p.dim", "No decision fits these filters.")
    return h(
        "p.dim",
        f"Request {query.get('id')} is not among the decisions kept here (the gateway keeps the last few hundred). ",
        "Older ones are in the event log: ",
        command("weighbridge replay LOG --check"),
    )


def _outcome(d: DecisionView) -> Child:
    if d.outcome == "ok":
        return seconds(d.observed_s)
    return d.outcome


def _row(d: DecisionView, query: Query, chosen: bool) -> Html:
    usable = sum(not c.excluded for c in d.candidates)
    where = join(
        d.chosen or NONE,
        h("small.more", f"of {usable}" + (f", {d.ties} equal" if d.ties > 1 else "")) if usable else None,
    )
    return h(
        "tr",
        h("th", h("a", d.id, href=query.url("/decisions", id=d.id)), scope="row"),
        h("td", h("span.tier", d.tier, class_=d.tier if d.tier in ("interactive", "standard", "batch") else None)),
        h("td.num.wide", count(d.prompt_tokens)),
        h("td.num.wide", count(d.expected_output_tokens)),
        h("td", where),
        h("td.num.wide", seconds(d.judged_s)),
        h("td.num", _outcome(d), class_="hot" if d.outcome in ("failed", "rejected") else None),
        h("td.num", signed(d.deviation), " ▲" if d.outside else None, class_="hot" if d.outside else None),
        id=f"d-{d.id}", class_="sel" if chosen else None,
    )  # fmt: skip


def _table(listed: Sequence[DecisionView], rows: dict[str, Html], s: Snapshot) -> Html:
    names = (("Request", ""), ("Tier", ""), ("In", "num wide"), ("Out", "num wide"), ("Chosen", ""),
             ("Forecast", "num wide"), ("Observed", "num"), ("Error", "num"))  # fmt: skip
    head = h("tr", *(h("th", text, scope="col", class_=c or None) for text, c in names))
    skipped = (
        f" {plural(s.skipped_decisions, 'decision')} came too fast to show and were skipped."
        if s.skipped_decisions
        else ""
    )
    return h(
        "div.listbox",
        scroller(
            "Decisions, newest first",
            h(
                "table.grid",
                h("caption.vh", "Decisions, newest first"),
                h("thead", head),
                h("tbody#rows", *rows.values()),
            ),
        ),
        h("p.dim", f"{plural(len(listed), 'decision')} shown, newest first.{skipped}"),
    )


def _first(d: DecisionView | None) -> Html:
    """The page's first number: chosen, its total, and how far the runner-up was."""
    if d is None:
        return h("section.first#first", h("p", "No decision to show."))
    if d.outcome == "rejected":
        return h("section.first#first", h("p", h("b", f"{d.id}: turned away"), f" {d.reason}."))
    best, runner = _leaders(d)
    if best is None or best.total_s is None:
        return h(
            "section.first#first", h("p", h("b", d.chosen), f" was chosen for {d.id} by {d.policy or 'the policy'}.")
        )
    text: list[Child] = [h("b", d.chosen), " adds ", h("b", seconds(best.total_s))]
    if best.error_s:
        text.append(f" ± {seconds(best.error_s)}")
    if runner is not None and runner.total_s is not None:
        gap = runner.total_s - best.total_s
        bar = max(best.error_s or 0.0, runner.error_s or 0.0)
        side = "within" if abs(gap) <= bar else "outside"
        text.append(f"; next is {runner.instance} at {seconds(runner.total_s)}, ")
        text.append(f"{seconds(abs(gap))} {'more' if gap >= 0 else 'less'}, {side} the error bar.")
    return h("section.first#first", h("p", *text))


def _leaders(d: DecisionView) -> tuple[CandidateView | None, CandidateView | None]:
    chosen = next((c for c in d.candidates if c.instance == d.chosen), None)
    others = [c for c in d.candidates if c is not chosen and not c.excluded and c.total_s is not None]
    return chosen, min(others, key=lambda c: c.total_s or 0.0, default=None)


def why(d: DecisionView, compact: bool = False) -> Html:
    """One decision in words and as stacked terms; `compact` keeps the best few candidates."""
    sentence = _sentence(d, compact)
    if d.outcome == "rejected" or not d.candidates:
        return join(sentence, _facts(d))
    usable = [c for c in d.candidates if not c.excluded]
    excluded = [c for c in d.candidates if c.excluded]
    usable.sort(key=lambda c: (c.total_s is None, c.total_s or 0.0))
    shown, left = usable, 0
    if compact:
        shown = usable[:COMPACT_CANDIDATES]
        if all(c.instance != d.chosen for c in shown):
            shown = [*shown[:-1], *(c for c in usable if c.instance == d.chosen)]
        left, excluded = len(usable) - len(shown), []
    highest = max([*((c.total_s or 0.0) + (c.error_s or 0.0) for c in shown), d.observed_s or 0.0, 1e-9])
    scale = svg.StackScale(highest * 1.06)
    names = _term_names(shown)
    rows = [_candidate(d, c, scale, names) for c in (*shown, *excluded)]
    head = h(
        "tr", h("th", "Candidate", scope="col"), h("th", "Additional completion time", scope="col"),
        h("th.num", "Total", scope="col"), h("th.num.wide", "P(SLO)", scope="col"),
    )  # fmt: skip
    legend = h(
        "p.legend",
        *(h("span", h(f"i.{svg.term_class(t, k)}"), TERM_NAMES.get(t, t)) for k, t in enumerate(names)),
        h("span", h("i.k-err"), "± forecast error") if any(c.error_s for c in shown) else None,
        h("span", h("i.k-obs"), "observed, on its own time") if d.observed_s is not None else None,
    )
    more = (
        h(
            "p.dim",
            f"and {plural(left, 'more candidate')}: ",
            h("a", "all of them", href=Query().url("/decisions", id=d.id)),
        )
        if left
        else None
    )
    return join(
        sentence, None if compact else _facts(d), legend,
        h("table.cands", h("caption.vh", f"Candidates for {d.id}"), h("thead", head), h("tbody", *rows)), more,
        None if compact else _verdict(d),
    )  # fmt: skip


def _term_names(candidates: Sequence[CandidateView]) -> list[str]:
    used = {name for c in candidates for name, value in c.terms if value > 0}
    return [t for t in TERMS if t in used] + sorted(used.difference(TERMS))


def _sentence(d: DecisionView, compact: bool) -> Html:
    lead: Child = join(h("a", d.id, href=Query().url("/decisions", id=d.id)), ": ") if compact else None
    if d.outcome == "rejected":
        return h("p.why", lead, "turned away: ", h("b", d.reason), ".")
    best, _ = _leaders(d)
    text: list[Child] = [lead, h("b", d.chosen)]
    if best is not None and best.total_s is not None:
        text.append(f" adds {seconds(best.total_s)} in all")
        if best.terms:
            term, value = max(best.terms, key=lambda item: item[1])
            text.append(f", mostly {TERM_NAMES.get(term, term)} ({seconds(value)})")
        text.append(".")
    elif best is not None and best.score is not None:
        text.append(f" had the lowest score ({best.score:.4g}) under {d.policy}.")
    else:
        text.append(f" was chosen by {d.policy or 'the policy'}, which gives no scores.")
    if d.note:
        text.append(f" {d.note[:1].upper()}{d.note[1:]}.")
    return h("p.why", *text)


def _facts(d: DecisionView) -> Html:
    length = f"{count(d.expected_output_tokens)} tokens expected" + (
        f" ({d.length_estimate})" if d.length_estimate else ""
    )
    pairs: list[tuple[str, Child]] = [
        ("Request", f"{d.tier or 'no tier'}, tenant {d.tenant or 'none'}, model {d.model or 'any'}"),
        ("Prompt", f"{count(d.prompt_tokens)} tokens"),
        ("Output", length),
        ("Policy", d.policy or NONE),
        ("Attempt", str(d.attempt)),
        ("Held in the router", seconds(d.queued_s)),
    ]
    return h("dl.facts", *(h("div", h("dt", k), h("dd", v)) for k, v in pairs))


def _candidate(d: DecisionView, c: CandidateView, scale: svg.StackScale, names: Sequence[str]) -> Html:
    chosen = c.instance == d.chosen
    marker = h("span", "▸ ", h("span.vh", "chosen: ")) if chosen else None
    cached = h("small", f"{count(c.cached_tokens)} cached") if c.cached_tokens else None
    name = h("th", marker, c.instance, cached, scope="row")
    if c.excluded:
        return h("tr.cand.ex", name, h("td", f"excluded: {c.excluded}"), h("td.num", NONE), h("td.num.wide", NONE))
    values = dict(c.terms)
    terms = [(t, values.get(t, 0.0)) for t in names]
    spoken = ", ".join(f"{TERM_NAMES.get(t, t)} {seconds(v)}" for t, v in terms if v > 0)
    observed = d.observed_s if chosen else None
    seen = f"; observed {seconds(observed)}" if observed is not None else ""
    total: list[Child]
    if c.total_s is not None:
        picture = svg.stack(terms, scale, f"{c.instance}: {spoken}{seen}", error_s=c.error_s, observed_s=observed)
        total = [
            "≈ " if c.tie else None,
            seconds(c.total_s),
            h("small", f"±{seconds(c.error_s)}") if c.error_s else None,
        ]
    else:
        picture = h("span.dim", f"{count(c.prefill_tokens)} prefill and {count(c.decode_tokens)} decode tokens")
        total = [f"score {c.score:.4g}" if c.score is not None else NONE]
    return h(
        "tr.cand", name, h("td.stackcell", picture), h("td.num", *total), h("td.num.wide", percent(c.p_slo)),
        class_="chosen" if chosen else None,
    )  # fmt: skip


def _verdict(d: DecisionView) -> Html:
    if d.outcome == "ok" and d.observed_s is not None and d.forecast_s is not None:
        bar = f", {'outside' if d.outside else 'inside'} the error bar" if d.error_s is not None else ""
        text = f"Observed {seconds(d.observed_s)} from dispatch against {seconds(d.forecast_s)} forecast"
        if d.forecast_at_length_s is not None:
            text += (
                f" for {count(d.expected_output_tokens)} output tokens; it made {count(d.output_tokens)}, for which "
            )
            text += f"the forecast is {seconds(d.forecast_at_length_s)}"
        text += f": {signed(d.deviation)}{bar}. First token after {seconds(d.ttft_s)}"
        text += f" (forecast {seconds(d.forecast_ttft_s)})." if d.forecast_ttft_s is not None else "."
        sign = "▲ " if d.outside else "✓ "
        return h("p.verdict", sign, text, " Delay to others cannot be observed; the diamond is the request's own time.")
    if d.outcome == "ok":
        return h("p.verdict", f"Finished in {seconds(d.observed_s)}, first token after {seconds(d.ttft_s)}.")
    if d.outcome == "running":
        return h("p.verdict", "Running; the observed time appears here when it ends.")
    return h("p.verdict", f"{d.outcome.capitalize()}: {d.reason or 'no reason given'}.")


def _actions(d: DecisionView, query: Query, policies: Sequence[str]) -> Html:
    json_url = Query().url("/decisions.json", id=d.id)
    ask: Html | None = None
    if policies and d.outcome != "rejected":
        chosen = query.get("ask")
        options = [("", "choose a policy"), *((p, p) for p in policies)]
        ask = h(
            "form.ask", h("input", type="hidden", name="id", value=d.id),
            _select("ask", "What would another policy have chosen?", options, chosen),
            h("button", "Ask", type="submit"),
            method="get", action="/decisions",
        )  # fmt: skip
    return h(
        "div.links",
        h("button.copy", "Copy as JSON", type="button", hidden=True, data_fetch=json_url),
        h("a", "JSON", href=json_url),
        h("a", "Replay a log with another policy", href="/whatif"),
        ask,
    )
