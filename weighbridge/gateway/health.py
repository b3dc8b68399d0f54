"""Which engines are well: active probes with hysteresis, and the signals of real requests.

An engine that answers no probe leaves the choice (its running requests go on); one that refuses connections leaves at
once; one whose real requests fail in a row is ejected for a while, whatever its probe says, unless too few would
remain.
A restart is a new generation: its cache is empty and none of its old requests live. An instance that joins or returns
while others serve is given few requests at once at first, then twice as many, and so on (slow start).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

import msgspec

from weighbridge.core.events import InstanceDown, InstanceReported, InstanceUp
from weighbridge.gateway.adapters import Report
from weighbridge.gateway.driver import Driver
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.pairs import bootstrap_url, told_ranks
from weighbridge.gateway.settings import HealthSettings
from weighbridge.gateway.slow_start import warm_limit
from weighbridge.http import ClientLimits, ConnectFailed, ExchangeFailed, HttpClient
from weighbridge.http.client import Reply
from weighbridge.routing.candidates import can_serve

log = logging.getLogger("weighbridge.gateway.health")
# The engine said no, or is full: no sign that it is ill.
NEUTRAL = frozenset({"status_429", "status_503", "pool was closed"})
RESTART_SLACK_S = 1.5


class _State:
    """What is known of one engine's health."""

    __slots__ = (
        *("bad", "connect_failures", "down_since_s", "ejections", "faults", "good", "refused", "task", "until_s"),
        "warm_since_s",
    )

    def __init__(self) -> None:
        self.good = 0
        self.bad = 0
        self.faults = 0
        self.connect_failures = 0
        self.refused = False  # no process listened since it was last up
        self.ejections = 0
        self.until_s = 0.0
        self.warm_since_s: float | None = None  # up since, while in slow start
        self.down_since_s: float | None = None
        self.task: asyncio.Task[None] | None = None


