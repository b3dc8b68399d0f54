"""Where relays meet the Router: a Unix socket, one line per relay, and what is counted over all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from prometheus_client.core import Metric

from weighbridge.core.errors import ServiceError
from weighbridge.core.request import Request
from weighbridge.gateway.auth import Principal
from weighbridge.gateway.relays.line import Line
from weighbridge.gateway.relays.wire import Beat, Engine, Roster, Tally, Welcome
from weighbridge.gateway.stats import gauge

if TYPE_CHECKING:
    from weighbridge.gateway.gateway import Gateway

log = logging.getLogger("weighbridge.gateway.relays")
LOOK_S = 0.1
BEAT_LOOKS = 10  # looks between two beats: a beat a second


class Totals:
    """Sums over all relays, those that are gone included."""

    def __init__(self) -> None:
        self.refusals = self.retries = self.retries_refused = self.lines_dropped = self.ends_forgotten = 0
        self.lost = 0
        """Relays whose connection broke."""

    def add(self, tally: Tally) -> None:
        """What one relay has counted since it last told."""
        self.refusals += tally.refusals
        self.retries += tally.retries
        self.retries_refused += tally.retries_refused
        self.lines_dropped += tally.lines_dropped
        self.ends_forgotten += tally.ends_forgotten


class Hub:
    """`listen`, then `stop`. Belongs to a gateway that has no OpenAI listener of its own."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.quotas = gateway.surface.quotas
        self.totals = Totals()
        self.lines: dict[int, Line] = {}
        self._open: set[Line] = set()
        self._stopped = False
        self._principals: dict[str, Principal] = {}
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self.apply()

    def apply(self) -> None:
        """Takes over the gateway's settings, and tells every relay."""
        settings = self.gateway.settings
        self._principals = {key.sha256: Principal(key.tenant, key=key) for key in settings.keys}
        for line in self.lines.values():
            line.send(Welcome(settings))

    async def listen(self, path: Path) -> None:
        """Takes relays from now on; a socket left by a Router that died is replaced. Raises ServiceError."""
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: cast(asyncio.Protocol, Line(self)), str(path)
            )
        except OSError as error:
            raise ServiceError(f"the relays' socket {path} cannot be made: {error.strerror}") from None
        self._look()

    async def stop(self) -> None:
        """Cuts all relays off."""
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        self._stopped = True
        for line in list(self._open):
            line.cut()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def opened(self, line: Line) -> None:
        """A relay has connected and not yet said which it is."""
        self._open.add(line)
        if self._stopped:
            line.cut()

    def joined(self, line: Line) -> None:
        """A relay has said which it is. One of the same number that was here before is gone, seen or not."""
        old = self.lines.get(line.relay)
        self.lines[line.relay] = line
        if old is not None:
            old.cut()
        line.send(Welcome(self.gateway.settings))

    def left(self, line: Line) -> None:
        """A relay's connection has ended."""
        self._open.discard(line)
        if self.lines.get(line.relay) is line:
            del self.lines[line.relay]
            self.totals.lost += 1

    def charge(self, key: str, request: Request) -> None:
        """Charges a request to its key's quota. Raises RequestError (429)."""
        principal = self._principals.get(key)
        if principal is not None:
            self.quotas.charge(principal, request, self.gateway.driver.now())

    def roster(self) -> Roster:
        """All engines as they are now."""
        endpoints = self.gateway.driver.endpoints.values()
        return Roster(tuple(Engine(e.settings, e.facts, e.up, e.generation, e.ranks) for e in endpoints))

    @property
    def lag_s(self) -> float:
        """The event loop lag of the latest relay."""
        return max((line.lag_s for line in self.lines.values()), default=0.0)

    def collect(self) -> Iterator[Metric]:
        """Prometheus families of the relays themselves."""
        lines = sorted(self.lines.items())
        one = ("relay",)
        expected = range(1, self.gateway.settings.relays + 1)
        up = [((str(n),), float(n in self.lines)) for n in expected]
        yield gauge("weighbridge_relay_up", "1 if the relay process is connected.", one, up)
        lag = [((str(n),), line.lag_s) for n, line in lines]
        yield gauge("weighbridge_relay_event_loop_lag_seconds", "How late a relay's loop is, smoothed.", one, lag)
        rows = [((str(n),), float(line.connections)) for n, line in lines]
        yield gauge("weighbridge_relay_connections", "Clients' connections.", one, rows)
        pids = [((str(n),), float(line.pid)) for n, line in lines]
        yield gauge("weighbridge_relay_pid", "Process id of a relay.", one, pids)
        lost = [((), float(self.totals.lost))]
        yield gauge("weighbridge_relays_lost", "Connections to relays that ended.", (), lost)
        forgotten = [((), float(self.totals.ends_forgotten))]
        yield gauge("weighbridge_relay_ends_forgotten", "Ends without a Router that no log will tell.", (), forgotten)

    def _look(self) -> None:
        self._looks += 1
        version = self.gateway.driver.fleet_version
        beat = self._looks % BEAT_LOOKS == 0
        for line in self.lines.values():
            if beat:
                line.send(Beat())
            elif line.known_fleet != version:
                line.flush()
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
