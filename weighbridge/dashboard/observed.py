"""Parts of the observer: what is counted per instance and in the queue, and the numbers made from what ended."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weighbridge.core.errors import WeighbridgeError
from weighbridge.core.instance import InstanceSpec, LoadReport, StepTerms
from weighbridge.core.metrics import RequestRecord, percentile
from weighbridge.core.request import Request, Tier
from weighbridge.dashboard.snapshot import (
    InstanceView,
    Latency,
    Level,
    Pair,
    State,
    TenantView,
    TierView,
)
from weighbridge.plan.stability import demand_of, stability

KEPT_ENDS = 20_000
KEPT_PAIRS = 100
KEPT_LENGTHS = 64
FALL_BACK_BUDGET = 2_048


@dataclass(frozen=True, slots=True)
class End:
    """One request that ended, at `at_s` on the log's clock."""

    at_s: float
    record: RequestRecord
    reason: str


class ObservedInstance:
    """Counters of one instance."""

    def __init__(self, name: str) -> None:
        self.spec = InstanceSpec(name=name)
        self.generation = -1
        self.state: State = "up"
        self.reason = ""
        self.report: LoadReport | None = None
        self.report_s: float | None = None
        self.running: dict[str, int] = {}
        """KV tokens by request that was sent there and has not ended."""
        self.prefilling: set[str] = set()
        self.dispatches: deque[tuple[float, int]] = deque(maxlen=5_000)
        self.lengths: deque[tuple[int, int]] = deque(maxlen=KEPT_LENGTHS)
        self.pairs: deque[Pair] = deque(maxlen=KEPT_PAIRS)
        self.deviations: deque[float] = deque(maxlen=KEPT_PAIRS)

    def join(self, request_id: str, prompt_tokens: int) -> None:
        """A request was sent there."""
        self.running[request_id] = prompt_tokens
        self.prefilling.add(request_id)

    def first_token(self, request_id: str) -> None:
        """Its prompt is computed."""
        self.prefilling.discard(request_id)

    def grow(self, tokens: int, request_id: str) -> None:
        """Output tokens came."""
        if request_id in self.running:
            self.running[request_id] += tokens

    def leave(self, request_id: str) -> None:
        """A request ended there."""
        self.running.pop(request_id, None)
        self.prefilling.discard(request_id)

    def restarted(self) -> None:
        """A new life holds nothing of the old one."""
        self.running.clear()
        self.prefilling.clear()
        self.report = None


class Queue:
    """Requests held in the router, and how long those that were refused would really have waited."""

    def __init__(self) -> None:
        self._held: dict[str, Request] = {}
        self._watched: list[tuple[float, str, set[str]]] = []
        self.promised: dict[str, float] = {}
        self.drained: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request: Request) -> None:
        """A request waits."""
        self._held[request.id] = request

    def remove(self, request: Request, now_s: float) -> None:
        """It was sent, or it ended."""
        if self._held.pop(request.id, None) is None:
            return
        for watched in list(self._watched):
            at_s, tier, left = watched
            left.discard(request.id)
            if not left:
                self.drained[tier] = now_s - at_s
                self._watched.remove(watched)

    def refused(self, request: Request, retry_after_s: float | None, now_s: float) -> None:
        """A request was turned away: watch how long it takes until those that were before it have left."""
        if retry_after_s is None:
            return
        self.promised[request.tier] = retry_after_s
        ahead = {r.id for r in self._held.values() if r.tier == request.tier and r.id != request.id}
        if ahead and len(self._watched) < 32:
            self._watched.append((now_s, request.tier, ahead))

    def of(self, tier: str) -> list[Request]:
        """Those of one tier."""
        return [r for r in self._held.values() if r.tier == tier]


def step_terms(spec: InstanceSpec) -> StepTerms | None:
    """Step terms, or what the two rates say where only those are known."""
    if spec.step is not None or spec.rates is None:
        return spec.step
    return StepTerms(base_s=1 / spec.rates.decode_tokens_per_s, prefill_s=1 / spec.rates.prefill_tokens_per_s)


def load_of(spec: InstanceSpec, rate: float, lengths: Sequence[tuple[int, int]]) -> float | None:
    """Share in use of the rate that an instance sustains with these lengths; None where that is not known."""
    terms = step_terms(spec)
    if terms is None or not lengths:
        return None
    if rate <= 0:
        return 0.0
    limits = spec.limits
    budget = limits.token_budget or FALL_BACK_BUDGET
    try:
        found = stability(
            rate, demand_of(lengths, budget), terms, token_budget=budget, kv_tokens=limits.kv_tokens,
            max_sequences=limits.max_sequences,
        )  # fmt: skip
    except (WeighbridgeError, ZeroDivisionError):
        return None
    return rate / found.max_rate


