"""Fairness between tenants by tokens served: virtual counters with lift (VTC, OSDI 2024).

A tenant's counter grows by w_p per prompt token when a request is sent and w_q per output token expected, corrected
to what was really generated when it ends, over the tenant's weight. A tenant that returns after being idle is lifted
to the least counter of the active ones, so that idleness earns no credit.
"""

from __future__ import annotations

from collections.abc import Iterable

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class Fairness:
    """Counters of served tokens by tenant; forgets tenants that are idle and behind."""

    __slots__ = ("_active", "_counters", "_floor")

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._floor = 0.0
        """The least counter of the active tenants when there last were any."""

    def __len__(self) -> int:
        return len(self._counters)

    def arrived(self, tenant: str) -> None:
        """A request of the tenant came in."""
        count = self._active.get(tenant, 0)
        self._active[tenant] = count + 1
        if not count:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self.least())

    def ended(self, tenant: str) -> None:
        """A request of the tenant is gone."""
        left = self._active[tenant] - 1
        if left:
            self._active[tenant] = left
            return
        self._floor = self.least()
        del self._active[tenant]
        if self._counters[tenant] <= self._floor:
            del self._counters[tenant]
        if len(self._counters) > 2 * len(self._active) + 1_024:
            floor = self._floor
            self._counters = {t: c for t, c in self._counters.items() if t in self._active or c > floor}

    def served(self, tenant: str, prompt_tokens: int, output_tokens: int, weight: float) -> None:
        """Tokens were given to the tenant, or taken back where negative."""
        if tenant in self._counters:
            self._counters[tenant] += (PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens) / weight

    def counter(self, tenant: str) -> float:
        """Weighted tokens served to the tenant since the least served one was even with it."""
        return self._counters.get(tenant, 0.0)

    def least(self) -> float:
        """The least counter of all active tenants."""
        counters = self._counters
        return min((counters[t] for t in self._active if t in counters), default=self._floor)

    def behind(self, tenants: Iterable[str], allowed: float) -> list[str]:
        """Those of `tenants` that have had at most `allowed` more than the least served of them."""
        known = {tenant: self._counters.get(tenant, 0.0) for tenant in tenants}
        least = min(known.values())
        return [tenant for tenant, counter in known.items() if counter <= least + allowed]