class Health:
    """Probes all engines and tells the Router who is up."""

    def __init__(self, driver: Driver, settings: HealthSettings) -> None:
        self._driver = driver
        self._settings = settings
        self._states: dict[str, _State] = {}
        self._clients: dict[str, HttpClient] = {}
        self._changed = asyncio.Event()
        self._begun_s = 0.0

    def start(self) -> None:
        """Begins probing every engine of the driver."""
        self._begun_s = self._driver.now()
        for endpoint in self._driver.endpoints.values():
            self.add(endpoint)

    def apply(self, settings: HealthSettings) -> None:
        """Takes over reloaded settings."""
        self._settings = settings

    def add(self, endpoint: Endpoint, *, returning: bool = False) -> None:
        """Begins probing one engine. `returning`: its name was used before, so its first life here is a new one."""
        limits = ClientLimits(connect_s=self._settings.timeout_s, idle_s=2.0)
        self._clients[endpoint.name] = HttpClient(limits, endpoint.ssl_context)
        state = self._states[endpoint.name] = _State()
        state.refused = returning
        state.task = asyncio.get_running_loop().create_task(self._watch(endpoint, state))

    async def remove(self, endpoint: Endpoint) -> None:
        """Ends probing one engine."""
        state = self._states.pop(endpoint.name)
        if state.task is not None:
            state.task.cancel()
            await asyncio.gather(state.task, return_exceptions=True)
        await self._clients.pop(endpoint.name).close()

    async def stop(self) -> None:
        """Ends all probing."""
        for name in list(self._states):
            await self.remove(self._driver.endpoints[name])

    async def wait_ready(self, timeout_s: float, names: Collection[str] = ()) -> bool:
        """True as soon as one engine is up, or all of `names` where some are given; False after `timeout_s`."""
        endpoints = self._driver.endpoints
        try:
            async with asyncio.timeout(timeout_s):
                while not (all(endpoints[n].up for n in names) if names else any(e.up for e in endpoints.values())):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_idle(self, endpoint: Endpoint, timeout_s: float) -> bool:
        """True once nothing runs on an engine, False after `timeout_s`."""
        limit = time.monotonic() + timeout_s
        while endpoint.running and time.monotonic() < limit:  # noqa: ASYNC110 - counted in many places, waited for here
            await asyncio.sleep(0.02)
        return not endpoint.running

    # probes

    async def _watch(self, endpoint: Endpoint, state: _State) -> None:
        while True:
            settings = self._settings
            try:
                await self._look(endpoint, state)
            except asyncio.CancelledError:
                raise
            except Exception:  # a surprise in one engine's reply must not end its watch
                log.exception("probe of %s failed", endpoint.name)
                self._probed(endpoint, state, False, "probe failed")
            quick = not endpoint.up and not endpoint.draining
            await asyncio.sleep(min(settings.interval_s, 0.3) if quick else settings.interval_s)

    async def _look(self, endpoint: Endpoint, state: _State) -> None:
        adapter = endpoint.adapter
        try:
            reply = await self._get(endpoint, adapter.health_path)
        except ExchangeFailed as error:
            if isinstance(error, ConnectFailed) and "refused" in str(error):
                state.refused = True
            self._probed(endpoint, state, False, str(error))
            return
        if reply.status >= adapter.alive_below:
            self._probed(endpoint, state, False, f"its health check says {reply.status}")
            return
        if endpoint.facts is None or not endpoint.up:
            await self._learn(endpoint)
        started_s = await self._report(endpoint)
        if self._restarted(endpoint, started_s):
            state.refused = True
            if endpoint.up:
                self._up(endpoint, state)
        self._probed(endpoint, state, True, "")
        if state.warm_since_s is not None:
            self._warm(endpoint, state)

    async def _learn(self, endpoint: Endpoint) -> None:
        replies = await self._get_all(endpoint, endpoint.adapter.facts_paths)
        known = endpoint.facts, endpoint.ranks
        endpoint.facts = endpoint.adapter.facts(replies)
        if endpoint.transfer == "mooncake" and endpoint.settings.role == "prefill":
            endpoint.ranks = await self._ranks(endpoint)
        if known != (endpoint.facts, endpoint.ranks):
            self._driver.fleet_version += 1

    async def _ranks(self, endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
        """The engine ids that a Mooncake prefill engine's bootstrap server tells; none while it does not answer."""
        url = f"{bootstrap_url(endpoint)}/query"
        try:
            reply = await self._clients[endpoint.name].request("GET", url, timeout_s=self._settings.timeout_s)
            ranks = told_ranks(reply.json()) if reply.status == 200 else ()
        except (ExchangeFailed, msgspec.DecodeError):
            ranks = ()
        if not ranks:
            log.warning("instance %s: its Mooncake bootstrap server at %s tells no engine id", endpoint.name, url)
        return ranks

    async def _report(self, endpoint: Endpoint) -> float | None:
        adapter = endpoint.adapter
        if not adapter.report_paths:
            return None
        sampled_s = self._driver.now()
        report: Report | None = adapter.report(await self._get_all(endpoint, adapter.report_paths))
        if report is None:
            return None
        endpoint.report, endpoint.report_s = report.load, sampled_s
        if endpoint.up:
            event = InstanceReported(
                instance=endpoint.name, generation=endpoint.generation, sampled_s=sampled_s, report=report.load
            )
            self._driver.feed(event)
        return report.started_s

    async def _get_all(self, endpoint: Endpoint, paths: tuple[str, ...]) -> dict[str, Reply]:
        replies = {}
        for path in paths:
            try:
                replies[path] = await self._get(endpoint, path)
            except ExchangeFailed:
                continue
        return replies

    async def _get(self, endpoint: Endpoint, path: str) -> Reply:
        origin = endpoint.origin
        url = f"{origin.scheme}://{origin.authority}{origin.path(path)}"
        client = self._clients[endpoint.name]
        return await client.request("GET", url, headers=endpoint.probe_headers(), timeout_s=self._settings.timeout_s)

    @staticmethod
    def _restarted(endpoint: Endpoint, started_s: float | None) -> bool:
        known, endpoint.started_s = endpoint.started_s, started_s if started_s is not None else endpoint.started_s
        return known is not None and started_s is not None and abs(started_s - known) > RESTART_SLACK_S

    def _probed(self, endpoint: Endpoint, state: _State, good: bool, reason: str) -> None:
        now = time.monotonic()
        if good:
            state.good, state.bad = state.good + 1, 0
            first = endpoint.generation == 0
            steady = (first or state.good >= self._settings.rise) and now >= state.until_s
            if steady and not endpoint.up and not endpoint.draining:
                self._up(endpoint, state)
            return
        state.good, state.bad = 0, state.bad + 1
        if endpoint.up and state.bad >= self._settings.fall:
            self._down(endpoint, state, reason)
        elif not endpoint.up and endpoint.generation == 0:
            endpoint.reason = reason
        dead = state.down_since_s is not None and now - state.down_since_s > self._settings.dead_s
        if dead and endpoint.running:
            self._driver.feed(InstanceDown(instance=endpoint.name, reason="dead"))

    # signals of real requests

    def connect_failed(self, endpoint: Endpoint) -> None:
        """A request found nobody listening."""
        state = self._states.get(endpoint.name)
        if state is None:
            return
        state.connect_failures += 1
        if endpoint.up and state.connect_failures >= self._settings.connect_failures:
            state.refused = True
            self._down(endpoint, state, "refuses connections")

    def request_failed(self, endpoint: Endpoint, reason: str) -> None:
        """A request's attempt failed for the engine's fault."""
        state = self._states.get(endpoint.name)
        if state is None or reason in NEUTRAL:
            return
        state.faults += 1
        if endpoint.up and state.faults >= self._settings.eject_failures and self._may_eject(endpoint):
            state.ejections += 1
            wait_s = min(self._settings.eject_s * state.ejections, self._settings.eject_max_s)
            state.until_s = time.monotonic() + wait_s
            self._down(endpoint, state, f"{self._settings.eject_failures} requests failed in a row")

    def request_succeeded(self, endpoint: Endpoint) -> None:
        """A request went well."""
        state = self._states.get(endpoint.name)
        if state is not None:
            state.faults = state.connect_failures = 0
            state.ejections = max(0, state.ejections - 1)

    def _may_eject(self, endpoint: Endpoint) -> bool:
        """Never the last one or last pair of a model, nor more than the configured share of its instances."""
        mates = [e for e in self._driver.endpoints.values() if set(e.models) & set(endpoint.models)]
        left = [e.spec for e in mates if e.up and e is not endpoint]
        out = len(mates) - len(left)
        return can_serve(left) and out <= self._settings.eject_share * len(mates)

    # the Router is told

    def _up(self, endpoint: Endpoint, state: _State) -> None:
        fresh = endpoint.generation == 0 or state.refused
        if fresh:
            endpoint.generation += 1
        state.refused = False
        state.warm_since_s = time.monotonic() if (fresh or state.ejections) and self._others_serve(endpoint) else None
        endpoint.warm_limit = None if state.warm_since_s is None else 1
        state.bad = state.connect_failures = 0
        # half-open after an ejection: real requests decide, and the first one that fails ejects again
        state.faults = self._settings.eject_failures - 1 if state.ejections else 0
        state.down_since_s = None
        endpoint.up = True
        endpoint.reason = ""
        self._driver.fleet_version += 1
        log.info("instance %s is up (generation %d)", endpoint.name, endpoint.generation)
        self._driver.feed(InstanceUp(spec=endpoint.spec, generation=endpoint.generation))
        self._changed.set()

    def _others_serve(self, endpoint: Endpoint) -> bool:
        """Whether a slow start makes sense: others carry the load, and they are not all as new as this one."""
        slow_s = self._settings.slow_start_s
        if not slow_s or self._driver.now() - self._begun_s < slow_s:
            return False
        models = set(endpoint.models)
        others = (e for e in self._driver.endpoints.values() if e is not endpoint)
        return any(e.up and e.warm_limit is None and models & set(e.models) for e in others)

    def _warm(self, endpoint: Endpoint, state: _State) -> None:
        """Tells the Router when an instance in slow start may be given more."""
        assert state.warm_since_s is not None
        limit = warm_limit(time.monotonic() - state.warm_since_s, self._settings.slow_start_s)
        if limit is None:
            state.warm_since_s = None
        if endpoint.up and limit != endpoint.warm_limit:
            endpoint.warm_limit = limit
            self._driver.feed(InstanceUp(spec=endpoint.spec, generation=endpoint.generation))

    def _down(self, endpoint: Endpoint, state: _State, reason: str) -> None:
        endpoint.up = False
        endpoint.reason = reason
        state.good = 0
        state.warm_since_s = endpoint.warm_limit = None
        state.down_since_s = time.monotonic()
        self._driver.fleet_version += 1
        log.warning("instance %s is out: %s", endpoint.name, reason)
        self._driver.feed(InstanceDown(instance=endpoint.name, reason=reason, drain=True))
        self._changed.set()

    def drain(self, endpoint: Endpoint) -> None:
        """Takes an engine out by an operator's wish; what runs there finishes."""
        endpoint.draining = True
        state = self._states.get(endpoint.name)
        if endpoint.up and state is not None:
            self._down(endpoint, state, "draining")

    def undrain(self, endpoint: Endpoint) -> None:
        """Takes a drained engine back with its next good probe, unless it is leaving the fleet."""
        endpoint.draining = endpoint.leaving

    def recovery_s(self, model: str, told_s: float | None = None) -> float:
        """Seconds until an engine of a model may be back: the soonest end of an ejection, else a few probes."""
        soonest = self._settings.interval_s * self._settings.rise
        now = time.monotonic()
        waits = []
        for endpoint in self._driver.endpoints.values():
            state = self._states.get(endpoint.name)
            if state is not None and not endpoint.draining and (not model or model in endpoint.models):
                waits.append(max(soonest, state.until_s - now))
        return min(waits, default=soonest)

    def breaker(self, endpoint: Endpoint) -> int:
        """0: closed. 1: open, it was ejected. 2: half-open, the next real request that fails ejects it again."""
        state = self._states.get(endpoint.name)
        if state is None or not state.ejections:
            return 0
        if endpoint.up:
            return 2 if state.faults >= self._settings.eject_failures - 1 else 0
        return int(state.until_s > time.monotonic())

    def describe(self, endpoint: Endpoint) -> str:
        """`up`, `draining`, `ejected`, `starting` or `down`."""
        state = self._states.get(endpoint.name)
        if endpoint.draining:
            return "draining"
        if endpoint.up:
            return "up"
        if endpoint.generation == 0:
            return "starting"
        if state is not None and state.until_s > time.monotonic():
            return "ejected"
        return "down"
