"""Seconds until the instance's queue has drained, as SGLang's gateway estimates them (`least_load`).

    score = (waiting + sent) / throughput + pressure * k / (1 - k)

waiting: uncached prompt tokens the engine reports as queued; sent: prompt tokens sent there since that report;
throughput: generated tokens per second as reported, else 2,000; k: KV use, at most .999. An engine that reports no
waiting tokens is scored by our own ledger's outstanding prompt tokens instead, and by its KV count without a gauge.
The formula divides prompt tokens by a generation rate and has no output term; both are the original's.
"""

from __future__ import annotations

from weighbridge.routing.fleet import Instance
from weighbridge.routing.policy import Choice, View, least

DEFAULT_TOKENS_PER_S = 2_000.0
FULLEST = 0.999


class DrainTime:
    """Least seconds to drain."""

    def __init__(self, pressure_s: float = 0.15) -> None:
        if pressure_s < 0:
            raise ValueError("pressure_s must be at least 0")
        self.pressure_s = pressure_s

    def choose(self, view: View) -> Choice:
        """Pick the option that drains first."""
        pairs = [(_queue_s(option.instance), self._pressure_s(option.instance)) for option in view.options]
        scores = [queue + pressure for queue, pressure in pairs]
        terms = [{"drain_s": queue, "pressure_s": pressure} for queue, pressure in pairs] if view.explain else []
        return Choice(least(scores, view.rng), scores, terms)

    def _pressure_s(self, instance: Instance) -> float:
        report = instance.report
        usage = report.kv_usage if report is not None else None
        if usage is None:
            capacity = instance.spec.limits.kv_tokens
            usage = instance.kv_tokens / capacity if capacity else 0.0
        usage = min(max(usage, 0.0), FULLEST)
        return self.pressure_s * usage / (1.0 - usage)


def _queue_s(instance: Instance) -> float:
    report = instance.report
    if report is None:
        return instance.prefill_tokens / DEFAULT_TOKENS_PER_S
    rate = report.generation_tokens_per_s
    rate = rate if rate is not None and rate > 1.0 else DEFAULT_TOKENS_PER_S
    if report.waiting_tokens is None:
        return instance.prefill_tokens / rate
    return (report.waiting_tokens + instance.sent_since_report_tokens) / rate
