"""At the door: what a request will cost, whether its tenant and tier may have that, and what the fleet has left.

Counts every refusal. Overload has hysteresis: it begins when the held work would take `overload_enter_s` to drain and
ends only below `overload_leave_s`, so that an oscillating load does not flap.
"""

from __future__ import annotations

from collections.abc import Iterable

from weighbridge.routing.fairness import Fairness
from weighbridge.routing.fleet import Instance
from weighbridge.routing.live import Live
from weighbridge.routing.settings import RouterSettings, TenantLimit

UNLIMITED = TenantLimit()
MOST_RETRY_S = 300.0
LEAST_RETRY_S = 0.1
MOST_BUCKETS = 65_536


class Refusal:
    """Why a request may not come in: the HTTP status, a reason a machine can read, and seconds to wait."""

    __slots__ = ("reason", "retry_after_s", "status")

    def __init__(self, status: int, reason: str, retry_after_s: float) -> None:
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class _Bucket:
    __slots__ = ("requests", "time_s", "tokens")

    def __init__(self, tokens: float, now_s: float) -> None:
        self.tokens = tokens
        self.time_s = now_s
        self.requests = 0


class Admission:
    """Limits by tenant and tier, in tokens. The router calls it at arrival, dispatch and end."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._buckets: dict[str, _Bucket] = {}
        self.fairness = Fairness()
        self.held_tokens: dict[str, int] = {}
        """By tier, prompt and expected output tokens that wait here."""
        self.running_tokens: dict[str, int] = {}
        """By tier, the same of what was sent and has not ended."""
        self.held_total = 0
        self.counts: dict[tuple[str, str], int] = {}
        """By (tier, what): refusals by reason, `clipped`, `deferred`, `preempted`."""
        self.overloaded = False

    def limit(self, tenant: str) -> TenantLimit:
        """The limits of a tenant."""
        tenants = self._settings.tenants
        return tenants.get(tenant) or tenants.get("*") or UNLIMITED

    def count(self, tier: str, what: str) -> None:
        """One more of `what` in `tier`."""
        self.counts[tier, what] = self.counts.get((tier, what), 0) + 1

    def enter(self, live: Live, now_s: float) -> Refusal | None:
        """A new request: charge its tenant's bucket, or say why not. What enters must `leave` once."""
        tenant = live.tenant
        limit = self.limit(tenant)
        if limit is not UNLIMITED:
            refusal = self._take(tenant, limit, live.cost_tokens, now_s)
            if refusal is not None:
                return refusal
        tier = live.tier
        if tier.max_held_tokens is not None:
            held = self.held_tokens.get(tier.name, 0)
            if held and held + live.cost_tokens > tier.max_held_tokens:
                self._give_back(tenant, live.cost_tokens)
                return Refusal(429, "tier_queue_full", 0.0)
        self.fairness.arrived(tenant)
        return None

    def adopt(self, live: Live) -> None:
        """A request that runs already enters without being asked or charged. It must `leave` once as well."""
        tenant = live.tenant
        self.fairness.arrived(tenant)
        limit = self.limit(tenant)
        if limit is not UNLIMITED:
            bucket = self._buckets.get(tenant)
            if bucket is None:
                burst = float(limit.burst_tokens or (limit.tokens_per_s or 0.0) * 10.0)
                bucket = self._buckets[tenant] = _Bucket(burst, live.arrival_s)
            bucket.requests += 1

    def leave(self, live: Live) -> None:
        """A request that entered has ended."""
        tenant = live.tenant
        self.fairness.ended(tenant)
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.requests -= 1
            if not bucket.requests and len(self._buckets) > MOST_BUCKETS:
                del self._buckets[tenant]

    def hold(self, live: Live, sign: int = 1) -> None:
        """A request begins to wait, or stops (sign -1)."""
        name = live.tier_name
        self.held_tokens[name] = self.held_tokens.get(name, 0) + sign * live.cost_tokens
        self.held_total += sign * live.cost_tokens

    def run(self, live: Live, sign: int = 1) -> None:
        """A request was sent, or its attempt ended (sign -1)."""
        name = live.tier_name
        self.running_tokens[name] = self.running_tokens.get(name, 0) + sign * live.cost_tokens

    def may_run(self, live: Live) -> bool:
        """Whether the tier's bound on running tokens leaves room for it."""
        most = live.running_most
        running = self.running_tokens.get(live.tier_name, 0)
        return most is None or running == 0 or running + live.cost_tokens <= most

    def served(self, live: Live, prompt_tokens: int, output_tokens: int) -> None:
        """Tokens that the tenant was given (negative: taken back)."""
        tenant = live.tenant
        self.fairness.served(tenant, prompt_tokens, output_tokens, self.limit(tenant).weight)

    def look(self, instances: Iterable[Instance]) -> float:
        """Seconds that the held work would take; turns overload on or off by it."""
        seconds = drain_s(instances, self.held_total)
        if seconds > self._settings.overload_enter_s:
            self.overloaded = True
        elif seconds < self._settings.overload_leave_s:
            self.overloaded = False
        return seconds

    def _take(self, tenant: str, limit: TenantLimit, tokens: int, now_s: float) -> Refusal | None:
        burst = float(limit.burst_tokens or (limit.tokens_per_s or 0.0) * 10.0)
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = _Bucket(burst, now_s)
        if limit.max_requests is not None and bucket.requests >= limit.max_requests:
            return Refusal(429, "tenant_concurrency", 1.0)
        rate = limit.tokens_per_s
        if rate is not None:
            bucket.tokens = min(burst, bucket.tokens + (now_s - bucket.time_s) * rate)
            bucket.time_s = now_s
            # a request larger than the whole bucket passes when it is full, and leaves it in debt
            missing = min(float(tokens), burst) - bucket.tokens
            if missing > 0:
                return Refusal(429, "tenant_rate", max(missing / rate, LEAST_RETRY_S))
            bucket.tokens -= tokens
        bucket.requests += 1
        return None

    def _give_back(self, tenant: str, tokens: int) -> None:
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.requests -= 1
            if self.limit(tenant).tokens_per_s is not None:
                bucket.tokens += tokens


def drain_s(instances: Iterable[Instance], held_tokens: int) -> float:
    """Seconds until the fleet has worked off what it owes and what is held: the slower of prefill and decode.

    Without a profile, one second per 1,000 tokens and instance stands in.
    """
    prefill = decode = 0.0
    owed_prefill = owed_decode = 0
    for instance in instances:
        cost = instance.cost
        owed_prefill += instance.prefill_tokens
        owed_decode += instance.decode_tokens
        if cost is None or cost.prefill_s <= 0.0:
            prefill += 1_000.0
            decode += 1_000.0
            continue
        running = max(instance.decoding, 16)
        prefill += 1.0 / cost.prefill_s
        decode += running / cost.decode_step_s(running, instance.decoding_kv_tokens)
    if prefill <= 0.0:
        return MOST_RETRY_S
    # held tokens are prompts and outputs; a third as output is the mean of the production traces
    return max((owed_prefill + held_tokens) / prefill, (owed_decode + held_tokens / 3) / decode)


def retry_after_s(seconds: float) -> float:
    """An honest Retry-After from a drain forecast, within bounds a client can use."""
    return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)
