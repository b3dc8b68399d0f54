"""Everything the pages show at one moment. Every page, fragment and `weighbridge top` is a pure function of this.

Times are seconds, shares are fractions, None means "not known". Nothing here holds prompt text: a request is its id,
its token counts and the names of its tier, tenant and model.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weighbridge.core.instance import Limits, Rates, StepTerms

Level = Literal["profile", "online", "tokens", "requests"]
State = Literal["up", "starting", "draining", "down"]
Outcome = Literal["waiting", "running", "ok", "failed", "cancelled", "rejected"]

TERMS = ("wait", "prefill", "transfer", "decode", "delay_to_others")
"""Cost terms in the order they are drawn; a policy's own term names follow them."""


class Pair(msgspec.Struct, frozen=True):
    """One request's forecast and observed time to first token, and the forecast's error bar."""

    forecast_s: float
    observed_s: float
    error_s: float = 0.0


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `load` is the share in use of the rate it can sustain; head-room is 1 - load."""

    name: str
    pool: str = "default"
    engine: str = ""
    role: str = "mixed"
    models: tuple[str, ...] = ()
    state: State = "up"
    reason: str = ""
    level: Level = "requests"
    running: int = 0
    waiting: int = 0
    max_sequences: int | None = None
    kv_used: float | None = None
    kv_peak: float | None = None
    load: float | None = None
    error_bar: float | None = None
    age_s: float | None = None
    pairs: tuple[Pair, ...] = ()
    limits: Limits = Limits()
    rates: Rates | None = None
    step: StepTerms | None = None
    rate_per_s: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None


class CandidateView(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate of a decision. `total_s` is the sum of the terms or the policy's score in seconds."""

    instance: str
    terms: tuple[tuple[str, float], ...] = ()
    total_s: float | None = None
    error_s: float | None = None
    score: float | None = None
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    p_slo: float | None = None
    excluded: str = ""
    tie: bool = False


class DecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One request's placement and what became of it.

    `forecast_s` and `observed_s` are the request's own time from its dispatch to its last token; `ttft_s` counts from
    dispatch as well. `forecast_at_length_s` is the forecast for the output that came, known afterwards: comparing with
    it judges the cost model apart from the guess of the length.
    """

    id: str
    at_s: float
    tier: str = ""
    tenant: str = ""
    model: str = ""
    policy: str = ""
    prompt_tokens: int = 0
    expected_output_tokens: int = 0
    length_estimate: str = ""
    chosen: str = ""
    attempt: int = 1
    queued_s: float = 0.0
    note: str = ""
    candidates: tuple[CandidateView, ...] = ()
    forecast_s: float | None = None
    forecast_ttft_s: float | None = None
    error_s: float | None = None
    forecast_at_length_s: float | None = None
    outcome: Outcome = "running"
    reason: str = ""
    ttft_s: float | None = None
    observed_s: float | None = None
    output_tokens: int | None = None

    @property
    def judged_s(self) -> float | None:
        """The forecast that the observed time is held against."""
        return self.forecast_s if self.forecast_at_length_s is None else self.forecast_at_length_s

    @property
    def deviation(self) -> float | None:
        """Observed against forecast, relative."""
        if self.observed_s is None or not self.judged_s:
            return None
        return self.observed_s / self.judged_s - 1

    @property
    def outside(self) -> bool:
        """Whether the observed time lies outside the error bar."""
        if self.observed_s is None or self.judged_s is None or self.error_s is None or not self.forecast_s:
            return False
        return abs(self.observed_s - self.judged_s) > self.error_s * self.judged_s / self.forecast_s

    @property
    def ties(self) -> int:
        """Candidates that were equal to the best within the error bar."""
        return sum(candidate.tie for candidate in self.candidates)


class Latency(msgspec.Struct, frozen=True):
    """Median and 99th percentile."""

    p50_s: float | None = None
    p99_s: float | None = None


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant inside a tier."""

    name: str
    queued: int = 0
    served_tokens: int = 0


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """One SLO class over the window. `offered` counts failures and rejects too."""

    name: str
    priority: int = 0
    target: float = 0.95
    bounds: tuple[tuple[str, float], ...] = ()
    offered: int = 0
    met: int = 0
    shed_429: int = 0
    shed_503: int = 0
    failed: int = 0
    cancelled: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    queued: int = 0
    queued_tokens: int = 0
    ttft: Latency = Latency()
    tpot: Latency = Latency()
    e2e: Latency = Latency()
    retry_after_s: float | None = None
    drain_s: float | None = None
    tenants: tuple[TenantView, ...] = ()

    @property
    def attainment(self) -> float | None:
        """Share of all offered requests that met every bound."""
        return self.met / self.offered if self.offered else None

    @property
    def shed(self) -> int:
        """Requests answered 429 or 503."""
        return self.shed_429 + self.shed_503


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Recent history of the headline numbers, one point per tick, oldest first."""

    attainment: tuple[float, ...] = ()
    goodput: tuple[float, ...] = ()
    shed: tuple[float, ...] = ()
    ttft: tuple[float, ...] = ()
    headroom: tuple[float, ...] = ()
    error: tuple[float, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at `at_s` (the source's clock). `error` says why the source could not be read; the rest is then old.
    `note` says what the source cannot know."""

    at_s: float
    source: str
    window_s: float = 60.0
    policy: str = ""
    error: str = ""
    note: str = ""
    age_s: float = 0.0
    log: str = ""
    instances: tuple[InstanceView, ...] = ()
    decisions: tuple[DecisionView, ...] = ()
    skipped_decisions: int = 0
    tiers: tuple[TierView, ...] = ()
    goodput_per_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_bound_s: float | None = None
    ttft_tier: str = ""
    forecast_error: float | None = None
    error_bar: float | None = None
    queued: int = 0
    series: Series = Series()

    @property
    def attainment(self) -> float | None:
        """Over all tiers."""
        offered = sum(tier.offered for tier in self.tiers)
        return sum(tier.met for tier in self.tiers) / offered if offered else None

    @property
    def shed(self) -> float | None:
        """Share of all offered requests that were turned away."""
        offered = sum(tier.offered for tier in self.tiers)
        return sum(tier.shed for tier in self.tiers) / offered if offered else None

    def instance(self, name: str) -> InstanceView | None:
        """By name."""
        return next((i for i in self.instances if i.name == name), None)

    def decision(self, request_id: str) -> DecisionView | None:
        """By request id."""
        return next((d for d in self.decisions if d.id == request_id), None)
