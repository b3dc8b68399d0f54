"""Every latency and goodput metric, defined once for simulator, bench and gateway.

With scheduled arrival a, first token f, last token l, output tokens o:

    TTFT = f - a          E2E = l - a          TPOT = (E2E - TTFT) / (o - 1), undefined for o < 2
    attainment = requests that meet every bound of their tier / all offered requests (failures and rejects included)
    goodput    = requests that meet every bound / seconds of arrivals = attainment * offered rate

Percentiles interpolate linearly. "Adjusted" percentiles count a request that never got there as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from weighbridge.core.request import Tier

Status = Literal["ok", "failed", "rejected", "timed_out", "cancelled", "unfinished"]
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What happened to one request; all times in seconds on one clock. The same record for live and simulated runs."""

    id: str
    scheduled_s: float
    status: Status
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    tier: str = "standard"
    tenant: str = ""
    instance: str = ""
    attempts: int = 1
    preemptions: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Scheduled arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        """Scheduled arrival to last token; None unless the request ended well."""
        return None if self.status != "ok" or self.last_token_s is None else self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None for fewer than two tokens or no good end."""
        if self.status != "ok" or self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    def meets(self, tier: Tier) -> bool:
        """Whether the request ended well within every bound of `tier`."""
        if self.status != "ok":
            return False
        bounds = ((tier.ttft_s, self.ttft_s), (tier.tpot_s, self.tpot_s), (tier.e2e_s, self.e2e_s))
        return all(bound is None or value is None or value <= bound for bound, value in bounds)


class Distribution(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Mean, extremes and percentiles of one metric; NaN where nothing was measured."""

    count: int
    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p95: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Attainment and goodput count all offered requests.

    `window_s` is first scheduled arrival until last token, the base of token throughput; `arrival_s` the seconds over
    which requests arrived, the base of goodput, so that the drain at the end of a run lowers no rate.
    """

    offered: int
    by_status: dict[str, int]
    window_s: float
    arrival_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    attainment: float
    attainment_by_tier: dict[str, float]
    goodput_per_s: float
    shed_rate: float
    output_tokens_per_s: float
    share_by_instance: dict[str, float]
    adjusted_ttft_p99_s: float


def percentile(ordered: Sequence[float], q: float) -> float:
    """Linear-interpolation percentile (q in 0..100) of an ascending sequence; NaN when empty, inf past a gap of inf."""
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * q / 100.0
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    fraction = position - low
    if fraction == 0.0 or ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * fraction


def distribution(values: Iterable[float]) -> Distribution:
    """Summarise values in any order."""
    ordered = sorted(values)
    if not ordered:
        nan = math.nan
        return Distribution(count=0, mean=nan, min=nan, max=nan, p50=nan, p90=nan, p95=nan, p99=nan)
    p50, p90, p95, p99 = (percentile(ordered, q) for q in PERCENTILES)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        count=len(ordered), mean=mean, min=ordered[0], max=ordered[-1], p50=p50, p90=p90, p95=p95, p99=p99
    )


def adjusted(records: Sequence[RequestRecord], metric: Literal["ttft_s", "e2e_s"], q: float) -> float:
    """Percentile over all offered requests; one that never reached the metric counts as infinite."""
    values = [value if (value := getattr(r, metric)) is not None else math.inf for r in records]
    return percentile(sorted(values), q)


def summarise(
    records: Sequence[RequestRecord],
    tiers: Mapping[str, Tier],
    *,
    window_s: float | None = None,
    arrival_s: float | None = None,
) -> Summary:
    """Summarise one run.

    `window_s` defaults to first scheduled arrival until last token; `arrival_s` to the span of arrivals, longer by one
    mean gap (n arrivals stand for n gaps), or to `window_s` where there is no span.

    A request of an unknown tier is checked against no bound: it meets its SLO when it ends well.
    """
    by_status: dict[str, int] = {}
    met_by_tier: dict[str, list[int]] = {}
    share: dict[str, int] = {}
    for r in records:
        by_status[r.status] = by_status.get(r.status, 0) + 1
        tier = tiers.get(r.tier)
        met = r.status == "ok" if tier is None else r.meets(tier)
        met_by_tier.setdefault(r.tier, []).append(met)
        if r.instance:
            share[r.instance] = share.get(r.instance, 0) + 1
    if window_s is None:
        start = min((r.scheduled_s for r in records), default=0.0)
        window_s = max((r.last_token_s or r.scheduled_s for r in records), default=0.0) - start
    if arrival_s is None:
        arrival_s = _arrival_seconds(records) or window_s
    met_total = sum(sum(flags) for flags in met_by_tier.values())
    placed = sum(share.values())
    offered = len(records)
    return Summary(
        offered=offered,
        by_status=by_status,
        window_s=window_s,
        arrival_s=arrival_s,
        ttft_s=distribution(v for r in records if (v := r.ttft_s) is not None),
        tpot_s=distribution(v for r in records if (v := r.tpot_s) is not None),
        e2e_s=distribution(v for r in records if (v := r.e2e_s) is not None),
        attainment=met_total / offered if offered else math.nan,
        attainment_by_tier={tier: sum(flags) / len(flags) for tier, flags in sorted(met_by_tier.items())},
        goodput_per_s=met_total / arrival_s if arrival_s > 0 else math.nan,
        shed_rate=by_status.get("rejected", 0) / offered if offered else math.nan,
        output_tokens_per_s=sum(r.output_tokens for r in records) / window_s if window_s > 0 else math.nan,
        share_by_instance={name: count / placed for name, count in sorted(share.items())},
        adjusted_ttft_p99_s=adjusted(records, "ttft_s", 99.0),
    )


def _arrival_seconds(records: Sequence[RequestRecord]) -> float:
    """Span of the scheduled arrivals plus one mean gap; 0 where there are fewer than two different times."""
    if len(records) < 2:
        return 0.0
    span = max(r.scheduled_s for r in records) - min(r.scheduled_s for r in records)
    return span * len(records) / (len(records) - 1)
