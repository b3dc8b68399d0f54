"""Offered load against what can be sustained, as it is shown."""

from __future__ import annotations

import msgspec


class Stability(msgspec.Struct, frozen=True, kw_only=True):
    """Loads as fractions of what can be sustained; None where a profile or a capacity is missing."""

    token_load: float | None
    kv_load: float | None
    offered_tokens_per_s: float
