"""A whole gateway: two listeners, the engines, the Router and the event log, started and stopped together."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from weighbridge.core.errors import ConfigError, ServiceError, WeighbridgeError
from weighbridge.core.event_log import Header
from weighbridge.gateway.access_log import AccessLog
from weighbridge.gateway.admin import Admin
from weighbridge.gateway.auth import check_keys
from weighbridge.gateway.discovery import Discovery
from weighbridge.gateway.driver import Driver
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.health import Health
from weighbridge.gateway.kv import KvIndex
from weighbridge.gateway.listener_tls import ListenerTls
from weighbridge.gateway.log_writer import LogWriter
from weighbridge.gateway.loop_guard import LoopGuard
from weighbridge.gateway.membership import Membership, check_names
from weighbridge.gateway.memory_return import MemoryReturn, glibc_trim
from weighbridge.gateway.pairs import check_pairs
from weighbridge.gateway.relays.hub import Hub
from weighbridge.gateway.settings import GatewaySettings, InstanceSettings
from weighbridge.gateway.stats import Stats
from weighbridge.gateway.surface import Surface
from weighbridge.gateway.tracing import Tracer
from weighbridge.http import HttpServer
from weighbridge.http.loop_pass import pass_of
from weighbridge.routing.router import Router

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
FLUSH_S = 0.25
FIXED = (
    *("host", "port", "admin_host", "admin_port", "admin_token_env", "router", "data_dir", "log_bytes", "log_files"),
    *(
        "server",
        "discovery",
        "access_log",
        "tracing",
        "selection",
        "tokenizers",
        "salt_env",
        "isolate_tenants",
        "tls_cert",
        "tls_key",
        "relays",
    ),
)
"""Settings that a reload cannot change."""
SWAPPED = tuple(n for n in GatewaySettings.__struct_fields__ if n not in FIXED and n != "instances")


class Gateway:
    """`start`, serve, `drain`, `stop`. `port` and `admin_port` are the bound ones."""

    def __init__(
        self,
        settings: GatewaySettings,
        environment: Mapping[str, str] | None = None,
        *,
        start_s: float | None = None,
    ) -> None:
        """Checks everything that can be checked without the network. With `settings.relays` it has no OpenAI listener
        but a `hub`, where relays meet it; `start_s` is then the start of the clock that they share.

        Raises:
            ConfigError, PolicyError: what is wrong.
        """
        environment = os.environ if environment is None else environment
        self.settings = settings
        if settings.relays and settings.selection is not None:
            raise ConfigError(
                "`selection` needs the Router in the process that reads requests; leave one of the two out",
                path="$.relays",
            )
        self._admin_token = _admin_token(settings, environment)
        self.stats = Stats()
        check_names(settings.instances)
        endpoints = {i.name: Endpoint(i, settings.client, environment) for i in settings.instances}
        check_pairs(endpoints.values(), settings.router.binding)
        self.writer: LogWriter | None = None
        self.driver = Driver(Router(settings.router), endpoints, None, self.stats, start_s)
        self.health = Health(self.driver, settings.health)
        self.kv = KvIndex(self.driver, settings.prefix_block_bytes)
        self.membership = Membership(self.driver, self.health, self.kv, environment, lambda: self.settings.drain_s)
        self.discovery = Discovery(settings.discovery, self.membership, settings.client, check=self._fits)
        self.guard = LoopGuard(settings.max_loop_lag_s)
        salt_key = make_salt_key(settings, environment)
        self.surface = Surface(settings, self.driver, self.health, self.stats, salt_key, self.guard)
        self.hub = Hub(self) if settings.relays else None
        if settings.tracing is not None and self.hub is None:
            self.surface.tracer = Tracer(settings.tracing)
        self.admin = Admin(self, self._admin_token)
        self.surface.routes.get("/readyz", self.admin.ready)  # for load balancers that see this listener only
        self.server = HttpServer(self.surface.routes, settings.server, self.surface.admit)
        self.admin_server = HttpServer(self.admin)
        self.on_reload: Callable[[], Awaitable[list[str]]] | None = None
        """Reads the configuration anew and calls `reload`; set by whoever knows where it stands."""
        self.draining = False
        self._tls: ListenerTls | None = None
        self._memory = MemoryReturn(glibc_trim())
        self._flusher: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The bound port of the OpenAI listener."""
        return self.server.port

    @property
    def admin_port(self) -> int:
        """The bound port of the admin listener."""
        return self.admin_server.port

    async def start(self) -> None:
        """Opens the event log, binds both listeners and begins probing. Raises ServiceError if a port is taken."""
        settings = self.settings
        self.driver.loop_pass = pass_of(asyncio.get_running_loop())
        if settings.data_dir is not None:
            self.writer = self.driver.writer = self._open_log(Path(settings.data_dir))
        if settings.access_log is not None and self.hub is None:
            self.surface.access = self._open_access_log(settings.access_log)
        if settings.tls_cert is not None and self.hub is None:
            self._tls = ListenerTls(settings.tls_cert, settings.tls_key)
        context = self._tls.context if self._tls is not None else None
        self.health.start()  # before anybody can ask for a change of what it watches
        self.kv.start()
        try:
            if self.hub is None:
                await _bind(self.server, settings.host, settings.port, context)
            await _bind(self.admin_server, settings.admin_host, settings.admin_port, None)
        except ServiceError:
            await self.stop()
            raise
        self.guard.start()
        self.discovery.start()
        self._flush()

    async def wait_ready(self, timeout_s: float, names: Collection[str] = ()) -> bool:
        """True as soon as an instance (or every one of `names`) is up, False after `timeout_s`."""
        return await self.health.wait_ready(timeout_s, names)

    async def add_instance(self, settings: InstanceSettings) -> Endpoint:
        """Adds an engine to the running fleet. Raises ConfigError."""
        if settings.name in self.driver.endpoints:
            raise ConfigError(f"an instance named {settings.name!r} exists already")
        endpoint = self.membership.endpoint(settings, self.settings.client)
        self._fits(endpoint)
        self.membership.put(endpoint)
        return endpoint

    def _fits(self, endpoint: Endpoint) -> None:
        """Raises ConfigError for an engine that cannot work with those that are here."""
        others = [e for e in self.driver.endpoints.values() if e.name != endpoint.name]
        check_pairs([*others, endpoint], self.settings.router.binding)

    async def remove_instance(self, name: str, timeout_s: float | None = None) -> bool:
        """Takes an engine out: nothing new is sent there, what runs there ends; True if all did in time."""
        return await asyncio.shield(self.membership.remove(name, timeout_s))

    async def reload(self, settings: GatewaySettings) -> list[str]:
        """Swaps instances, keys, caps and health settings while serving; returns what changes, in words.

        All of `settings` is checked first; on an error nothing has changed. Raises ConfigError, also for a change that
        needs a restart (listeners, router, data directory). Engines that leave, or are replaced by others of their
        name, drain in the background; streams go on.
        """
        try:
            words = self._swap(settings)
        except WeighbridgeError:
            self.stats.reloads.add(("refused",))
            raise
        self.stats.reloads.add(("ok",))
        return words

    def _swap(self, settings: GatewaySettings) -> list[str]:
        if self.draining:
            raise ConfigError("the gateway is shutting down; nothing is reloaded")
        fixed = [name for name in FIXED if getattr(settings, name) != getattr(self.settings, name)]
        if fixed:
            raise ConfigError(f"{', '.join(fixed)} cannot change while serving; restart", path=f"$.{fixed[0]}")
        check_names(settings.instances)
        check_keys(settings)
        old = {i.name: i for i in self.settings.instances}
        new = {i.name: i for i in settings.instances}
        for name in new:
            if name not in old and name in self.driver.endpoints:
                raise ConfigError(f"an instance named {name!r} exists already", path="$.instances")
        dialled = settings.client != self.settings.client
        here = self.driver.endpoints  # one that was removed by hand and still stands in the file comes back
        changed = [n for n, i in new.items() if old.get(n) != i or n not in here or (dialled and i.client is None)]
        fresh = [self.membership.endpoint(new[n], settings.client) for n in changed]
        words = [f"replaced {n}" if n in here else f"added {n}" for n in changed]
        others = [n for n in SWAPPED if getattr(settings, n) != getattr(self.settings, n)]
        gone = [n for n in old if n not in new and n in self.driver.endpoints]
        stay = [e for n, e in self.driver.endpoints.items() if n not in gone and n not in changed]
        check_pairs([*stay, *fresh], settings.router.binding)
        renewed = ["renewed the TLS certificate"] if self._tls is not None and self._tls.renew() else []
        self.settings = settings
        self.surface.apply(settings)
        if self.hub is not None:
            self.hub.apply()
        self.health.apply(settings.health)
        self.guard.bound_s = settings.max_loop_lag_s
        for name in gone:
            self.membership.remove(name)
        for endpoint in fresh:
            self.membership.put(endpoint)
        return [*words, *(f"removed {n}" for n in gone), *(f"changed {n}" for n in others), *renewed]

    async def drain(self, timeout_s: float | None = None, unready_s: float = 0.0) -> bool:
        """Readiness turns false first, then nothing new is accepted and running requests end; True if all did.

        Between the two, `unready_s` in which load balancers can notice: whoever still comes is served.
        """
        self.draining = True
        if unready_s > 0:
            await asyncio.sleep(unready_s)
        return await self.server.drain(self.settings.drain_s if timeout_s is None else timeout_s)

    async def stop(self) -> None:
        """Cuts what is still running and closes everything; safe to call twice."""
        self.draining = True
        if self.hub is not None:
            await self.hub.stop()
        await self.server.stop()
        await self.admin_server.stop()
        self.guard.stop()
        await self.discovery.stop()
        await self.membership.stop()
        await self.kv.stop()
        await self.health.stop()
        for endpoint in self.driver.endpoints.values():
            if endpoint.pool is not None:
                await endpoint.pool.close()
                endpoint.pool = None
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        self.driver.stop()
        if self.writer is not None:
            self.writer.close()
            self.writer = self.driver.writer = None
        if self.surface.access is not None:
            self.surface.access.close()
            self.surface.access = None
        if self.surface.tracer is not None:
            await asyncio.to_thread(self.surface.tracer.close)
            self.surface.tracer = None

    def _open_log(self, directory: Path) -> LogWriter:
        header = Header(
            source="gateway",
            router=msgspec.to_builtins(self.settings.router),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        try:
            return LogWriter(
                directory,
                header,
                max_bytes=self.settings.log_bytes,
                max_files=self.settings.log_files,
            )
        except OSError as error:
            raise ServiceError(f"the event log cannot be written to {directory}: {error.strerror}") from None

    def _open_access_log(self, directory: str) -> AccessLog:
        try:
            return AccessLog(
                Path(directory).expanduser(), max_bytes=self.settings.log_bytes, max_files=self.settings.log_files
            )
        except OSError as error:
            raise ServiceError(f"the access log cannot be written to {directory}: {error.strerror}") from None

    def _flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()
        if self.surface.access is not None:
            self.surface.access.flush()
        self.surface.forecasts.digest()
        self._memory.observe(self.server.buffered_bytes)
        self._flusher = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)


