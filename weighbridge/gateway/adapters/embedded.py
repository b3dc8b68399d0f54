"""Our own engine's server: it speaks vLLM's metric names, takes a priority and the two-step KV transfer."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from weighbridge.gateway.adapters import vllm
from weighbridge.gateway.adapters.adapter import Adapter


def lease_path(params: Any) -> str | None:
    """Where the KV that prefill parameters name is given up: DELETE of its lease."""
    name = params.get("remote_request_id") if isinstance(params, dict) else None
    return f"/kv/{quote(name, safe='')}" if isinstance(name, str) and name else None


ADAPTER = Adapter(
    kind="embedded",
    report_paths=("/metrics",),
    report=vllm.report,
    facts_paths=("/v1/models", "/metrics", "/version"),
    facts=vllm.facts,
    priority=True,
    cache_salt=True,
    kv_transfer=True,
    kv_lease=lease_path,
    endpoints=frozenset({"chat", "completions", "embeddings", "tokenize", "detokenize"}),
)
