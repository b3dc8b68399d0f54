"""Prometheus families of followed KV events."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from weighbridge.gateway.kv.index import KvIndex
from weighbridge.gateway.stats import gauge

HEALTHY = frozenset({"live", "waiting"})
COUNTS = {
    "batches": "Batches of KV events applied.",
    "gaps": "Gaps in the numbers of batches.",
    "replayed": "Batches that a replay gave.",
    "lost": "Batches that no replay had any more.",
    "restarts": "Times the numbers began anew.",
    "unreadable": "Messages or events of an unknown shape.",
    "orphans": "Blocks whose parent is not known.",
    "untokenized": "Prompts not translated because too many waited.",
}


def kv_metrics(index: KvIndex) -> Iterator[Metric]:
    """Nothing where no engine is followed."""
    rows = [(name, watch.describe()) for name, watch in index.watches.items()]
    if not rows:
        return
    one = ("instance",)
    ill = [((name,), float(row["state"] not in HEALTHY)) for name, row in rows]
    text = "1 if its prefix index is empty or stale though events are configured; /fleet tells why."
    yield gauge("weighbridge_kv_events_silent", text, one, ill)
    blocks = [((name,), float(row["blocks"])) for name, row in rows]
    yield gauge("weighbridge_kv_events_blocks", "Token blocks it is known to hold.", one, blocks)
    for key, help_text in COUNTS.items():
        family = CounterMetricFamily(f"weighbridge_kv_events_{key}", help_text, labels=one)
        for name, row in rows:
            family.add_metric((name,), float(row[key]))
        yield family
