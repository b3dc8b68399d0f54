"""Decisions and how they went, as the admin listener shows them."""

from __future__ import annotations

import msgspec

from weighbridge.core.decision import Decision


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a decided request went, in seconds from its arrival."""

    outcome: str
    instance: str
    e2e_s: float
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0


class DecisionRecord:
    """A decision and, once known, its outcome."""

    __slots__ = ("decision", "outcome")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.outcome: Outcome | None = None