async def _bind(server: HttpServer, host: str, port: int, context: ssl.SSLContext | None) -> None:
    try:
        await server.start(host, port, ssl_context=context)
    except OSError as error:
        why = "is in use by another program" if error.errno == 98 or "in use" in str(error) else error.strerror
        raise ServiceError(f"port {port} on {host} {why}; choose another one") from None


def _admin_token(settings: GatewaySettings, environment: Mapping[str, str]) -> str | None:
    name = settings.admin_token_env
    if name is None:
        if settings.admin_host not in LOOPBACK:
            raise ConfigError(
                f"the admin listener on {settings.admin_host} needs a token; set admin_token_env", path="$.admin_host"
            )
        return None
    token = environment.get(name)
    if not token or len(token) < 16:
        raise ConfigError(f"environment variable {name} must hold at least 16 characters", path="$.admin_token_env")
    return token


def make_salt_key(settings: GatewaySettings, environment: Mapping[str, str]) -> bytes | None:
    """The secret that cache salts are made from; None where tenants are not kept apart. Raises ConfigError."""
    if not settings.keys or not settings.isolate_tenants:
        return None
    if settings.salt_env is None:
        return secrets.token_bytes(32)
    secret = environment.get(settings.salt_env)
    if not secret or len(secret) < 16:
        raise ConfigError(
            f"environment variable {settings.salt_env} must hold at least 16 characters", path="$.salt_env"
        )
    return secret.encode()
