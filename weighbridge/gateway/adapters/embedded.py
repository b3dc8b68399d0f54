"""Our own engine's server: it speaks vLLM's metric names, takes a priority and the two-step KV transfer."""

from __future__ import annotations

from weighbridge.gateway.adapters import vllm
from weighbridge.gateway.adapters.adapter import Adapter

ADAPTER = Adapter(
    kind="embedded",
    report_paths=("/metrics",),
    report=vllm.report,
    facts_paths=("/v1/models", "/metrics", "/version"),
    facts=vllm.facts,
    priority=True,
    cache_salt=True,
    kv_transfer=True,
)
