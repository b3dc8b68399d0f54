"""The question of `plan stability` as flags put it, its answer, and how it is printed."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.core.errors import ConfigError, ProfileError
from weighbridge.core.instance import Limits, StepTerms
from weighbridge.cost.profile import decode_profile
from weighbridge.plan.stability import Demand, Stability, demand_of, stability
from weighbridge.workload.lengths import parse_lengths
from weighbridge.workload.readers import read_trace
from weighbridge.workload.streams import Streams

DEFAULT_BUDGET = 2048
DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class StabilityAnswer:
    """The result and the demand it was computed from."""

    result: Stability
    demand: Demand
    token_budget: int

    def to_json(self) -> dict[str, Any]:
        """The result's fields at the top level, the demand beside them."""
        return {**asdict(self.result), "demand": asdict(self.demand), "token_budget": self.token_budget}


def answer(
    *,
    rate: float,
    prompt: str = "500",
    output: str = "150",
    trace: Path | None = None,
    profile: Path | None = None,
    step_time: float | None = None,
    budget: int | None = None,
    kv_tokens: int | None = None,
    max_sequences: int | None = None,
    instances: int = 1,
) -> StabilityAnswer:
    """Gather terms, limits and lengths, then check. Lengths given as a form are drawn 20,000 times by seed 0."""
    terms, limits = _engine(profile, step_time)
    budget = budget or limits.token_budget or DEFAULT_BUDGET
    if budget < 1:
        raise ConfigError(f"must be at least 1, not {budget}", source="--budget")
    demand = demand_of(_lengths(prompt, output, trace), budget)
    result = stability(
        rate,
        demand,
        terms,
        token_budget=budget,
        kv_tokens=kv_tokens if kv_tokens is not None else limits.kv_tokens,
        max_sequences=max_sequences if max_sequences is not None else limits.max_sequences,
        instances=instances,
    )
    return StabilityAnswer(result, demand, budget)


def _engine(profile: Path | None, step_time: float | None) -> tuple[StepTerms, Limits]:
    if profile is None:
        if step_time is None:
            raise ConfigError("give --profile FILE, or a constant --step-time in seconds", source="plan stability")
        return StepTerms(base_s=step_time, prefill_s=0.0), Limits()
    try:
        data = profile.read_bytes()
    except OSError as error:
        raise ProfileError(f"cannot read profile {profile}: {error.strerror or error}") from None
    loaded = decode_profile(data, str(profile))
    if step_time is not None:
        return StepTerms(base_s=step_time, prefill_s=0.0), loaded.limits
    if loaded.step is None:
        raise ProfileError(f"{profile}: has no step-time terms; calibrate again, or give --step-time")
    return loaded.step, loaded.limits


def _lengths(prompt: str, output: str, trace: Path | None) -> list[tuple[int, int]]:
    if trace is not None:
        return [(r.prompt_tokens, r.output_tokens) for r in read_trace(trace).requests if not r.failed]
    prompts, outputs = parse_lengths(prompt, "--input"), parse_lengths(output, "--output")
    streams = Streams(0)
    p, o = streams.get("prompt"), streams.get("output")
    return [(prompts.draw(p), outputs.draw(o)) for _ in itertools.repeat(None, DRAWS)]


def print_answer(found: StabilityAnswer, *, as_json: bool) -> None:
    """JSON for programs; a table for people."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found.to_json()), indent=2).decode() + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    result = found.result
    console.print(result.expression, soft_wrap=True)
    word = "stable" if result.stable else "NOT stable: the queue grows without bound"
    console.print(f"{word}; head-room {100 * result.head_room:.1f} %, bound by {result.binding}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("limit", "largest rate, requests/s", "in use"):
        table.add_column(name, justify="left" if name == "limit" else "right")
    for limit in result.limits:
        table.add_row(limit.name, f"{limit.max_rate:.3f}", f"{100 * limit.load:.1f} %")
    console.print(table)
