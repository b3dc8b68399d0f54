"""The address of an engine, from any usual spelling of its base URL to one normal form."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from weighbridge.core.errors import ConfigError

_VERSION = re.compile(r"v\d+[a-z0-9]*")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens. `root` holds its own paths (`/health`), `api` the OpenAI ones (`/chat/completions`)."""

    scheme: str
    host: str
    port: int
    root: str
    api: str

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        standard = 443 if self.scheme == "https" else 80
        return host if self.port == standard else f"{host}:{self.port}"

    def path(self, api_path: str) -> str:
        """The path on the engine of a client path such as `/v1/chat/completions`."""
        return self.api + api_path.removeprefix("/v1") if api_path.startswith("/v1/") else self.root + api_path


def _link_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_link_local
    except ValueError:
        return False


def parse_origin(url: str, *, source: str = "", path: str = "") -> Origin:
    """Parses a base URL; `http://h`, `http://h/`, `http://h/v1` and `http://h//v1/` mean the same.

    Raises:
        ConfigError: not an absolute http(s) URL, or one with user, query or fragment.
    """

    def bad(why: str) -> ConfigError:
        shown = re.sub(r"//.*@", "//***@", url)  # messages reach logs
        return ConfigError(f"{shown!r} {why}; write it as http://host:port", source=source, path=path)

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise bad("is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise bad("is not an http or https URL with a host")
    if parts.username is not None or parts.password is not None:
        raise bad("holds a user name or password, use api_key_env")
    if _link_local(parts.hostname):
        raise bad("is a link-local address, where clouds keep credentials and no engine listens")
    if parts.query or parts.fragment:
        raise bad("holds a query or fragment")
    if not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise bad("holds a blank or a character that is not ASCII")
    segments = [s for s in parts.path.split("/") if s]
    if any(s in (".", "..") for s in segments):
        raise bad("holds a relative path")
    versioned = bool(segments) and _VERSION.fullmatch(segments[-1]) is not None
    api = "/" + "/".join(segments) if versioned else "".join(f"/{s}" for s in segments) + "/v1"
    root = "".join(f"/{s}" for s in (segments[:-1] if versioned else segments))
    return Origin(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), root, api)
