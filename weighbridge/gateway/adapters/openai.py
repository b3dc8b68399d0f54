"""Any server that speaks OpenAI's API and of which nothing else is known: no load report, no private fields."""

from __future__ import annotations

from weighbridge.gateway.adapters.adapter import Adapter

ADAPTER = Adapter(
    kind="openai",
    health_path="/v1/models",
    alive_below=500,
    endpoints=frozenset({"chat", "completions", "embeddings", "responses", "messages"}),
)
