"""Bounds on retries and on what a key may spend: token buckets over time handed in by the caller."""

from __future__ import annotations

MIN_RETRIES = 10.0
MAX_SAVED = 100.0


class RetryBudget:
    """Retries may be a share of requests: when everything fails, the fleet sees (1 + share) times the load, no more.

    A few are always allowed, and unused ones are saved up to a bound.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = MIN_RETRIES
        self.spent = 0
        self.refused = 0

    def deposit(self) -> None:
        """A request arrived."""
        self._tokens = min(self._tokens + self._share, MAX_SAVED)

    def take(self) -> bool:
        """Whether one more try may be made; counts it."""
        if self._tokens < 1.0:
            self.refused += 1
            return False
        self._tokens -= 1.0
        self.spent += 1
        return True


class TokenBucket:
    """LLM tokens per minute of one key. A request is charged its estimate at the start and settled at the end."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def take(self, tokens: int, now_s: float) -> float:
        """0 if the charge was taken, else the seconds until it could be; more than a minute's needs a full bucket."""
        self._refill(now_s)
        wanted = min(tokens, self.per_minute)
        if self._level < wanted:
            return (wanted - self._level) * 60.0 / self.per_minute
        self._level -= tokens
        return 0.0

    def resize(self, per_minute: int, now_s: float) -> None:
        """Another rate from now on. What is left of the old one stays, up to what the new one holds."""
        self._refill(now_s)
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def give_back(self, tokens: int) -> None:
        """Settles a charge that was too high (or, negative, too low)."""
        self._level = min(self._level + tokens, float(self.per_minute))

    def _refill(self, now_s: float) -> None:
        self._level = min(self._level + (now_s - self._at_s) * self.per_minute / 60.0, float(self.per_minute))
        self._at_s = now_s
