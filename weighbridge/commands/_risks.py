"""Settings that are valid and yet risky, each with what to do about it. Looks at nothing but them and at limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighbridge.config.settings import Settings

Row = tuple[Any, str, str, str]
"""Level, subject, message, remedy."""
LOOPBACK = ("127.0.0.1", "::1", "localhost", "[::1]")
LEAST_DRAIN_S = 60.0


def risks(
    settings: Settings, environment: Callable[[str], str | None], descriptors: int | None, memory_bytes: int | None
) -> Iterator[Row]:
    """All of them. `descriptors` and `memory_bytes` are what this process may have, None where that is not known."""
    yield from _listeners(settings)
    yield from _tenants(settings)
    yield from _engines(settings, environment)
    yield from _bounds(settings, descriptors, memory_bytes)


def _listeners(settings: Settings) -> Iterator[Row]:
    if settings.host not in LOOPBACK and not settings.keys:
        yield "warn", "listener", f"anyone who reaches {settings.host} may send requests", "add `keys`"
    if settings.host not in LOOPBACK and settings.tls_cert is None:
        yield "warn", "listener", "requests and keys travel unencrypted", "set `tls_cert` and `tls_key`"
    if settings.admin_host not in LOOPBACK:
        if settings.admin_token_env is None:
            yield "fail", "admin listener", "not on loopback and without a token", "set `admin_token_env`"
        else:
            message = "its token travels unencrypted: it has no TLS"
            yield "warn", "admin listener", message, "keep it on loopback, or behind a proxy that has TLS"
    tracing = settings.tracing
    if tracing is not None and tracing.endpoint is not None and _plain(tracing.endpoint):
        yield "warn", "tracing", "models, tenants and timings travel unencrypted", "use an https:// `endpoint`"


def _tenants(settings: Settings) -> Iterator[Row]:
    if settings.keys and all(key.disabled for key in settings.keys):
        yield "fail", "keys", "every key is disabled: nobody can send requests", "enable one or remove `keys`"
    tenants = {key.tenant for key in settings.keys}
    if len(tenants) < 2:
        return
    if not settings.isolate_tenants:
        message = "tenants share prefix caches and can tell by timing what others have sent"
        yield "warn", "tenants", message, "set `isolate_tenants: true`"
        return
    from weighbridge.gateway.adapters import ADAPTERS

    for instance in settings.instances:
        if not ADAPTERS[instance.kind].cache_salt:
            message = f"a {instance.kind} cannot keep tenants' prefix caches apart: timing tells what others have sent"
            yield "warn", instance.name, message, "give tenants that must not know of each other engines of their own"
    if settings.salt_env is None:
        message = "tenants' salts are new at each start: what engines have cached is lost then"
        yield "warn", "tenants", message, "set `salt_env`"


def _engines(settings: Settings, environment: Callable[[str], str | None]) -> Iterator[Row]:
    for instance in settings.instances:
        if instance.api_key_env and not environment(instance.api_key_env):
            yield "fail", instance.name, f"environment variable {instance.api_key_env} is not set", "set it"
        if instance.api_key_env and _plain(instance.url):
            yield "warn", instance.name, "its key travels unencrypted", "use https://"
    for source in settings.discovery:
        fields = getattr(source, "instance", {})
        if "api_key_env" in fields:
            message = "discovered engines are spoken to without TLS: the key goes to whoever answers to the name"
            host = getattr(source, "host", "")
            yield "warn", f"discovery of {host}", message, "list engines with keys by https:// URL"


def _bounds(settings: Settings, descriptors: int | None, memory_bytes: int | None) -> Iterator[Row]:
    connections = settings.server.max_connections
    if descriptors is not None and 2 * connections > descriptors:
        message = f"{connections} connections need about {2 * connections} descriptors, {descriptors} are allowed"
        yield "warn", "limits", message, "raise `ulimit -n`, or lower `server.max_connections`"
    held = settings.server.max_buffered_bytes
    if memory_bytes is not None and held > memory_bytes / 2:
        message = f"bodies may take {held >> 20} MiB of {memory_bytes >> 20} MiB of memory"
        yield "warn", "limits", message, "lower `server.max_buffered_bytes`"
    if settings.drain_s < LEAST_DRAIN_S:
        message = f"a stop cuts streams after {settings.drain_s:g} s"
        yield "warn", "drain", message, "let `drain_s` be minutes, and the orchestrator's grace period longer"
    if settings.health.eject_share > 0.5:
        message = "failing requests may take most of the fleet out"
        yield "warn", "health", message, "keep `health.eject_share` at 0.5 or less"
    if settings.retry_share > 0.5:
        message = "when everything fails the engines get more than half as much again"
        yield "warn", "retries", message, "keep `retry_share` near 0.2"


def _plain(url: str) -> bool:
    """Whether it is http:// to another machine."""
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0]
    host = authority if authority.endswith("]") else authority.rpartition(":")[0] or authority
    return scheme == "http" and host not in LOOPBACK
