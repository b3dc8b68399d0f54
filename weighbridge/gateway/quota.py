"""What a key may spend per minute, and the salts that keep tenants' prefix caches apart."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from weighbridge.core.errors import RequestError
from weighbridge.core.request import Request as RoutedRequest
from weighbridge.gateway.auth import Principal
from weighbridge.gateway.budget import TokenBucket
from weighbridge.gateway.settings import KeySettings


class Quotas:
    """Token buckets of the keys that have a limit. A request is charged its estimate and settled with what it took."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self._charged: dict[str, tuple[TokenBucket, int]] = {}

    def apply(self, keys: Iterable[KeySettings], now_s: float) -> None:
        """Takes over reloaded keys: limits that differ hold from now on, what was spent stays spent."""
        by_hash = {key.sha256: key for key in keys}
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in by_hash}
        for name, bucket in self._buckets.items():
            limit = by_hash[name].tokens_per_minute
            if limit is not None and limit != bucket.per_minute:
                bucket.resize(limit, now_s)

    def charge(self, principal: Principal, routed: RoutedRequest, now_s: float) -> None:
        """Raises RequestError (429) when the key's tokens of this minute are spent."""
        key = principal.key
        if key is None or key.tokens_per_minute is None:
            return
        bucket = self._buckets.get(key.sha256)
        if bucket is None:
            bucket = self._buckets[key.sha256] = TokenBucket(key.tokens_per_minute, now_s)
        charge = routed.prompt_tokens + routed.max_tokens
        wait_s = bucket.take(charge, now_s)
        if wait_s > 0:
            raise RequestError(
                f"This key may use {key.tokens_per_minute} tokens per minute.",
                status=429,
                type="tokens",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        self._charged[routed.id] = (bucket, charge)

    def settle(self, request_id: str, used_tokens: int) -> None:
        """Gives back what a request was charged and did not use; also after an early disconnect."""
        charged = self._charged.pop(request_id, None) if self._charged else None
        if charged is not None:
            charged[0].give_back(charged[1] - used_tokens)


class Salts:
    """`cache_salt` of each tenant: equal for one tenant, not to be guessed by another."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._salts: dict[str, bytes] = {}

    def salt(self, tenant: str) -> bytes:
        """The salt as a JSON string."""
        salt = self._salts.get(tenant)
        if salt is None:
            digest = hmac.new(self._key, tenant.encode(), hashlib.sha256).hexdigest()[:32]
            salt = self._salts[tenant] = b'"%b"' % digest.encode()
        return salt
