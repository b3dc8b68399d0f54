"""Measure an instance again in idle time, once live traffic has shown that its profile no longer holds.

Only an instance that runs nothing, and for which nothing waits, is probed; the first request that is sent to it
meanwhile ends the probing, and what was measured until then is dropped. Until a probe has come through, forecasts
follow live traffic as they do without this.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import msgspec

from weighbridge.calibrate.build import build_profile
from weighbridge.calibrate.endpoint import KINDS, read_endpoint
from weighbridge.calibrate.measure import Measurer
from weighbridge.calibrate.provenance import provenance_of
from weighbridge.calibrate.settings import ReprobeSettings
from weighbridge.core.errors import InputError, UpstreamError
from weighbridge.core.events import ProfileUpdated
from weighbridge.cost.profile import Profile
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.gateway import Gateway
from weighbridge.http.client import HttpClient

log = logging.getLogger("weighbridge.calibrate")
Outcome = Literal["measured", "interrupted", "failed"]


class Reprober:
    """Watches one gateway; `run` until cancelled. What came of probes is counted in the gateway's `reprobes`."""

    def __init__(self, gateway: Gateway, settings: ReprobeSettings, *, look_every_s: float = 0.05) -> None:
        self._gateway = gateway
        self._settings = settings
        self._look_every_s = look_every_s
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        """One instance at a time, for ever."""
        while True:
            await asyncio.sleep(self._look_every_s)
            now = self._gateway.driver.now()
            for endpoint in list(self._gateway.driver.endpoints.values()):
                if now >= self._not_before.get(endpoint.name, 0.0) and self._drifted(endpoint) and self._idle(endpoint):
                    outcome = await self._probe(endpoint)
                    self._not_before[endpoint.name] = self._gateway.driver.now() + self._settings.rest_s
                    self._gateway.stats.reprobes.add((endpoint.name, outcome))

    def _drifted(self, endpoint: Endpoint) -> bool:
        cost = self._gateway.driver.refinement.cost(endpoint.name)
        return cost is not None and cost.level == "online" and cost.drifts > 0

    def _idle(self, endpoint: Endpoint) -> bool:
        driver = self._gateway.driver
        instance = driver.router.fleet.instances.get(endpoint.name)
        if instance is None or not endpoint.up or endpoint.draining or self._taken(endpoint):
            return False
        return driver.now() - instance.last_dispatch_s >= self._settings.idle_s

    def _taken(self, endpoint: Endpoint) -> bool:
        """Whether it has work, or anything waits that may become its work."""
        driver = self._gateway.driver
        instance = driver.router.fleet.instances.get(endpoint.name)
        return instance is None or instance.in_flight > 0 or driver.router.held_requests > 0 or not endpoint.up

    async def _probe(self, endpoint: Endpoint) -> Outcome:
        stop = asyncio.Event()
        guard = asyncio.create_task(self._guard(endpoint, stop))
        try:
            profile = await self._measure(endpoint, stop)
        except (UpstreamError, InputError) as error:
            if stop.is_set():
                return "interrupted"
            log.warning("%s could not be measured again: %s", endpoint.name, error)
            return "failed"
        finally:
            guard.cancel()
        if stop.is_set():
            return "interrupted"
        endpoint.profile = profile
        self._gateway.driver.feed(
            ProfileUpdated(instance=endpoint.name, rates=profile.rates, step=profile.step, error=profile.error)
        )
        log.warning("%s was measured again: %s", endpoint.name, profile.rates)
        return "measured"

    async def _guard(self, endpoint: Endpoint, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.sleep(self._look_every_s)
            if self._taken(endpoint):
                stop.set()

    async def _measure(self, endpoint: Endpoint, stop: asyncio.Event) -> Profile:
        kind = next((k for k in KINDS if k == endpoint.settings.kind), None)
        names = endpoint.facts.models if endpoint.facts is not None else endpoint.models
        client = HttpClient()
        try:
            target = await read_endpoint(
                client, endpoint.settings.url, model=next(iter(names), None), kind=kind, key=endpoint.key
            )
            target = msgspec.structs.replace(target, limits=endpoint.spec.limits)
            seed = int(self._gateway.driver.now() * 1e6)
            measurer = Measurer(client, target, budget_s=self._settings.budget_s, seed=seed, stop=stop)
            found = await measurer.run()
        finally:
            await client.close()
        provenance = provenance_of(target, method=f"{len(found.results)} probes in idle time")
        return (await asyncio.to_thread(build_profile, found, provenance, seed=seed % 2**32)).profile
