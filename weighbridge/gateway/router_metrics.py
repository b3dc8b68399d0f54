"""What the Router has counted of its own, for `/metrics` and `/fleet`: admission, prefix credit, failing shadows.

Labels are bounded by the configuration: its tiers and shadow policies, and the reasons that the Router knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric

from weighbridge.gateway.stats import gauge
from weighbridge.routing.router import Router
from weighbridge.routing.sums import PrefixCredit


def router_metrics(router: Router) -> Iterator[Metric]:
    """Prometheus families."""
    admission = router.admission
    text = "Refusals by reason, and requests that were clipped, deferred or preempted."
    counts = CounterMetricFamily("weighbridge_admission", text, labels=("tier", "reason"))
    for labels, count in sorted(admission.counts.items()):
        counts.add_metric(labels, float(count))
    yield counts
    overloaded = [((), float(admission.overloaded))]
    yield gauge("weighbridge_overloaded", "1 while the router clips and defers where clients allow it.", (), overloaded)
    credit = router.fleet.prefix_credit
    text = "Requests whose engine told how much of the prompt it had cached."
    requests = CounterMetricFamily("weighbridge_prefix_credit_requests", text)
    requests.add_metric((), float(credit.requests))
    yield requests
    text = "Their prompt tokens: all, credited as cached when routed, found cached, and credited but not found."
    tokens = CounterMetricFamily("weighbridge_prefix_credit_tokens", text, labels=("what",))
    for what, count in _tokens(credit).items():
        tokens.add_metric((what,), float(count))
    yield tokens
    failures = CounterMetricFamily("weighbridge_shadow_failures", "Times a shadow policy failed.", labels=("policy",))
    for name, count in router.shadow_failures.items():
        failures.add_metric((name,), float(count))
    yield failures


def router_rows(router: Router) -> dict[str, Any]:
    """The same as JSON."""
    credit = router.fleet.prefix_credit
    tiers: dict[str, dict[str, int]] = {}
    for (tier, reason), count in sorted(router.admission.counts.items()):
        tiers.setdefault(tier, {})[reason] = count
    return {
        "overloaded": router.admission.overloaded,
        "admission": tiers,
        "prefix_credit": {"requests": credit.requests, **{f"{k}_tokens": n for k, n in _tokens(credit).items()}},
        "shadow_failures": router.shadow_failures,
    }


def _tokens(credit: PrefixCredit) -> dict[str, int]:
    return {
        "prompt": credit.prompt_tokens,
        "credited": credit.credited_tokens,
        "found": credit.found_tokens,
        "missed": credit.missed_tokens,
    }
