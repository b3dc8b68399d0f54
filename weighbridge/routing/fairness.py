"""Fairness between tenants by tokens served: virtual counters with lift (VTC, OSDI 2024).

A tenant's counter grows by w_p per prompt token when a request is sent and w_q per output token expected, corrected
to what was really generated when it ends, over the tenant's weight. A tenant that is new, or was no further than the
others when it went idle, starts at the least counter of the active ones, so that idleness earns no credit. One that was
ahead of them keeps what it had, also where they have passed it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class Fairness:
    """Counters of served tokens by tenant; forgets tenants that are idle and behind. Every operation is O(log tenants)
    in the mean."""

    __slots__ = ("_active", "_counters", "_floor", "_heap", "_placed")

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._floor = 0.0
        """The least counter of the active tenants when there last were any."""
        self._heap: list[tuple[float, str]] = []
        """Active tenants by a counter that they had: at most what they have now. Put right where it comes first."""
        self._placed: dict[str, float] = {}
        """Which of its places in the heap holds for each active tenant."""

    def __len__(self) -> int:
        return len(self._counters)

    def arrived(self, tenant: str) -> None:
        """A request of the tenant came in."""
        count = self._active.get(tenant, 0)
        self._active[tenant] = count + 1
        if not count:
            known = self._counters.get(tenant)
            counter = self._counters[tenant] = max(0.0, self.least()) if known is None else known
            self._place(tenant, counter)

    def ended(self, tenant: str) -> None:
        """A request of the tenant is gone."""
        left = self._active[tenant] - 1
        if left:
            self._active[tenant] = left
            return
        self._floor = self.least()
        del self._active[tenant]
        del self._placed[tenant]
        if self._counters[tenant] <= self._floor:
            del self._counters[tenant]
        if len(self._counters) > 2 * len(self._active) + 1_024:
            floor = self._floor
            self._counters = {t: c for t, c in self._counters.items() if t in self._active or c > floor}

    def served(self, tenant: str, prompt_tokens: int, output_tokens: int, weight: float) -> None:
        """Tokens were given to the tenant, or taken back where negative."""
        if tenant in self._counters:
            counter = self._counters[tenant]
            counter += (PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens) / weight
            self._counters[tenant] = counter
            if counter < self._placed.get(tenant, counter):
                self._place(tenant, counter)

    def counter(self, tenant: str) -> float:
        """Weighted tokens served to the tenant since the least served one was even with it."""
        return self._counters.get(tenant, 0.0)

    def least(self) -> float:
        """The least counter of all active tenants."""
        heap, placed = self._heap, self._placed
        while heap:
            counter, tenant = heap[0]
            if placed.get(tenant) != counter:
                heappop(heap)
                continue
            now = self._counters[tenant]
            if now == counter:
                return counter
            placed[tenant] = now
            heapreplace(heap, (now, tenant))
        return self._floor

    def _place(self, tenant: str, counter: float) -> None:
        self._placed[tenant] = counter
        if len(self._heap) > 2 * len(self._placed) + 64:
            self._heap = [(counter, tenant) for tenant, counter in self._placed.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (counter, tenant))

    def behind(self, tenants: Iterable[str], allowed: float) -> list[str]:
        """Those of `tenants` that have had at most `allowed` more than the least served of them."""
        known = {tenant: self._counters.get(tenant, 0.0) for tenant in tenants}
        least = min(known.values())
        return [tenant for tenant, counter in known.items() if counter <= least + allowed]
