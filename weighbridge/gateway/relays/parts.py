"""What a relay tells of engines instead of keeping it: health and KV events are the Router's process's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weighbridge.gateway.kv.prompt import prompt_of
from weighbridge.gateway.relays.wire import Answered, Sign

if TYPE_CHECKING:
    from weighbridge.gateway.endpoint import Endpoint
    from weighbridge.gateway.flight import Flight
    from weighbridge.gateway.usage_fields import Usage

MAX_PROMPT_BYTES = 256 * 1024


class RelaySignals:
    """Tells the Router's process what real requests see of engines. Successes it knows from their ends."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send

    def connect_failed(self, endpoint: Endpoint) -> None:
        """A request found nobody listening."""
        self._send(Sign(endpoint.name, "", connecting=True))

    def request_failed(self, endpoint: Endpoint, reason: str) -> None:
        """A request's attempt failed for the engine's fault."""
        self._send(Sign(endpoint.name, reason))

    def request_succeeded(self, endpoint: Endpoint) -> None:
        """The Router's process sees it from the request's end."""

    def recovery_s(self, model: str, told_s: float | None) -> float | None:
        """The Router's process knows, and has told."""
        return told_s


class RelayAnswers:
    """Hands finished prompts to the Router's process, which follows the engine's KV events."""

    def __init__(self, instance: str, send: Callable[[Any], None]) -> None:
        self._instance = instance
        self._send = send

    def answered(self, flight: Flight, usage: Usage) -> None:
        """A request ended well there."""
        prompt = prompt_of(flight, usage.prompt_tokens, usage.cached_tokens)
        if prompt is not None and len(prompt.body) <= MAX_PROMPT_BYTES:
            self._send(Answered(self._instance, prompt))
