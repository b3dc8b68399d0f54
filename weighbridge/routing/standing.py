"""Where an instance stands: what every forecast on it needs and no request changes, worked out once per change.

A request that finds others before it in the queue, or one that the gate turns away, is forecast on instances that have
not changed since the last one was. Their sums are kept with the count of changes of ledger and cost that they hold for.
"""

from __future__ import annotations

from collections.abc import Iterable

from weighbridge.routing.cost import Cost
from weighbridge.routing.sums import Group

BOUND_SHARE = 0.8
"""Of an E2E bound, what decoding may take."""
FEWEST_TOKENS = 8.0
LEAST_ROOM = 64


class TierSums:
    """Of one tier's requests there: how many, and as shares of the seconds that their bounds allow them all together:
    as many seconds (`each`), as many as decode, the sum of their first-token times, and as many as there are output
    tokens to come."""

    __slots__ = ("count", "decoding", "each", "first", "remaining")

    def __init__(self, count: int, each: float, decoding: float, first: float, remaining: float) -> None:
        self.count = count
        self.each = each
        self.decoding = decoding
        self.first = first
        self.remaining = remaining


class Standing:
    """Sums of one instance by its own cost."""

    __slots__ = ("busy", "changes", "cost", "decoding", "held", "kv", "left", "room", "step_s", "tiers", "wait_s")

    def __init__(
        self, cost: Cost, changes: int, *, busy: int, decoding: int, decoding_kv_tokens: int, decode_tokens: int,
        kv_tokens: int, shared_tokens: int, groups: Iterable[Group],
    ) -> None:  # fmt: skip
        """The numbers of an `Instance`, by their names there; `busy` is how many requests it has."""
        self.cost = cost
        self.changes = changes
        self.busy = busy
        self.decoding = decoding
        self.step_s = cost.decode_step_s(decoding, decoding_kv_tokens)
        """A decode step now."""
        self.wait_s = 0.5 * self.step_s if busy else 0.0
        """Until the step that runs now ends."""
        self.room = max(cost.budget - decoding, LEAST_ROOM)
        """Prompt tokens that a step takes."""
        self.left = decode_tokens / busy if busy else 0.0
        """Output tokens to come of one running request."""
        self.held = kv_tokens - shared_tokens
        self.kv = kv_tokens + 0.5 * decode_tokens
        """KV tokens half-way to the end of all that runs."""
        self.tiers = _tiers(groups)


def _tiers(groups: Iterable[Group]) -> list[TierSums]:
    tiers = []
    for group in groups:
        count, remaining = group.count, group.remaining
        total = group.generated + remaining
        if not count or total < 2 * count:
            continue
        bound = group.tpot_s
        if bound is None:
            if group.e2e_s is None:
                continue
            bound = BOUND_SHARE * group.e2e_s / max(total / count, FEWEST_TOKENS)
        share = 1.0 / (bound * total)
        decoding = group.decoding * share
        tiers.append(TierSums(count, count * share, decoding, group.first_us * 1e-6 * share, remaining * share))
    return tiers
