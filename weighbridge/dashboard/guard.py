"""Who may see the dashboard: loopback without a token, everything else only with one.

Without a token the Host header must name this listener, so that a hostile page cannot reach it through a DNS name of
its own. With a token the browser gets a cookie that scripts cannot read and other sites cannot send.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets

from weighbridge.core.errors import ConfigError
from weighbridge.http import Request

COOKIE = "weighbridge_dashboard"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("content-security-policy", CSP),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
)
MIN_TOKEN = 16


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Checks of one listener on `host`. The token itself is never stored in a cookie, logged or shown."""

    def __init__(self, host: str, token: str = "") -> None:
        if not is_loopback(host) and not token:
            raise ConfigError(
                f"{host} can be reached from other machines, so a token is needed; set WEIGHBRIDGE_DASHBOARD_TOKEN "
                "or listen on 127.0.0.1",
                source="--host",
            )
        if token and len(token) < MIN_TOKEN:
            raise ConfigError(f"must have at least {MIN_TOKEN} characters", source="WEIGHBRIDGE_DASHBOARD_TOKEN")
        self._host = host
        self._token = token
        secret = secrets.token_bytes(32)
        self._session = hmac.new(secret, token.encode(), hashlib.sha256).hexdigest() if token else ""

    @property
    def needs_token(self) -> bool:
        """Whether a viewer must sign in."""
        return bool(self._token)

    def host_allowed(self, request: Request) -> bool:
        """Whether the Host header names this listener."""
        if self._token:
            return True
        name = _host_name((request.header(b"host") or b"").decode("latin-1"))
        return is_loopback(name) or name == self._host

    def signed_in(self, request: Request) -> bool:
        """Whether the request carries the session cookie, or needs none."""
        if not self._token:
            return True
        for part in (request.header(b"cookie") or b"").decode("latin-1").split(";"):
            name, _, value = part.strip().partition("=")
            if name == COOKIE and hmac.compare_digest(value.encode("latin-1"), self._session.encode()):
                return True
        return False

    def sign_in(self, token: str, secure: bool) -> str | None:
        """The Set-Cookie value for a right token, else None."""
        if not self._token or not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        tail = "; Secure" if secure else ""
        return f"{COOKIE}={self._session}; HttpOnly; SameSite=Strict; Path=/{tail}"

    def same_origin(self, request: Request) -> bool:
        """Whether a POST comes from a page of this listener."""
        origin = (request.header(b"origin") or b"").decode("latin-1")
        if not origin:
            return request.header(b"sec-fetch-site") == b"same-origin"
        scheme, _, rest = origin.partition("://")
        return scheme in ("http", "https") and rest == (request.header(b"host") or b"").decode("latin-1")


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rsplit(":", 1)[0] if host.count(":") == 1 else host
