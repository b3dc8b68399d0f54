"""Quotas in a relay: whose tokens a request uses. They are counted in the Router's process, once for all relays."""

from __future__ import annotations

from weighbridge.core.request import Request as RoutedRequest
from weighbridge.gateway.auth import Principal
from weighbridge.gateway.quota import Quotas


class RelayQuotas(Quotas):
    """Remembers the key of each live request that has a quota."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, str] = {}

    def charge(self, principal: Principal, routed: RoutedRequest, now_s: float) -> None:
        """Notes the key; the Router's process charges it and may refuse."""
        key = principal.key
        if key is not None and key.tokens_per_minute is not None:
            self._keys[routed.id] = key.sha256

    def settle(self, request_id: str, used_tokens: int) -> None:
        """A request has ended; the Router's process settles."""
        if self._keys:
            self._keys.pop(request_id, None)

    def key_of(self, request_id: str) -> str:
        """SHA-256 of a live request's key where it has a quota, else empty."""
        return self._keys.get(request_id, "") if self._keys else ""

    def rename(self, old: str, new: str) -> None:
        """A live request has another id."""
        key = self._keys.pop(old, None)
        if key is not None:
            self._keys[new] = key
