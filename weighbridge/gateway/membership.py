"""Which engines belong to the fleet: added, taken out and replaced while requests run.

An engine that leaves is drained first: nothing new is sent there, and what runs there ends. Changes of one name follow
one another; where several are asked for while it drains, the last one holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from weighbridge.core.errors import ConfigError
from weighbridge.core.events import InstanceDown, InstanceGone
from weighbridge.gateway.driver import Driver
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.health import Health
from weighbridge.gateway.kv import KvIndex
from weighbridge.gateway.settings import InstanceSettings
from weighbridge.http import ClientLimits

log = logging.getLogger("weighbridge.gateway")


class Membership:
    """Owns joining and leaving. `drain_s` tells how long one that leaves may take."""

    def __init__(
        self, driver: Driver, health: Health, kv: KvIndex, environment: Mapping[str, str], drain_s: Callable[[], float]
    ) -> None:
        self._driver = driver
        self._health = health
        self._kv = kv
        self._environment = environment
        self._drain_s = drain_s
        self._wanted: dict[str, Endpoint | None] = {}
        self._leaving: dict[str, asyncio.Task[bool]] = {}
        self._tasks: set[asyncio.Task[bool]] = set()  # those that leave, and those whose connections are being closed

    def endpoint(self, settings: InstanceSettings, client: ClientLimits) -> Endpoint:
        """Checks the settings of an engine without adding it. Raises ConfigError or ProfileError."""
        return Endpoint(settings, client, self._environment)

    def put(self, endpoint: Endpoint) -> None:
        """Adds an engine, at once or, where its name is taken, as soon as the old one has drained."""
        if endpoint.name in self._driver.endpoints:
            self._leave(endpoint.name, endpoint)
        else:
            self._join(endpoint)

    def remove(self, name: str, timeout_s: float | None = None) -> asyncio.Task[bool]:
        """Takes an engine out; the task tells whether all that ran there ended in time. Raises KeyError."""
        if name not in self._driver.endpoints:
            raise KeyError(name)
        return self._leave(name, None, timeout_s)

    def has(self, name: str) -> bool:
        """Whether the name is in use, also by an engine that is leaving."""
        return name in self._driver.endpoints

    async def stop(self) -> None:
        """Gives up what is still draining."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _join(self, endpoint: Endpoint) -> None:
        known = self._driver.router.fleet.instances.get(endpoint.name)
        if known is not None:  # the name was used before: the Router must see a new life
            endpoint.generation = known.generation
        self._driver.endpoints[endpoint.name] = endpoint
        self._driver.fleet_version += 1
        self._health.add(endpoint, returning=known is not None)
        self._kv.add(endpoint)

    def _leave(self, name: str, successor: Endpoint | None, timeout_s: float | None = None) -> asyncio.Task[bool]:
        self._wanted[name] = successor
        task = self._leaving.get(name)
        if task is None:
            endpoint = self._driver.endpoints[name]
            self._health.drain(endpoint)  # at once: nothing more is sent there from here on
            endpoint.leaving = True
            limit_s = self._drain_s() if timeout_s is None else timeout_s
            task = asyncio.get_running_loop().create_task(self._take_out(name, limit_s))
            self._leaving[name] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return task

    async def _take_out(self, name: str, timeout_s: float) -> bool:
        endpoint = self._driver.endpoints[name]
        try:
            ended = await self._health.wait_idle(endpoint, timeout_s)
            if not ended:
                self._driver.feed(InstanceDown(instance=name, reason="removed"))
            await self._health.remove(endpoint)
            await self._kv.remove(endpoint)
            del self._driver.endpoints[name]
            self._driver.fleet_version += 1
            if self._wanted[name] is None:  # else its successor is its next life
                self._driver.feed(InstanceGone(instance=name))
        finally:
            del self._leaving[name]
            successor = self._wanted.pop(name)
        log.info("instance %s is removed%s", name, "" if ended else "; what still ran there was given up")
        if successor is not None:
            self._join(successor)  # in the same step: to clients its models are never unknown
        pool, endpoint.pool = endpoint.pool, None  # requests whose prompt it computed may still know it
        if pool is not None:
            await pool.close()
        return ended


def check_names(instances: tuple[InstanceSettings, ...]) -> None:
    """Raises ConfigError where two have one name."""
    seen: set[str] = set()
    for instance in instances:
        if instance.name in seen:
            raise ConfigError(f"two instances are named {instance.name!r}", path="$.instances")
        seen.add(instance.name)
