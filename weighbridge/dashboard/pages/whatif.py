"""`/whatif`: what would another policy, fleet or load have done with recorded traffic?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weighbridge.core.instance import InstanceSpec
from weighbridge.dashboard import svg
from weighbridge.dashboard.html import Child, Html, h, join
from weighbridge.dashboard.jobs import Job
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.view import View, command, panel, scroller
from weighbridge.dashboard.whatif import MOST_POLICIES, Answer, Changed, Question, Row
from weighbridge.dashboard.words import NONE, count, percent, plural, rate, seconds, signed

DEFAULT_POLICIES = ("round_robin", "least_tokens")
KINDS = ("s0", "s1", "s2", "s3")
FIDELITY_GOOD = 0.02
MOST_TIMES = 6.0


def page(
    query: Query, logs: Sequence[Path], chosen: Path | None, specs: Mapping[str, InstanceSpec], policy: str,
    policies: Sequence[str], job: Job | None, refused: str = "",
) -> View:  # fmt: skip
    """The form, and the job that was asked last (or `?job=`)."""
    answer = job.answer if job else None
    parts = {"first": _first(job), "job": _job(job, query)}
    form = _form(logs, chosen, specs, policy, policies, answer.question if answer else None, refused)
    body = join(h("h1.vh", "What-if"), parts["first"], form, parts["job"])
    return View("What-if", body, parts, f"{len(logs)} {chosen} {job.number if job else 0}", live=True)


def _first(job: Job | None) -> Html:
    answer = job.answer if job else None
    if answer is None or len(answer.rows) < 3:
        text: Child = "Choose a recorded log and the policies to compare with."
        if job is not None and job.state == "running":
            text = f"Working: {percent(job.share)}."
        return h("section.first#first", h("p", text))
    best = max(answer.rows[2:], key=lambda r: r.difference or 0.0)
    side = "gains" if (best.difference or 0) > 0 else "loses"
    clear = best.half_width is not None and abs(best.difference or 0) > best.half_width
    return h(
        "section.first#first",
        h("p", h("b", f"{best.policy} {side} {points(abs(best.difference or 0))}"),
          f" ± {points(best.half_width)} attainment against ", h("b", answer.recorded_policy),
          f" and changes P99 TTFT from {seconds(answer.rows[1].ttft_p99_s)} to ",
          h("b", seconds(best.ttft_p99_s)), "." if clear else "; the difference is within the noise."),
    )  # fmt: skip


def points(value: float | None) -> str:
    """A difference of shares: percentage points."""
    return NONE if value is None else f"{100 * value:.1f} points"


def _text(name: str, label: str, value: str, placeholder: str | None = None) -> Html:
    box = h("input", name=name, value=value, inputmode="decimal", placeholder=placeholder, autocomplete="off")
    return h("label", label, box)


def _form(
    logs: Sequence[Path], chosen: Path | None, specs: Mapping[str, InstanceSpec], policy: str, policies: Sequence[str],
    last: Question | None, refused: str,
) -> Html:  # fmt: skip
    if not logs:
        return panel(
            "Question",
            h("p", "No event log is known. The gateway writes one into its data directory; on another machine, start ",
              command("weighbridge dashboard --log events-000001.jsonl")),
        )  # fmt: skip
    options = [h("option", p.name, value=str(k), selected=p == chosen) for k, p in enumerate(logs)]
    picked = last.policies if last else DEFAULT_POLICIES
    boxes = [
        h("label.check", h("input", type="checkbox", name="policy", value=name, checked=name in picked), name)
        for name in policies
        if name != policy
    ]
    counts = [
        h("label", name, h("input", type="number", name=f"n_{name}", min="0", max="64",
                           value=str(last.counts.get(name, 1) if last else 1)))
        for name in specs
    ]  # fmt: skip
    window = [
        _text("start", "From, s", f"{last.start_s:g}" if last else "0"),
        _text("end", "Until, s", f"{last.end_s:g}" if last and last.end_s else "", placeholder="the end"),
        _text("load", "Load ×", f"{last.load:g}" if last else "1"),
        _text("seeds", "Seeds", str(last.seeds if last else 3)),
    ]  # fmt: skip
    switch = h(
        "form.filters",
        h("label", "Recorded log", h("select", *options, name="log")),
        h("button", "Open", type="submit"),
        h("span.dim", f"recorded under {policy}, {plural(len(specs), 'instance')}") if policy else None,
        method="get", action="/whatif", data_auto=True,
    )  # fmt: skip
    index = logs.index(chosen) if chosen in logs else 0
    ask = h(
        "form", h("input", type="hidden", name="log", value=str(index)),
        h("div.fields", *window),
        h("fieldset", h("legend", f"Compare {policy or 'the recorded policy'} with (at most {MOST_POLICIES})"), *boxes),
        h("details", h("summary", "Change the fleet: copies of each instance"), h("div.fields", *counts),
          open=bool(last and last.counts)) if counts else None,
        h("p.invalid", "✕ ", refused, role="alert") if refused else None,
        h("p.links", h("button.go", "Run", type="submit", name="action", value="run"),
          h("span.dim", "in a child process, capped; writes nothing")),
        method="post", action="/whatif",
    )  # fmt: skip
    return panel("Question", switch, ask, anchor="question")


def _job(job: Job | None, query: Query) -> Html:
    if job is None:
        return h("div#job")
    if job.state == "running":
        cancel = h(
            "form", h("p.links", h("button", "Cancel", type="submit", name="action", value="cancel")),
            method="post", action="/whatif",
        )  # fmt: skip
        bar = h("progress", value=f"{job.share:.3f}", max="1", aria_label="progress")
        return panel(
            f"Working: {job.text}",
            bar,
            h("p.dim", f"{percent(job.share)} after {seconds(job.seconds)}"),
            cancel,
            anchor="job",
        )
    if job.state == "cancelled":
        return panel("Cancelled", h("p.dim", f"after {seconds(job.seconds)}"), anchor="job")
    if job.answer is None:
        return panel("No answer", h("p.invalid", "✕ ", job.error, role="alert"), anchor="job")
    return h(
        "div.stacked#job", _table(job, job.answer), _picture(job.answer), h("div.two", *_changes(job.answer))
    )  # fmt: skip


def _table(job: Job, a: Answer) -> Html:
    rows = [_row(r, index) for index, r in enumerate(a.rows)]
    names = (("Policy", ""), ("Attainment", "num"), ("Paired difference, 95 %", "num"),
             ("P50 TTFT", "num wide"), ("P99 TTFT", "num"),
             ("P99 E2E", "num wide"), ("Shed", "num wide"), ("Goodput", "num wide"))  # fmt: skip
    head = h("tr", *(h("th", text, scope="col", class_=c or None) for text, c in names))
    good = abs(a.fidelity) <= FIDELITY_GOOD
    e2e = f", mean E2E {signed(a.fidelity_e2e, 1)}" if a.fidelity_e2e is not None and a.question.load == 1.0 else ""
    fidelity = h(
        "p.verdict", "✓ " if good else "! ", h("b", "Fidelity: "),
        f"the same policy re-simulated differs from the recording by {points(abs(a.fidelity))} attainment{e2e}. ",
        "Trust smaller differences between the rows below it no further than that." if not _edited(a.question)
        else "The question changes fleet or load, so this row shows that change and is no measure of fidelity.",
    )  # fmt: skip
    guessed = f"; {a.guessed_lengths} had no recorded output length and got the median" if a.guessed_lengths else ""
    facts = h(
        "p.dim", f"{plural(a.requests, 'request')} over {seconds(a.span_s)} on {plural(a.instances, 'instance')}, "
        f"load × {a.question.load:g}, {plural(a.question.seeds, 'seed')}{guessed}. Took {seconds(job.seconds)}.",
    )  # fmt: skip
    links = h(
        "p.links", h("a", "Report as JSON", href=f"/whatif.json?job={job.number}", download=f"whatif-{job.number}.json")
    )
    table = h("table.grid", h("caption.vh", "Policies"), h("thead", head), h("tbody", *rows))
    return panel("Answer", scroller("Policies", table), fidelity, facts, links)


def _edited(q: Question) -> bool:
    return q.load != 1.0 or any(n != 1 for n in q.counts.values())


def _row(r: Row, index: int) -> Html:
    difference: Child = NONE
    if r.difference is not None:
        clear = r.half_width is not None and abs(r.difference) > r.half_width
        sign = "▲ " if clear and r.difference > 0 else "▼ " if clear else "≈ "
        difference = join(
            sign,
            f"{100 * r.difference:+.1f}".replace("-", "−"),
            h("small", f"±{100 * r.half_width:.1f}") if r.half_width is not None else None,
        )
    low, high = r.seed_range or (0.0, 0.0)
    seeds = h("small", f"{percent(low, 1)} to {percent(high, 1)} over seeds") if r.seed_range else None
    return h(
        "tr", h("th", r.label, h("small", r.policy) if index < 2 else None, scope="row"),
        h("td.num", percent(r.attainment, 1), h("span.wide", " ", seeds) if seeds else None),
        h("td.num", difference),
        h("td.num.wide", seconds(r.ttft_p50_s)), h("td.num", seconds(r.ttft_p99_s)),
        h("td.num.wide", seconds(r.e2e_p99_s)),
        h("td.num.wide", percent(r.shed, 1)), h("td.num.wide", rate(r.goodput_per_s)),
        class_="sel" if index == 1 else None,
    )  # fmt: skip


def _picture(a: Answer) -> Html:
    shown = [r for r in (a.rows[0], *a.rows[2:]) if r.ttft_quantiles][:4]
    if not shown:
        return panel("TTFT", h("p.dim", "No first token was recorded."))
    # one policy that collapsed must not press the others against the axis
    highest = min(max(r.ttft_quantiles[98] for r in shown), MOST_TIMES * shown[0].ttft_quantiles[98])
    lines = []
    for kind, r in zip(KINDS, shown, strict=False):
        points = [(x, k / 100) for k, x in enumerate(r.ttft_quantiles) if x <= highest]
        lines.append(svg.Line(r.label, [x for x, _ in points], [y for _, y in points], kind))
    y = svg.Axis(0.0, 1.0, "", tuple((k / 4, f"{25 * k} %") for k in range(5)))
    label = "; ".join(
        f"{r.label}: median {seconds(r.ttft_quantiles[50])}, P95 {seconds(r.ttft_quantiles[95])}" for r in shown
    )
    legend = h("span.legend", *(h("span", h(f"i.k{k}"), r.label) for k, r in enumerate(shown)))
    return panel("TTFT distribution", svg.chart(lines, svg.nice_axis(highest, "s"), y, label), legend=legend)


def _changes(a: Answer) -> list[Html]:
    return [
        panel(
            f"Requests that changed most under {name}",
            h("p.dim", f"First difference: {a.first_difference.get(name, NONE)}."),
            scroller(f"Changed under {name}", _changed_table(changed)),
        )
        for name, changed in a.changed.items()
    ]


def _change(c: Changed) -> str:
    if c.before_s and c.after_s:
        return signed(c.after_s / c.before_s - 1)
    return "lost" if c.before_s else "gained"


def _changed_table(changed: Sequence[Changed]) -> Html:
    names = (("Request", ""), ("Tier", "wide"), ("In", "num wide"), ("Out", "num wide"),
             ("From", ""), ("To", ""), ("E2E", "num"), ("Instead", "num"),
             ("Change", "num"))  # fmt: skip
    head = h("tr", *(h("th", text, scope="col", class_=c or None) for text, c in names))
    rows = [
        h("tr", h("th", c.id, scope="row"), h("td.wide", c.tier), h("td.num.wide", count(c.prompt_tokens)),
          h("td.num.wide", count(c.output_tokens)), h("td", c.was_on or NONE), h("td", c.now_on or NONE),
          h("td.num", seconds(c.before_s)), h("td.num", seconds(c.after_s)),
          h("td.num", _change(c)))
        for c in changed
    ]  # fmt: skip
    return h("table.grid", h("thead", head), h("tbody", *rows))
