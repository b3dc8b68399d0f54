"""The stability calculator on `/capacity`: which load can be sustained, and which limit gives way first?"""

from __future__ import annotations

import math

from weighbridge.core.errors import WeighbridgeError
from weighbridge.core.instance import StepTerms
from weighbridge.dashboard import svg
from weighbridge.dashboard.html import Html, h, join
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import InstanceView
from weighbridge.dashboard.view import command, panel
from weighbridge.dashboard.words import count, percent, plural, rate, signed
from weighbridge.plan.stability import Stability, demand_of, stability

FIELDS = (
    ("rate", "λ, requests/s", 12.0),
    ("prompt", "mₚ, prompt tokens", 900.0),
    ("output", "m_d, output tokens", 180.0),
    ("budget", "B, tokens per step", 2048.0),
    ("step_ms", "t, ms per step", 21.0),
    ("kv_tokens", "KV capacity, tokens", 0.0),
    ("batch", "Largest batch", 0.0),
    ("instances", "Equal instances", 1.0),
)
_FLAGS = {"--rate": "λ", "--budget": "B", "--kv-tokens": "KV capacity", "--max-sequences": "Largest batch",
          "--instances": "Equal instances", "--step-time": "t"}  # fmt: skip


def defaults(live: InstanceView | None) -> dict[str, float]:
    """Field values, taken from a live instance where it tells them."""
    values = {name: value for name, _, value in FIELDS}
    if live is not None:
        limits = live.limits
        known = {
            "rate": live.rate_per_s,
            "prompt": live.prompt_tokens,
            "output": live.output_tokens,
            "budget": limits.token_budget,
            "kv_tokens": limits.kv_tokens,
            "batch": limits.max_sequences,
            "step_ms": 1000 * live.step.base_s if live.step else None,
        }
        values |= {name: float(f"{value:.6g}") for name, value in known.items() if value}
    return values


def page_part(query: Query, live: InstanceView | None) -> Html:
    """Form and answer."""
    values = defaults(live)
    error = ""
    result: Stability | None = None
    try:
        for name, label, _ in FIELDS:
            values[name] = _number(query, name, label, values[name])
        step = live.step if live is not None and live.step is not None and "step_ms" not in query else None
        result = _compute(values, step)
    except ValueError as problem:
        error = str(problem)
    except WeighbridgeError as problem:
        error = str(problem)
        for flag, label in _FLAGS.items():
            error = error.replace(f"{flag}:", f"{label}:")
    inputs = [
        h("label", label, h("input", name=name, value=f"{values[name]:g}", inputmode="decimal", autocomplete="off"))
        for name, label, _ in FIELDS
    ]
    keep = [h("input", type="hidden", name="from", value=live.name)] if live else []
    note = None
    if live is not None and live.step is not None and "step_ms" not in query:
        note = h("p.dim", f"Step time from the profile of {live.name}: it grows with the load; t is its base.")
    form = h(
        "form", *keep, h("div.fields", *inputs), h("p.links", h("button.go", "Compute", type="submit")),
        method="get", action="/capacity#stability",
    )  # fmt: skip
    title = f"Stability: {live.name}, prefilled" if live else "Stability"
    answer = _answer(result, values) if result else h("p.invalid", "✕ ", error, role="alert")
    return panel(title, form, note, answer, anchor="stability")


def _number(query: Query, name: str, label: str, default: float) -> float:
    text = query.get(name).replace(",", "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or value > 1e12:
        raise ValueError(f"{label}: '{text[:20]}' is not a number this page can use.")
    return value


def _compute(v: dict[str, float], step: StepTerms | None) -> Stability:
    budget = int(v["budget"])
    if budget < 1 or v["prompt"] < 1 or v["output"] < 1:
        raise ValueError("B, prompt and output tokens must be at least 1.")
    terms = step or StepTerms(base_s=v["step_ms"] / 1000, prefill_s=0.0)
    return stability(
        v["rate"], demand_of([(round(v["prompt"]), round(v["output"]))], budget), terms, token_budget=budget,
        kv_tokens=int(v["kv_tokens"]) or None, max_sequences=int(v["batch"]) or None, instances=int(v["instances"]),
    )  # fmt: skip


def _answer(r: Stability, v: dict[str, float]) -> Html:
    rows = []
    for limit in r.limits:
        judged = "bad" if limit.load >= 1 else "watch" if limit.load > 0.85 else "good"
        sign = "✕" if judged == "bad" else "!" if judged == "watch" else "✓"
        rows.append(
            h("tr", h("th", limit.name, h("small", "binds first") if limit.name == r.binding else None, scope="row"),
              h("td.bars.grow", svg.bar(limit.load, f"{limit.name} {percent(limit.load)} in use", None, judged)),
              h("td.num", h("b", sign, " "), percent(limit.load, 1)), h("td.num", rate(limit.max_rate)))
        )  # fmt: skip
    names = (("Limit", ""), ("In use", ""), ("ρ", "num"), ("Largest λ", "num"))
    head = h("tr", *(h("th", text, scope="col", class_=c or None) for text, c in names))
    lost = h("b.invalid", "✕ not sustainable: the queue grows for ever")
    word = h("b.valid", "✓ sustainable") if r.stable else lost
    instances = int(v["instances"])
    flags = f"--rate {v['rate']:g} --input {v['prompt']:g} --output {v['output']:g} --budget {v['budget']:g}"
    if v["kv_tokens"]:
        flags += f" --kv-tokens {v['kv_tokens']:g}"
    return join(
        h("div.big", h("div", word, h("span", f"head-room {signed(r.head_room)}, {r.binding} binds first")),
          h("div", h("b", rate(r.max_rate)), h("span", f"largest λ on {plural(instances, 'instance')}")),
          h("div", h("b", f"{1000 * r.step_s:.1f} ms"), h("span", "per step at this load"))),
        h("p.expr", r.expression),
        h("table.grid", h("thead", head), h("tbody", *rows)),
        h("p.dim", f"Demand {count(v['rate'] * (v['prompt'] + v['output']))} tokens/s. ",
          "KV counts token-steps: how long each request's cache is held."),
        h("p.links", command(f"weighbridge plan stability {flags} --step-time {r.step_s:.4g}")),
    )  # fmt: skip
