"""Who is calling: API keys by their hash, compared in constant time, each with a tenant, a tier and models."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from weighbridge.core.errors import ConfigError, RequestError
from weighbridge.core.request import Tier
from weighbridge.gateway.settings import GatewaySettings, KeySettings
from weighbridge.http import Request

TIER_OF_SERVICE = {"priority": "interactive", "default": "standard", "auto": "standard", "flex": "batch"}
REFUSED = "The API key is missing or not valid."


class Principal:
    """A caller. `models` empty: all of them; `tier` None: the caller may choose. `issuer` tells which
    Authorizer knows it, by a mark of its own: a reference to it would keep both until the collector comes."""

    __slots__ = ("issuer", "key", "models", "tenant", "tier")

    def __init__(
        self,
        tenant: str,
        tier: str | None = None,
        models: tuple[str, ...] = (),
        key: KeySettings | None = None,
        issuer: object = None,
    ) -> None:
        self.tenant = tenant
        self.tier = tier
        self.models = models
        self.key = key
        self.issuer = issuer


class Authorizer:
    """Looks callers up. Without configured keys everybody is the default tenant.

    Raises ConfigError where two keys are one, or a key names a tier that is not defined.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        check_keys(settings)
        self.mark = object()
        self._anonymous = Principal(settings.default_tenant, issuer=self.mark)
        self._default_tier = settings.default_tier
        self._tiers = frozenset(tier.name for tier in settings.router.tiers)
        self._by_hash = {
            (digest := bytes.fromhex(key.sha256)): (digest, Principal(key.tenant, key.tier, key.models, key, self.mark))
            for key in settings.keys
        }
        self._nobody = (bytes(32), Principal(""))

    def principal(self, request: Request) -> Principal | None:
        """The caller, or None if a key is required and the request has no valid one."""
        if not self._by_hash:
            return self._anonymous
        token = bearer(request)
        # the digest is of a 256-bit random key: looking it up tells nothing of other keys; the last comparison is in
        # constant time, and unknown and disabled keys take the same path
        digest = hashlib.sha256(token).digest()
        expected, found = self._by_hash.get(digest, self._nobody)
        if not hmac.compare_digest(digest, expected) or found.key is None or found.key.disabled:
            return None
        return found

    def tier(self, principal: Principal, request: Request, service_tier: str | None) -> str:
        """The tier of a request: the key's, else the header's, else OpenAI's `service_tier`, else the default."""
        if principal.tier is not None:
            return principal.tier
        header = request.header(b"x-weighbridge-tier")
        if header is not None:
            name = header.decode("latin-1")
            if name not in self._tiers:
                known = ", ".join(sorted(self._tiers))
                raise RequestError(f"Unknown tier in x-weighbridge-tier; known: {known}.", code="unknown_tier")
            return name
        if service_tier is not None:
            name = TIER_OF_SERVICE.get(service_tier, self._default_tier)
            if name in self._tiers:
                return name
        return self._default_tier


def key_problem(keys: Sequence[KeySettings], tiers: Sequence[Tier]) -> tuple[str, str] | None:
    """The first of `keys` that cannot be used: its path in the configuration, and why."""
    names = sorted(tier.name for tier in tiers)
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        first = seen.setdefault(key.sha256, index)
        if first != index:
            return f"$.keys[{index}].sha256", f"is the key of $.keys[{first}] already; remove one of the two"
        if key.tier is not None and key.tier not in names:
            return f"$.keys[{index}].tier", f"tier {key.tier!r} is not defined; defined: {', '.join(names)}"
    return None


def check_keys(settings: GatewaySettings) -> None:
    """Raises ConfigError where a key cannot be used."""
    problem = key_problem(settings.keys, settings.router.tiers)
    if problem is not None:
        raise ConfigError(problem[1], path=problem[0])


def bearer(request: Request) -> bytes:
    """The token of `Authorization: Bearer` or of Anthropic's `x-api-key`, empty if there is none."""
    value = request.header(b"authorization")
    if value is not None:
        scheme, _, token = value.partition(b" ")
        return token.strip() if scheme.lower() == b"bearer" else b""
    return request.header(b"x-api-key") or b""
