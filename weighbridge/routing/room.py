"""Whether an instance has room for one more held request: no request shall wait in an engine's own queue."""

from __future__ import annotations

from weighbridge.routing.candidates import Pool
from weighbridge.routing.fleet import Instance

DEFAULT_BUDGET = 2_048
GROWTH_TOKENS = 64
"""KV margin per request for the output that grows before the ledger next hears of it."""


def has_prefill_room(instance: Instance, pool: Pool) -> bool:
    """Outstanding prompt tokens below one step's budget, scaled by speed: a slow instance gets a shorter queue."""
    limits = instance.spec.limits
    if limits.max_sequences is not None and len(instance.charges) >= limits.max_sequences:
        return False
    owed = instance.prefill_tokens
    if owed == 0:
        return True
    budget = float(limits.token_budget or DEFAULT_BUDGET)
    step = instance.spec.step
    if step is not None and step.prefill_s > pool.seconds_per_token > 0:
        budget *= pool.seconds_per_token / step.prefill_s
    return owed < budget


def kv_fits(instance: Instance, prompt_tokens: int, share: float) -> bool:
    """The prompt and a margin fit below `share` of the KV capacity; an empty instance takes anything."""
    capacity = instance.spec.limits.kv_tokens
    if capacity is None or not instance.charges:
        return True
    return instance.kv_tokens + prompt_tokens + GROWTH_TOKENS <= share * capacity
