"""Our own engine's server: it speaks vLLM's metric names, takes a priority and the two-step KV transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import quote

import msgspec

from weighbridge.gateway.adapters import vllm
from weighbridge.gateway.adapters.adapter import Adapter, Facts, Replies, model_entries


def facts(replies: Replies) -> Facts:
    """vLLM's, and what only this engine tells: its slots, device and how it fills its steps."""
    known = vllm.facts(replies)
    entry: dict[str, Any] = next(iter(model_entries(replies)), {})
    told = entry.get("scheduler")
    scheduler: dict[str, Any] = told if isinstance(told, dict) else {}
    slots, budget = entry.get("max_num_seqs"), scheduler.get("token_budget")
    limits = msgspec.structs.replace(
        known.limits,
        max_sequences=slots if isinstance(slots, int) and slots > 0 else None,
        token_budget=budget if isinstance(budget, int) and budget > 0 else None,
    )
    described = str(entry.get("description") or "").split()
    return replace(
        known,
        limits=limits,
        device=str(entry.get("device") or ""),
        quantisation=described[-1] if described else "",
        scheduler=scheduler,
    )


def lease_path(params: Any) -> str | None:
    """Where the KV that prefill parameters name is given up: DELETE of its lease."""
    name = params.get("remote_request_id") if isinstance(params, dict) else None
    return f"/kv/{quote(name, safe='')}" if isinstance(name, str) and name else None


ADAPTER = Adapter(
    kind="embedded",
    report_paths=("/metrics",),
    report=vllm.report,
    facts_paths=("/v1/models", "/metrics", "/version"),
    facts=facts,
    priority=True,
    cache_salt=True,
    transfers=("two_step",),
    kv_lease=lease_path,
    endpoints=frozenset({"chat", "completions", "embeddings", "tokenize", "detokenize"}),
)
