"""Small running sums of the ledger: requests of one tier on one instance, offered load, prefix credit."""

from __future__ import annotations

import math

from weighbridge.core.request import Tier

OFFERED_MEMORY_S = 5.0


class Group:
    """Sums over the requests of one tier on one instance: enough to forecast their mean TPOT in O(1).

    Times are integer microseconds, so that the sums return to exactly zero.
    """

    __slots__ = ("count", "decoding", "e2e_s", "first_us", "generated", "remaining", "tpot_s")

    def __init__(self, tier: Tier | None) -> None:
        self.tpot_s = None if tier is None else tier.tpot_s
        self.e2e_s = None if tier is None else tier.e2e_s
        self.count = 0
        self.decoding = 0
        self.generated = 0
        self.remaining = 0
        self.first_us = 0
        """Sum of the first-token times of those that decode."""


class PrefixCredit:
    """Prompt tokens that were credited as cached when routed, against those the engines then found in their caches."""

    __slots__ = ("credited_tokens", "found_tokens", "missed_tokens", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.credited_tokens = self.found_tokens = 0
        self.missed_tokens = 0
        """Credited but not found: stale entries, or blocks still being computed."""

    def observe(self, prompt_tokens: int, credited_tokens: int, found_tokens: int) -> None:
        """A request ended and its engine told how much of the prompt it had."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.credited_tokens += credited_tokens
        self.found_tokens += found_tokens
        self.missed_tokens += max(credited_tokens - found_tokens, 0)


class Offered:
    """Prompt tokens offered per second, averaged over the last seconds, against what the fleet can prefill."""

    __slots__ = ("_count", "_sum", "_time_s", "capacity_tokens_per_s")

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0.0
        self._time_s = 0.0
        self.capacity_tokens_per_s = 0.0
        """Prefill tokens per second of all instances that prefill; 0 while unknown."""

    def add(self, tokens: int, now_s: float) -> None:
        """A request arrived of whose prompt `tokens` must be computed."""
        fade = math.exp((self._time_s - now_s) / OFFERED_MEMORY_S)
        self._sum = self._sum * fade + tokens
        self._count = self._count * fade + 1
        self._time_s = now_s

    def share(self, now_s: float) -> float:
        """Share of the fleet's prefill capacity that the offered prompts take."""
        if self.capacity_tokens_per_s <= 0.0:
            return 0.0
        rate = self._sum * math.exp((self._time_s - now_s) / OFFERED_MEMORY_S) / OFFERED_MEMORY_S
        return rate / self.capacity_tokens_per_s

    def displaced(self, now_s: float) -> float:
        """Arriving requests per prompt token that the fleet can compute: what each token computed needlessly takes
        the place of once the fleet has no time to spare."""
        if self.capacity_tokens_per_s <= 0.0:
            return 0.0
        rate = self._count * math.exp((self._time_s - now_s) / OFFERED_MEMORY_S) / OFFERED_MEMORY_S
        return rate / self.capacity_tokens_per_s
