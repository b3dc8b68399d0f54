"""Which kind of engine answers, by what it tells of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weighbridge.gateway.adapters.adapter import Replies, json_of, model_entries

TELLING = ("/v1/models", "/metrics", "/props", "/info")
"""Pages by which an engine's kind is found out."""


def recognised(replies: Replies) -> str:
    """The adapter kind; `openai` where nothing speaks for another."""
    page = replies.get("/metrics")
    metrics = page.body[:400_000] if page is not None and page.status == 200 else b""
    owners = {entry.get("owned_by") for entry in model_entries(replies)}
    if "weighbridge" in owners or b"weighbridge_engine_" in metrics:
        return "embedded"
    if b"vllm:" in metrics or "vllm" in owners:
        return "vllm"
    if b"sglang:" in metrics or b"sglang_" in metrics or "sglang" in owners:
        return "sglang"
    if "total_slots" in _object(replies, "/props") or "llamacpp" in owners:
        return "llamacpp"
    if "max_batch_total_tokens" in _object(replies, "/info") or b"tgi_" in metrics:
        return "tgi"
    return "openai"


def _object(replies: Replies, path: str) -> Mapping[str, Any]:
    value = json_of(replies.get(path))
    return value if isinstance(value, dict) else {}
