"""Decisions and how they went, as the admin listener shows them, and the parts that a relay process has others of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weighbridge.core.decision import Decision
from weighbridge.gateway.outcome import Outcome

if TYPE_CHECKING:
    from weighbridge.core.actions import Dispatch, Reject
    from weighbridge.gateway.endpoint import Endpoint
    from weighbridge.gateway.flight import Flight
    from weighbridge.gateway.usage_fields import Usage


class DecisionRecord:
    """A decision and, once known, its outcome."""

    __slots__ = ("decision", "outcome")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.outcome: Outcome | None = None


class Steered(Protocol):
    """A live request as the Router's driver steers it: here in this process, or in a relay."""

    record: DecisionRecord | None

    def dispatch(self, action: Dispatch) -> None:
        """Sends it, or a leg of it, to an instance."""

    def reject(self, action: Reject) -> None:
        """Answers its client with a refusal."""

    def abort(self, reason: str) -> None:
        """Stops its running attempt."""


class Signals(Protocol):
    """Who hears of what real requests see of an engine's health."""

    def connect_failed(self, endpoint: Endpoint) -> None:
        """A request found nobody listening."""

    def request_failed(self, endpoint: Endpoint, reason: str) -> None:
        """A request's attempt failed for the engine's fault."""

    def request_succeeded(self, endpoint: Endpoint) -> None:
        """A request went well."""

    def recovery_s(self, model: str, told_s: float | None) -> float | None:
        """Seconds until an engine of a model may be back; `told_s` is what came with the Router's refusal."""


class Answers(Protocol):
    """Who learns from an engine's finished requests what their prompts are to its cache."""

    def answered(self, flight: Flight, usage: Usage) -> None:
        """A request ended well there."""
