"""Which instances have room for one more held request: no request shall wait in an engine's own queue."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from weighbridge.routing.cost import DEFAULT_BUDGET
from weighbridge.routing.fleet import Instance

GROWTH_TOKENS = 64
"""KV margin per request for the output that grows before the ledger next hears of it."""
MOST_FORECAST = 32
"""Up to this many instances are all forecast; of more, a shortlist."""
SHORTLIST = 16
WARM_OWED = 2.0
"""An instance that holds more than half of the prompt may owe this many budgets, and all its KV may be filled: the
request adds little there and much elsewhere. The policy weighs the wait against the prefill it saves."""
NOTHING: dict[int, int] = {}


class _Limits:
    """Of one instance: prompt tokens it may owe, sequences it may run, KV tokens it may hold."""

    __slots__ = ("budget", "capacity", "instance", "most")

    def __init__(self, instance: Instance, budget: float, most: float, capacity: float) -> None:
        self.instance = instance
        self.budget = budget
        self.most = most
        self.capacity = capacity


class Room:
    """Limits of the instances of a pool, worked out once per change of the fleet."""

    __slots__ = ("_instances", "_rows", "_share", "_warm_kv")

    def __init__(self, instances: Iterable[Instance], share: float) -> None:
        """`share` of its KV may be filled on each instance."""
        self._instances = list(instances)
        self._share = share
        self._warm_kv = max(1.0 / share, 1.0)
        self._rows: list[_Limits] = []
        self.refresh()

    def refresh(self) -> None:
        """Work the limits out from the speeds known now."""
        instances = self._instances
        speeds = [i.cost.prefill_s for i in instances if i.cost is not None and i.cost.prefill_s > 0]
        fastest = min(speeds) if len(speeds) == len(instances) and speeds else 0.0
        infinity = float("inf")
        self._rows = []
        for instance in instances:
            limits = instance.spec.limits
            budget = float(limits.token_budget or DEFAULT_BUDGET)
            if fastest and instance.cost is not None:
                budget *= fastest / instance.cost.prefill_s
            most = infinity if limits.max_sequences is None else float(limits.max_sequences)
            capacity = infinity if limits.kv_tokens is None else self._share * limits.kv_tokens
            self._rows.append(_Limits(instance, budget, most, capacity))

    def fitting(self, prompt_tokens: int, part: float = 1.0, cached: dict[int, int] = NOTHING) -> list[Instance]:
        """Instances that owe less prompt than one step's budget, scaled by speed so that a slow one gets a shorter
        queue, and whose KV share holds this prompt and a margin. An instance that runs nothing takes anything.
        `part` of the limits applies; `cached` tokens of the prompt, by instance index, need no KV of their own."""
        need = prompt_tokens + GROWTH_TOKENS
        found = []
        for row in self._rows:
            instance = row.instance
            owed, saved = instance.prefill_tokens, 0
            owed_most, kv_most = row.budget * part, row.capacity * part
            if cached:
                saved = cached.get(instance.index, 0)
                if 2 * saved > prompt_tokens:
                    owed_most *= WARM_OWED
                    kv_most *= self._warm_kv
            if owed and owed >= owed_most:
                continue
            running = len(instance.charges)
            if running and (
                running >= row.most * part or instance.kv_tokens - instance.shared_kv.tokens + need - saved > kv_most
            ):
                continue
            found.append(instance)
        return found


def shortlist(instances: list[Instance], cached_tokens: dict[int, int]) -> list[Instance]:
    """The instances worth a full forecast: those with the least queue and step time, less what the request saves by
    its cached tokens there (by instance index); in fleet order."""
    if len(instances) <= MOST_FORECAST:
        return instances
    keyed = []
    for instance in instances:
        cost = instance.cost
        if cost is None:
            return instances
        seconds = (
            cost.prefill_s * (instance.prefill_tokens - cached_tokens.get(instance.index, 0))
            + cost.base_s
            + cost.sequence_s * instance.decoding
            + cost.kv_s * instance.decoding_kv_tokens
        )
        keyed.append((seconds, instance.index, instance))
    best = nsmallest(SHORTLIST, keyed)
    best.sort(key=lambda entry: entry[1])
    return [instance for _, _, instance in best]
