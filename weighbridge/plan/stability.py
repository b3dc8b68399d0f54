"""Whether a load can be sustained, which limit binds first, and the head-room left.

For one instance at `rate` requests per second with mean prompt s and output o, token budget B per step, KV capacity M
tokens, at most N sequences, and step time t = base + W * (work per step):

    tokens    rate * (E[s] + E[o]) < B / t               (throughput optimal, arXiv:2504.07347)
    KV        rate * E[KV token-steps] * t < M           (the same for memory, arXiv:2605.04595)
    sequences rate * E[steps] * t < N                    (Little's law on the running batch)
    compute   rate * W < 1                               (W: marginal seconds of work per request)

At rate r the step time is the fixed point t = base + r * W * t, that is t = base / (1 - r * W); each limit then has a
closed form. With a constant step time W is 0, and the first line is the classical rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge.core.errors import ConfigError
from weighbridge.core.instance import StepTerms
from weighbridge.cost.step import attended_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """Mean demand of one request: tokens, decode steps, steps of any kind, KV token-steps, and the work terms."""

    requests: int
    prompt_tokens: float
    output_tokens: float
    decode_steps: float
    steps: float
    kv_token_steps: float
    kv_read_tokens: float
    attended_tokens: float


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest sustainable rate (requests per second, whole fleet) under one limit, and the share of it in use."""

    name: str
    max_rate: float
    load: float


@dataclass(frozen=True, slots=True)
class Stability:
    """`stable` when every limit holds; `binding` gives way first; `head_room` is 1 - rate / max_rate."""

    stable: bool
    rate: float
    max_rate: float
    binding: str
    head_room: float
    step_s: float
    limits: tuple[Limit, ...]
    expression: str


def demand_of(lengths: Iterable[tuple[int, int]], token_budget: int) -> Demand:
    """Mean demand over (prompt tokens, output tokens) pairs on an engine with this token budget per step.

    A prompt takes ceil(s / B) steps, and its KV counts as held in full from the first of them. The prompt's last step
    also gives the first output token, so o - 1 decode steps follow; the j-th reads s + j tokens.
    """
    count = 0
    prompt = output = decode = steps = held = read = attended = 0
    for s, o in lengths:
        chunks = -(-s // token_budget)
        further = max(0, o - 1)
        reads = further * s + further * (further + 1) // 2
        count += 1
        prompt += s
        output += o
        decode += further
        steps += chunks + further
        held += chunks * s + reads
        read += reads
        attended += attended_tokens(0, s)
    if not count:
        raise ConfigError("no request to size for")
    return Demand(
        count,
        prompt / count,
        output / count,
        decode / count,
        steps / count,
        held / count,
        read / count,
        attended / count,
    )


def work_seconds(terms: StepTerms, demand: Demand) -> float:
    """W: seconds that one mean request adds to the steps it takes part in, beyond their base time."""
    return (
        terms.prefill_s * demand.prompt_tokens
        + terms.attend_s * demand.attended_tokens
        + terms.sequence_s * demand.decode_steps
        + terms.kv_s * demand.kv_read_tokens
    )


def stability(
    rate: float,
    demand: Demand,
    terms: StepTerms,
    *,
    token_budget: int,
    kv_tokens: int | None = None,
    max_sequences: int | None = None,
    instances: int = 1,
) -> Stability:
    """Check `rate` requests per second on `instances` equal instances that share it evenly.

    Raises `ConfigError` where the numbers cannot describe an engine. The scan term is left out.
    """
    _check(rate, token_budget, kv_tokens, max_sequences, instances, terms)
    work = work_seconds(terms, demand)
    bounds: list[tuple[str, float, float]] = [("tokens", demand.prompt_tokens + demand.output_tokens, token_budget)]
    if kv_tokens is not None:
        bounds.append(("kv", demand.kv_token_steps, kv_tokens))
    if max_sequences is not None:
        bounds.append(("sequences", demand.steps, max_sequences))
    limits = []
    for name, need, capacity in bounds:
        # rate * need * base / (1 - rate * work) = capacity, solved for rate
        most = instances * capacity / (need * terms.base_s + capacity * work)
        limits.append(Limit(name, most, rate / most))
    if work > 0:
        limits.append(Limit("compute", instances / work, rate * work / instances))
    binding = min(limits, key=lambda limit: limit.max_rate)
    busy = rate * work / instances
    step = terms.base_s / (1.0 - busy) if busy < 1.0 else math.inf
    return Stability(
        stable=rate < binding.max_rate,
        rate=rate,
        max_rate=binding.max_rate,
        binding=binding.name,
        head_room=1.0 - rate / binding.max_rate,
        step_s=step,
        limits=tuple(limits),
        expression=_expression(rate / instances, demand, token_budget, step),
    )


def _expression(rate: float, demand: Demand, budget: int, step: float) -> str:
    tokens = demand.prompt_tokens + demand.output_tokens
    left = f"{rate:.4g} x ({demand.prompt_tokens:.6g} + {demand.output_tokens:.6g}) = {rate * tokens:.6g} tokens/s"
    if not math.isfinite(step):
        return f"{left}; the work alone exceeds one second per second"
    right = budget / step if step > 0 else math.inf
    return f"{left} {'<' if rate * tokens < right else '>='} {budget} / {step:.4g} s = {right:.6g} tokens/s"


def _check(rate: float, budget: int, kv: int | None, sequences: int | None, instances: int, terms: StepTerms) -> None:
    for name, value in (
        ("--rate", rate), ("--budget", budget), ("--kv-tokens", kv), ("--max-sequences", sequences),
        ("--instances", instances), ("--step-time", terms.base_s),
    ):  # fmt: skip
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"must be a finite number above 0, not {value}", source=name)