def instance_view(i: ObservedInstance, now_s: float, window_s: float) -> InstanceView:
    """What the pages show of an instance."""
    spec, report = i.spec, i.report or LoadReport()
    recent = [tokens for at, tokens in i.dispatches if at >= now_s - window_s]
    rate = len(recent) / window_s
    capacity = spec.limits.kv_tokens
    kv = sum(i.running.values())
    used = report.kv_usage if report.kv_usage is not None else (kv / capacity if capacity else None)
    expected = _mean(o for _, o in i.lengths) or 0.0
    peak = min(2.0, (kv + len(i.running) * expected / 2) / capacity) if capacity else None
    waiting = report.waiting if report.waiting is not None and not i.running else len(i.prefilling)
    level: Level = "profile" if spec.step or (spec.rates and spec.error) else "online" if spec.rates else "tokens"
    return InstanceView(
        name=spec.name, pool=spec.pool, engine=spec.kind, role=spec.role, models=spec.models, state=i.state,
        reason=i.reason, level=level, running=len(i.running), waiting=waiting,
        max_sequences=spec.limits.max_sequences, kv_used=used, kv_peak=max(peak, used or 0.0) if peak else None,
        load=load_of(spec, rate, i.lengths), error_bar=spec.error,
        age_s=None if i.report_s is None else max(0.0, now_s - i.report_s), pairs=tuple(i.pairs),
        limits=spec.limits, rates=spec.rates, step=spec.step, rate_per_s=rate,
        prompt_tokens=_mean(p for p, _ in i.lengths), output_tokens=_mean(o for _, o in i.lengths),
    )  # fmt: skip


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _latency(values: Iterable[float | None]) -> Latency:
    ordered = sorted(v for v in values if v is not None)
    return Latency(percentile(ordered, 50), percentile(ordered, 99)) if ordered else Latency()


def tier_views(ends: Iterable[End], tiers: Mapping[str, Tier], queue: Queue) -> tuple[TierView, ...]:
    """Every tier that has a name, in order of priority; requests of an unknown tier make one without bounds."""
    by_tier: dict[str, list[End]] = {name: [] for name in tiers}
    for end in ends:
        by_tier.setdefault(end.record.tier, []).append(end)
    order = sorted(by_tier, key=lambda name: tiers[name].priority if name in tiers else 1_000)
    return tuple(_tier(name, tiers.get(name, Tier(name=name, priority=1_000)), by_tier[name], queue) for name in order)


def _tier(name: str, tier: Tier, ends: list[End], queue: Queue) -> TierView:
    records = [end.record for end in ends]
    reasons: dict[str, int] = {}
    shed = {"429": 0, "503": 0}
    for end in ends:
        if end.record.status == "rejected":
            status, _, reason = end.reason.partition(" ")
            reasons[reason] = reasons.get(reason, 0) + 1
            shed[status] = shed.get(status, 0) + 1
    held = queue.of(name)
    served: dict[str, int] = {}
    for r in records:
        served[r.tenant] = served.get(r.tenant, 0) + (r.prompt_tokens + r.output_tokens if r.status == "ok" else 0)
    waiting: dict[str, int] = {}
    for request in held:
        waiting[request.tenant] = waiting.get(request.tenant, 0) + 1
    bounds = (("TTFT", tier.ttft_s), ("TPOT", tier.tpot_s), ("E2E", tier.e2e_s))
    count = {s: sum(r.status == s for r in records) for s in ("failed", "cancelled")}
    return TierView(
        name=name, priority=tier.priority, bounds=tuple((k, v) for k, v in bounds if v is not None),
        offered=len(records), met=sum(r.meets(tier) for r in records), shed_429=shed["429"], shed_503=shed["503"],
        failed=count["failed"], cancelled=count["cancelled"], reasons=tuple(sorted(reasons.items())),
        queued=len(held), queued_tokens=sum(r.prompt_tokens for r in held),
        ttft=_latency(r.ttft_s for r in records), tpot=_latency(r.tpot_s for r in records),
        e2e=_latency(r.e2e_s for r in records), retry_after_s=queue.promised.get(name),
        drain_s=queue.drained.get(name),
        tenants=tuple(
            TenantView(name=t, queued=waiting.get(t, 0), served_tokens=served.get(t, 0))
            for t in sorted({*served, *waiting})
        ),
    )  # fmt: skip


def headline(
    ends: Iterable[End], tiers: Mapping[str, Tier], views: Sequence[TierView], span_s: float,
    instances: Iterable[ObservedInstance],
) -> dict[str, Any]:  # fmt: skip
    """The snapshot's fields about the fleet as a whole."""
    known = list(instances)
    bounded = [v for v in views if "TTFT" in dict(v.bounds) and v.offered]
    first = bounded[0] if bounded else None
    values = [e.record.ttft_s for e in ends if first is None or e.record.tier == first.name]
    deviations = [d for i in known for d in i.deviations]
    bars = [i.spec.error for i in known if i.spec.error]
    return {
        "goodput_per_s": sum(v.met for v in views) / span_s,
        "ttft_p99_s": _latency(values).p99_s,
        "ttft_tier": first.name if first else "all tiers",
        "ttft_bound_s": dict(first.bounds)["TTFT"] if first else None,
        "forecast_error": statistics.median(deviations) if deviations else None,
        "error_bar": statistics.median(bars) if bars else None,
    }
