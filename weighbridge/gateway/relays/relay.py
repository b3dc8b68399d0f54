"""A relay: one of several listeners on one address, with everything that is done per byte, and no Router."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.core.errors import ServiceError, WeighbridgeError
from weighbridge.gateway.access_log import AccessLog
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.listener_tls import ListenerTls
from weighbridge.gateway.loop_guard import LoopGuard
from weighbridge.gateway.memory_return import MemoryReturn, glibc_trim
from weighbridge.gateway.relays.desk import RelayDesk
from weighbridge.gateway.relays.link import Link
from weighbridge.gateway.relays.options import RelayOptions
from weighbridge.gateway.relays.parts import RelayAnswers, RelaySignals
from weighbridge.gateway.relays.tally import take
from weighbridge.gateway.relays.wire import Act, Beat, Engine, Hello, Refused, Roster, Stop, Taken, Tally, Welcome
from weighbridge.gateway.settings import GatewaySettings
from weighbridge.gateway.stats import Stats
from weighbridge.gateway.surface import Surface
from weighbridge.gateway.tracing import Tracer
from weighbridge.http import HttpServer, Pool, Request, Responder

log = logging.getLogger("weighbridge.gateway.relays")
FLUSH_S = 0.25
ROUTER_S = 30.0  # for the first Router to answer
GROWING = ("refusals", "retries", "retries_refused", "lines_dropped", "ends_forgotten")


class Relay:
    """`start`, serve, `drain`, `stop`."""

    def __init__(self, options: RelayOptions, environment: Mapping[str, str] | None = None) -> None:
        self.options = options
        self.stats = Stats()
        self.draining = False
        self._environment = os.environ if environment is None else environment
        self.link = Link(Path(options.socket), self._open, self._message, self._lost, self._full)
        self.desk = RelayDesk(self.stats, options.start_s, self.link)
        self.surface: Surface | None = None
        self.server: HttpServer | None = None
        self.guard = LoopGuard(1.0)
        self._settings: GatewaySettings | None = None
        self._tls: ListenerTls | None = None
        self._retired: list[tuple[Endpoint, Pool]] = []
        self._welcome = asyncio.Event()
        self._lost_s = 0.0
        self._silent = False
        self._told = Tally([])
        self._memory = MemoryReturn(glibc_trim())
        self._flusher: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Any] = {
            Act: lambda m: self.desk.act(m.action),
            Stop: self.desk.stop,
            Refused: self.desk.refuse,
            Taken: self.desk.rename,
            Roster: self._roster,
            Welcome: self._welcomed,
            Beat: lambda m: None,
        }

    async def start(self) -> None:
        """Connects to the Router's process and binds the listener. Raises ServiceError."""
        self.link.start()
        try:
            async with asyncio.timeout(ROUTER_S):
                await self._welcome.wait()
        except TimeoutError:
            raise ServiceError(f"no Router at {self.options.socket}") from None
        assert self.server is not None
        context = self._tls.context if self._tls is not None else None
        options = self.options
        try:
            await self.server.start(options.host, options.port, ssl_context=context, reuse_port=True)
        except OSError as error:
            raise ServiceError(f"{options.host}:{options.port} cannot be listened on: {error.strerror}") from None
        self.guard.start()
        self._flush()

    async def drain(self, timeout_s: float) -> bool:
        """Accepts nothing more and lets what runs end; True if all did."""
        self.draining = True
        return self.server is None or await self.server.drain(timeout_s)

    async def stop(self) -> None:
        """Cuts what is still running, tells the last counts and closes everything."""
        self.draining = True
        if self.server is not None:
            await self.server.stop()
        self.guard.stop()
        if self._flusher is not None:
            self._flusher.cancel()
        self._tell()
        for endpoint in self.desk.endpoints.values():
            if endpoint.pool is not None:
                await endpoint.pool.close()
        surface = self.surface
        if surface is not None and surface.access is not None:
            surface.access.close()
            surface.access = None
        if surface is not None and surface.tracer is not None:
            await asyncio.to_thread(surface.tracer.close)
            surface.tracer = None
        await self.link.stop()

    # the link

    def _open(self) -> None:
        self.link.send(Hello(self.options.number, os.getpid()))

    def _message(self, message: Any) -> None:
        try:
            self._handlers[type(message)](message)
        except Exception:  # what goes wrong with one request must not end the others
            log.exception("relay %d could not do as it was told", self.options.number)
            if isinstance(message, Act):
                self.desk.break_off(message.action.request_id)

    def _lost(self) -> None:
        if self.desk.connected:
            self._lost_s = time.monotonic() if not self._silent else 0.0  # its silence was time enough
            self._silent = False
            log.warning("relay %d has lost the Router; streams go on", self.options.number)
        self.desk.lost()

    def _full(self, full: bool) -> None:
        self.desk.full = full

    def _welcomed(self, message: Welcome) -> None:
        settings = message.settings
        first = self._settings is None
        self._settings = settings
        self.guard.bound_s = settings.max_loop_lag_s
        if first:
            self._build(settings)
            self._welcome.set()
        else:
            assert self.surface is not None
            self.surface.apply(settings)
            if self._tls is not None:
                try:
                    self._tls.renew()
                except WeighbridgeError as error:
                    log.error("relay %d keeps its certificate: %s", self.options.number, error)

    def _build(self, settings: GatewaySettings) -> None:
        salt = bytes.fromhex(self.options.salt) or None
        surface = Surface(settings, self.desk, RelaySignals(self._tell_one), self.stats, salt, self.guard)
        surface.quotas = self.desk.quotas
        surface.routes.get("/readyz", self._ready)
        if settings.tracing is not None:
            surface.tracer = Tracer(settings.tracing)
        if settings.access_log is not None:
            folder = Path(settings.access_log).expanduser()
            prefix = f"access-relay{self.options.number}"
            surface.access = AccessLog(
                folder, max_bytes=settings.log_bytes, max_files=settings.log_files, prefix=prefix
            )
        if settings.tls_cert is not None:
            self._tls = ListenerTls(settings.tls_cert, settings.tls_key)
        self.surface = surface
        self.server = HttpServer(surface.routes, settings.server, surface.admit)

    def _tell_one(self, message: Any) -> None:
        if self.desk.connected:
            self.link.post(message)

    # the fleet

    def _roster(self, message: Roster) -> None:
        settings = self._settings
        assert settings is not None
        endpoints = self.desk.endpoints
        for name in set(endpoints) - {engine.settings.name for engine in message.engines}:
            self._retire(endpoints.pop(name))
        for engine in message.engines:
            try:
                self._place(engine, settings)
            except WeighbridgeError as error:  # a file that was there when the Router's process read it
                log.error("relay %d cannot use instance %s: %s", self.options.number, engine.settings.name, error)
        if not self.desk.connected:
            self.desk.resume()

    def _place(self, engine: Engine, settings: GatewaySettings) -> None:
        name = engine.settings.name
        endpoint = self.desk.endpoints.get(name)
        limits = engine.settings.client or settings.client
        if endpoint is None or endpoint.settings != engine.settings or endpoint.limits != limits:
            fresh = Endpoint(engine.settings, settings.client, self._environment)
            if endpoint is not None:
                self._retire(endpoint)
            if engine.settings.kv_events is not None:
                fresh.kv = RelayAnswers(name, self._tell_one)
            self.desk.endpoints[name] = endpoint = fresh
        if endpoint.facts != engine.facts:
            endpoint.facts = engine.facts
        endpoint.up, endpoint.generation, endpoint.ranks = engine.up, engine.generation, engine.ranks

    def _retire(self, endpoint: Endpoint) -> None:
        """An engine that is here no more keeps its connections until what runs over them has ended."""
        if endpoint.pool is not None:
            self._retired.append((endpoint, endpoint.pool))

    # now and then

    def _ready(self, request: Request, responder: Responder) -> None:
        if self.draining:
            responder.send(503, b"draining", content_type="text/plain")
        elif self.desk.gave_up:
            responder.send(503, b"no router", content_type="text/plain")
        elif any(e.up for e in self.desk.endpoints.values()):
            responder.send(200, b"ready", content_type="text/plain")
        else:
            responder.send(503, b"no instance is up", content_type="text/plain")

    def _flush(self) -> None:
        settings, server, surface = self._settings, self.server, self.surface
        assert settings is not None
        assert server is not None
        assert surface is not None
        loop = asyncio.get_running_loop()
        if surface.access is not None:
            surface.access.flush()
        if self.desk.connected:
            self._tell()
            if loop.time() - self.link.heard_s > settings.router_wait_s:
                log.error("relay %d has heard nothing from the Router; it connects again", self.options.number)
                self._silent = True
                self.link.cut()
        elif not self.desk.gave_up and time.monotonic() - self._lost_s > settings.router_wait_s:
            log.error("relay %d has no Router; requests are refused until there is one", self.options.number)
            self.desk.give_up()
        self._memory.observe(server.buffered_bytes)
        if self._retired:
            idle = [(e, p) for e, p in self._retired if not e.running]
            self._retired = [(e, p) for e, p in self._retired if e.running]
            for endpoint, pool in idle:
                endpoint.pool = None
                loop.create_task(pool.close())  # noqa: RUF006 - closing needs nobody to wait for it
        self._flusher = loop.call_later(FLUSH_S, self._flush)

    def _tell(self) -> None:
        """Sends what was counted since the last time; kept while there is no Router."""
        surface, server = self.surface, self.server
        if surface is None or server is None or not self.desk.connected:
            return
        now = Tally(
            take(self.stats),
            refusals=server.refusals,
            retries=surface.budget.spent,
            retries_refused=surface.budget.refused,
            lines_dropped=0 if surface.access is None else surface.access.writer.dropped,
            ends_forgotten=self.desk.ends_forgotten,
            lag_s=self.guard.lag_s,
            connections=len(server.connections),
        )
        grown = {name: getattr(now, name) - getattr(self._told, name) for name in GROWING}
        self._told = now
        self.link.post(msgspec.structs.replace(now, **grown))
