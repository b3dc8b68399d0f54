"""Which models cannot serve a request at all, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from weighbridge.selection.decision import Constraints, LiveCost
from weighbridge.selection.forecast import Forecast
from weighbridge.selection.pool import Candidate, Pool
from weighbridge.selection.text import RoutingText

NO_INSTANCE = "no healthy instance"


def exclusions(
    pool: Pool,
    forecast: Forecast,
    text: RoutingText,
    constraints: Constraints,
    live: Mapping[str, LiveCost] | None,
    by_rule: frozenset[str],
) -> list[str | None]:
    """One entry per model of the pool, in its order: None, or why it is out."""
    needed = _needed(text, constraints)
    return [
        _rule_or_client(model, constraints, by_rule)
        or _ability(model, needed, constraints.region)
        or _room(model, forecast, index, constraints)
        or _moment(model, forecast, index, constraints, live)
        for index, model in enumerate(pool.models)
    ]


def _needed(text: RoutingText, constraints: Constraints) -> list[str]:
    needed = sorted(text.modalities - {"text"})
    if text.has_tools:
        needed.append("tools")
    if constraints.json_schema:
        needed.append("json_schema")
    return needed


def _rule_or_client(model: Candidate, constraints: Constraints, by_rule: frozenset[str]) -> str | None:
    if model.name in by_rule:
        return "excluded by a rule"
    return "excluded by the request" if model.name in constraints.exclude else None


def _ability(model: Candidate, needed: list[str], region: str) -> str | None:
    for ability in needed:
        if ability not in model.capabilities:
            return f"does not do {ability}"
    if region and region not in model.regions:
        return f"is not in region {region}"
    return None


def _room(model: Candidate, forecast: Forecast, index: int, constraints: Constraints) -> str | None:
    wanted = constraints.max_output_tokens
    if model.max_output_tokens is not None and wanted is not None and wanted > model.max_output_tokens:
        return f"writes at most {model.max_output_tokens} tokens, {wanted} were asked for"
    if model.context_tokens is not None:
        output = wanted if wanted is not None else forecast.output_tokens[index]
        total = int(forecast.input_tokens[index] + output)
        if total > model.context_tokens:
            return f"context of {model.context_tokens} tokens is short of about {total}"
    return None


def _moment(
    model: Candidate, forecast: Forecast, index: int, constraints: Constraints, live: Mapping[str, LiveCost] | None
) -> str | None:
    budget = constraints.max_cost_usd
    if budget is not None and forecast.cost_usd[index] > budget:
        return f"would cost about ${forecast.cost_usd[index]:.6f}, over ${budget:g}"
    if live is None:
        return None
    here = live.get(model.name)
    if here is None or here.healthy <= 0:
        return NO_INSTANCE
    latency = here.latency_s(float(forecast.output_tokens[index]))
    if constraints.max_latency_s is not None and latency is not None and latency > constraints.max_latency_s:
        return f"would take about {latency:.1f} s, over {constraints.max_latency_s:g} s"
    return None
