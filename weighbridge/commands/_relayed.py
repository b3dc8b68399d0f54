"""`serve` with relay processes: this process owns engines, the Router's process and the relays, and no connections.

It restarts what dies. What it is told by signals it passes on: draining (readiness first), ending, reloading.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

import msgspec

from weighbridge.commands._private_folder import PrivateFolder
from weighbridge.commands._serving import READY_TIMEOUT_S, Serving
from weighbridge.core.errors import ConfigError, ServiceError
from weighbridge.gateway.gateway import make_salt_key
from weighbridge.gateway.relays.options import RelayOptions, RouterOptions
from weighbridge.gateway.relays.worker import Order, Word, Worker
from weighbridge.gateway.settings import GatewaySettings

RELOAD_S = 15.0
FLEET_S = READY_TIMEOUT_S + 5.0
RELAY_SILENT_S = 15.0
"""A relay that stands still for so long is killed, and its streams with it: more than any disk or reload may take."""


class RelayedServing(Serving):
    """The same as `Serving` to its caller."""

    _router: Worker | None = None
    _port = 0
    _admin_port = 0

    def _prepare(self) -> None:
        self._start_clock_s = time.monotonic()
        self._relays: list[Worker] = []
        self._folder = PrivateFolder()
        self._socket = self._folder.path / "router.sock"
        self._fleet: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._reloaded: asyncio.Future[list[str]] | None = None
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether requests may be running; the relays know."""
        return self._router is not None

    @property
    def admin_port(self) -> int:
        """The bound port of the admin listener."""
        return self._admin_port

    async def _open(self) -> None:
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError("this system cannot share a port between processes; use 0", path="$.relays")
        self._prepare()
        salt = make_salt_key(self._gateway_settings(self.settings), os.environ)
        self._salt = "" if salt is None else salt.hex()
        self._reserved = _reserve(self.settings.host, self.settings.port)
        self._port = self._reserved.getsockname()[1]
        self._admin_port = self.settings.admin_port
        self._accepted = self._bound(self._gateway_settings(self.settings))
        module, silent_s = "weighbridge.commands._router_process", self._accepted.router_wait_s
        router = Worker("the Router", module, self._router_options, self._heard, silent_s)
        await router.start()
        self._router = router
        self._admin_port = int(msgspec.json.decode(router.ready, type=dict[str, int])["admin_port"])
        self._accepted = self._bound(self._gateway_settings(self.settings))  # a new Router keeps the ports
        for number in range(1, self.settings.relays + 1):
            first = msgspec.json.encode(
                RelayOptions(
                    number=number,
                    socket=str(self._socket),
                    host=self.settings.host,
                    port=self._port,
                    start_s=self._start_clock_s,
                    salt=self._salt,
                )
            )
            name, module = f"relay {number}", "weighbridge.commands._relay_process"
            words = (name, module, lambda first=first: first, self._heard)
            self._relays.append(Worker(*words, RELAY_SILENT_S))
        await asyncio.gather(*(relay.start() for relay in self._relays))
        async with asyncio.timeout(FLEET_S):
            await self._fleet

    def _router_options(self) -> bytes:
        options = RouterOptions(
            settings=self._accepted,
            socket=str(self._socket),
            start_s=self._start_clock_s,
            wait_for=[info.name for info in self._engines],
            ready_s=READY_TIMEOUT_S,
        )
        value = msgspec.to_builtins(options)
        reprobe = self.settings.reprobe
        return msgspec.json.encode({**value, "reprobe": None if reprobe is None else msgspec.to_builtins(reprobe)})

    def _bound(self, settings: GatewaySettings) -> GatewaySettings:
        """With the ports that were taken in place of "a free one"."""
        ours = self.settings
        return msgspec.structs.replace(
            settings,
            port=self._port if settings.port == ours.port else settings.port,
            admin_port=self._admin_port if settings.admin_port == ours.admin_port else settings.admin_port,
        )

    def _heard(self, word: Word) -> None:
        if word.fleet and not self._fleet.done():
            self._fleet.set_result(msgspec.json.decode(word.fleet))
        if word.reload:
            task = asyncio.get_running_loop().create_task(self._reload_quietly())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        waiting = self._reloaded
        if waiting is not None and not waiting.done():
            if word.reloaded is not None:
                waiting.set_result(word.reloaded)
            elif word.refused is not None:
                waiting.set_exception(ConfigError(word.refused))

    async def _reload_quietly(self) -> None:
        """Asked for through the admin listener, which answers with what comes of it."""
        try:
            await self.reload()
        except ConfigError:
            return

    async def reload(self) -> list[str]:
        """Read the file again and have the Router's process swap what can be swapped. Raises ConfigError."""
        router = self._router
        if router is None:
            raise ConfigError("it has not started yet")
        async with self._reloading:
            try:
                settings = self._read_again()
            except ConfigError as error:
                router.tell(Order(refused=str(error)))
                raise
            accepted = self._bound(self._gateway_settings(settings))
            self._reloaded = asyncio.get_running_loop().create_future()
            router.tell(Order(settings=msgspec.Raw(msgspec.json.encode(accepted))))
            try:
                async with asyncio.timeout(RELOAD_S):
                    words = await self._reloaded
            except TimeoutError:
                raise ConfigError("the Router did not answer; try again") from None
            finally:
                self._reloaded = None
            self.settings, self._accepted = settings, accepted
            router.patience.silent_s = accepted.router_wait_s
            return words

    async def drain(self, announced: bool = False) -> None:
        """Readiness turns false everywhere, then relays take nothing new and let what runs end."""
        if self._router is None:
            return
        for worker in (self._router, *self._relays):
            worker.tell(Order(unready=True))
        if announced and self.settings.unready_s > 0:
            await asyncio.sleep(self.settings.unready_s)
        for relay in self._relays:
            relay.expect_end()
            relay.tell(Order(drain_s=self.settings.drain_s))
        await asyncio.gather(*(relay.wait() for relay in self._relays))

    async def _close(self) -> None:
        if not hasattr(self, "_folder"):
            return
        await asyncio.gather(*(relay.stop() for relay in self._relays))
        if self._router is not None:
            await self._router.stop()
        for task in self._tasks:
            task.cancel()
        if hasattr(self, "_reserved"):
            self._reserved.close()
        self._folder.close()

    def ready(self) -> dict[str, Any]:
        """What a caller needs to use it, and the process ids of Router and relays."""
        if self._router is None:
            raise ServiceError("not started")
        pids = {"router_pid": self._router.pid, "relay_pids": [relay.pid for relay in self._relays]}
        return self._ready(self._port, self._admin_port, self._fleet.result()) | pids


def _reserve(host: str, port: int) -> socket.socket:
    """A socket that holds the port for the relays and never listens; connections go to those that do."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise ServiceError(f"{host}:{port} cannot be listened on ({error.strerror})") from None
    return reserved
