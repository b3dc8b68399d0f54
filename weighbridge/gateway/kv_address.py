"""Addresses of KV events in the configuration. Pure."""

from __future__ import annotations

from weighbridge.core.errors import ConfigError

AUTO = "auto"
ANY_HOST = frozenset({"*", "0.0.0.0", "::", "[::]"})  # noqa: S104 - compared, not bound


def check_address(text: str, path: str) -> None:
    """Refuses what ZeroMQ cannot connect to. Raises ConfigError."""
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "ipc" and rest:
        return
    if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is no address such as tcp://HOST:5557", path=path)
    if host in ANY_HOST:
        raise ConfigError(f"{text!r}: an engine listens on {host!r}; name the host to connect to", path=path)
