"""Decisions and how they went, as the admin listener shows them, and the parts that a relay process has others of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weighbridge.core.actions import Dispatch
from weighbridge.core.decision import Decision
from weighbridge.core.event_log import read_entry
from weighbridge.gateway.outcome import Outcome
from weighbridge.routing.candidates import NO_TERMS

if TYPE_CHECKING:
    from weighbridge.core.actions import Reject
    from weighbridge.gateway.endpoint import Endpoint
    from weighbridge.gateway.flight import Flight
    from weighbridge.gateway.usage_fields import Usage


class DecisionRecord:
    """A decision and, once known, its outcome.

    Thousands are kept and few are ever asked for. So as soon as it stands in the event log the decision is kept as its
    place there, some seventy objects less, and made from it when somebody asks. Beside it stands what is asked of every
    one: `attempt`, `chosen`, `queued_s` and `terms`, the forecast on the chosen instance.
    """

    __slots__ = ("_decision", "_lines", "_number", "_request_id", "attempt", "chosen", "outcome", "queued_s", "terms")

    def __init__(self, decision: Decision) -> None:
        self.outcome: Outcome | None = None
        self._decision: Decision | None = decision
        self._lines = b""
        self._number = 0
        self._request_id = decision.request_id
        self.attempt = decision.attempt
        self.queued_s = decision.queued_s
        chosen = self.chosen = decision.chosen
        self.terms: dict[str, float] = {}
        candidates = decision.candidates
        if candidates and candidates[0].terms is not NO_TERMS:  # else the policy does not explain itself
            for candidate in candidates:
                if candidate.instance == chosen:
                    self.terms = candidate.terms
                    break

    def stands_in(self, lines: bytes, number: int) -> None:
        """The decision is in line `number` of `lines`, which are of the event log."""
        self._lines, self._number = lines, number
        self._decision = None

    @property
    def decision(self) -> Decision:
        """Why it went where it went."""
        if self._decision is not None:
            return self._decision
        for action in read_entry(self._lines.split(b"\n")[self._number]).a:
            if isinstance(action, Dispatch) and action.request_id == self._request_id and action.decision:
                return action.decision
        raise AssertionError("the line holds its dispatch")


class Steered(Protocol):
    """A live request as the Router's driver steers it: here in this process, or in a relay."""

    record: DecisionRecord | None

    def dispatch(self, action: Dispatch) -> None:
        """Sends it, or a leg of it, to an instance."""

    def reject(self, action: Reject) -> None:
        """Answers its client with a refusal."""

    def abort(self, reason: str) -> None:
        """Stops its running attempt."""

    def break_off(self) -> None:
        """The gateway itself failed at it: it ends, with a 500 where its client has seen nothing yet."""


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
