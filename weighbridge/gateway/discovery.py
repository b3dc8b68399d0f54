"""Engines that are found, not listed: a DNS name with one address per engine, or a file that others write.

Each source is looked at again and again. What it names joins, what it no longer names drains and leaves; while it
cannot be read nothing changes. Engines that stand in the configuration, or came from elsewhere, are not touched.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from weighbridge.core.errors import ConfigError, ProfileError
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.membership import Membership, check_names
from weighbridge.gateway.settings import DnsSource, FileSource, InstanceSettings, Source
from weighbridge.http import ClientLimits

log = logging.getLogger("weighbridge.gateway.discovery")
MAX_FILE_BYTES = 1 << 20
MAX_FOUND = 1024
MISSES = 2  # looks in a row that do not name an engine before it leaves
Found = Annotated[tuple[InstanceSettings, ...], msgspec.Meta(max_length=MAX_FOUND)]
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a name. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for _, _, _, _, address in found})


def dns_instance(source: DnsSource, address: str) -> InstanceSettings:
    """The settings of the engine at one address. Raises ConfigError where `instance` does not fit."""
    name = f"{source.prefix or source.host.partition('.')[0]}-{re.sub('[^0-9A-Za-z]', '-', address)}"
    host = f"[{address}]" if ":" in address else address
    fields: dict[str, Any] = {**source.instance, "name": name, "url": f"http://{host}:{source.port}"}
    try:
        return msgspec.convert(fields, InstanceSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"discovery of {source.host}: {error}") from None


def read_file(path: str) -> tuple[InstanceSettings, ...]:
    """A YAML or JSON list of instances. Raises OSError or ConfigError."""
    data = Path(path).read_bytes()
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        found: tuple[InstanceSettings, ...] = msgspec.yaml.decode(data, type=Found)
    except (msgspec.DecodeError, UnicodeDecodeError, ImportError) as error:
        raise ConfigError(f"{path}: {error}") from None
    check_names(found)
    return found


class Discovery:
    """Keeps the fleet in step with its sources."""

    def __init__(
        self,
        sources: tuple[Source, ...],
        membership: Membership,
        client: ClientLimits,
        resolver: Resolve = resolve,
        check: Callable[[Endpoint], None] = lambda endpoint: None,
    ) -> None:
        """`check` raises ConfigError for an engine that does not fit the fleet; so does this for a wrong `instance`."""
        self._check = check
        for source in sources:
            if isinstance(source, DnsSource):
                membership.endpoint(dns_instance(source, "192.0.2.1"), client)
        self._sources = sources
        self._membership = membership
        self._client = client
        self._resolve = resolver
        self._tasks: list[asyncio.Task[None]] = []
        self.owned: list[dict[str, InstanceSettings]] = [{} for _ in sources]
        self._problems: list[dict[str, str]] = [{} for _ in sources]
        self._missed: dict[str, int] = {}

    @property
    def errors(self) -> dict[str, str]:
        """What could not be read or added at the last look, by source or engine; empty while all is well."""
        return {label: problem for problems in self._problems for label, problem in problems.items()}

    def start(self) -> None:
        """Begins to look."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(n, s)) for n, s in enumerate(self._sources)]

    async def stop(self) -> None:
        """Ends looking; engines that were found stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def look(self, number: int) -> None:
        """One look at a source, and what follows from it."""
        source = self._sources[number]
        label = source.path if isinstance(source, FileSource) else source.host
        try:
            if isinstance(source, FileSource):
                found = await asyncio.to_thread(read_file, source.path)
            else:
                addresses = await self._resolve(source.host, source.port)
                found = tuple(dns_instance(source, a) for a in addresses[:MAX_FOUND])
        except (OSError, ConfigError) as error:
            self._report(number, {label: str(error)})
            return
        patient = isinstance(source, DnsSource)
        self._report(number, self._apply(self.owned[number], {i.name: i for i in found}, patient))

    async def _watch(self, number: int, source: Source) -> None:
        while True:
            try:
                await self.look(number)
            except Exception:  # a surprise in one look must not end the watch
                log.exception("discovery failed")
            await asyncio.sleep(source.every_s)

    def _apply(
        self, owned: dict[str, InstanceSettings], found: dict[str, InstanceSettings], patient: bool
    ) -> dict[str, str]:
        """Makes the fleet what was found; returns what could not be done."""
        problems = {}
        for name in [n for n in owned if n not in found]:
            # a DNS server may leave out an address once
            self._missed[name] = self._missed.get(name, 0) + 1
            if self._missed[name] < MISSES and patient:
                continue
            del owned[name], self._missed[name]
            if self._membership.has(name):
                self._membership.remove(name)
        for name, settings in found.items():
            self._missed.pop(name, None)
            if owned.get(name) == settings:
                continue
            if name not in owned and self._membership.has(name):
                problems[name] = "its name is in use already"
                continue
            try:
                endpoint = self._membership.endpoint(settings, self._client)
                self._check(endpoint)
                self._membership.put(endpoint)
            except (ConfigError, ProfileError) as error:
                problems[name] = str(error)
                continue
            owned[name] = settings
        return problems

    def _report(self, number: int, problems: dict[str, str]) -> None:
        """Logs a problem when it appears or changes, not at each look."""
        for label, problem in problems.items():
            if self._problems[number].get(label) != problem:
                log.warning("discovery: %s: %s", label, problem)
        self._problems[number] = problems
