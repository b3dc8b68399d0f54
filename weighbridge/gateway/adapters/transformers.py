"""`transformers serve`: no load report, no usage option, and unknown fields are refused with 422."""

from __future__ import annotations

from weighbridge.gateway.adapters.adapter import Adapter

ADAPTER = Adapter(
    kind="transformers",
    usage_option=False,  # it tells usage in the last frame anyway, and refuses what it does not know
    endpoints=frozenset({"chat", "completions", "responses"}),
)
