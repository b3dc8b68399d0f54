"""Judge a profile on traffic that it was not made from: random lengths, Poisson arrivals, at a share of its capacity.

The capacity is where the engine's queue begins to grow without bound. It is forecast by replaying a backlog of the
same traffic, and measured by sending one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from weighbridge.calibrate.bands import request_bands
from weighbridge.calibrate.endpoint import Endpoint, Kind, busy, read_endpoint, read_load
from weighbridge.calibrate.engines import config_of
from weighbridge.calibrate.fitting import METRICS, MetricError, compare
from weighbridge.calibrate.probe import Probe, Prober, ProbeResult
from weighbridge.calibrate.replay import RecordedRequest, Replayed, replay
from weighbridge.core.errors import ProfileError, UpstreamError
from weighbridge.core.instance import StepTerms
from weighbridge.cost.profile import Profile
from weighbridge.http.client import HttpClient


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of traffic against its forecast. `inside` is the share of requests within the profile's 90 % band."""

    load: float
    rate_per_s: float
    requests: int
    failed: int
    seconds: float
    metrics: dict[str, MetricError]
    inside: dict[str, float]


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second of a backlog, forecast and measured; measured is None where none was sent."""

    forecast_per_s: float
    measured_per_s: float | None
    requests: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Random lengths: prompts lognormal, answers geometric, both cut to what the engine takes."""

    prompt_median: int = 48
    prompt_sigma: float = 0.8
    output_mean: int = 20
    output_most: int = 64

    def sizes(self, count: int, room: int, rng: random.Random) -> list[tuple[int, int]]:
        """(prompt, output) tokens of `count` requests that fit a context of `room` tokens."""
        found = []
        for _ in range(count):
            output = min(self.output_most, 1 + int(rng.expovariate(1 / self.output_mean)))
            prompt = round(self.prompt_median * rng.lognormvariate(0.0, self.prompt_sigma))
            found.append((max(4, min(prompt, room - output)), output))
        return found


def require_match(profile: Profile, endpoint: Endpoint, name: str) -> StepTerms:
    """The profile's model, if it was made of this engine kind, model and device.

    Raises:
        ProfileError: it was made for another, or holds no step-time model.
    """
    p = profile.provenance
    for what, made, found in (
        ("engine", p.engine, endpoint.kind),
        ("model", p.model, endpoint.model),
        ("device", p.device, endpoint.device),
    ):
        if made and found and made != found:
            raise ProfileError(f"{name}: made for {what} {made!r}, and {endpoint.url} is {found!r}; calibrate it")
    if profile.step is None:
        raise ProfileError(f"{name}: holds two rates and no step-time model; calibrate again")
    return profile.step


def forecast_capacity(profile: Profile, sizes: Sequence[tuple[int, int]]) -> float:
    """Requests per second at which a queue of such requests would neither grow nor shrink."""
    assert profile.step is not None
    backlog = [RecordedRequest(str(i), 0.0, 0.0, 0.0, p, o) for i, (p, o) in enumerate(sizes)]
    done = replay(backlog, profile.step, config_of(profile))
    return _drain_rate([r.last_token_s for r in done])


async def check_url(
    url: str,
    profile: Profile,
    *,
    name: str,
    load: float,
    seconds: float,
    model: str | None = None,
    kind: Kind | None = None,
    key: str | None = None,
    seed: int | None = None,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> CheckReport:
    """Send traffic to the engine at `url` for `seconds`, and compare it with the profile called `name`.

    Raises:
        ProfileError: it was made for another engine, model or device; UpstreamError: the engine cannot be measured.
    """
    client = HttpClient()
    try:
        endpoint = await read_endpoint(client, url, model=model, kind=kind, key=key)
        require_match(profile, endpoint, name)
        seed = time.time_ns() if seed is None else seed
        checker = Checker(client, endpoint, profile, seed=seed, progress=progress)
        report, _ = await checker.at(load, seconds)
        return report
    finally:
        await client.close()


class Checker:
    """Sends traffic to one engine and compares. `progress` gets a share from 0 to 1."""

    def __init__(
        self,
        client: HttpClient,
        endpoint: Endpoint,
        profile: Profile,
        *,
        seed: int,
        traffic: Traffic | None = None,
        progress: Callable[[float, float], None] = lambda done, total: None,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._profile = profile
        self._rng = random.Random(seed)
        self._prober = Prober(client, endpoint, self._rng)
        self._progress = progress
        self._room = (endpoint.limits.max_context or 2048) - 1
        self.traffic = traffic or Traffic()

    async def capacity(self, seconds: float) -> CapacityReport:
        """Send a backlog of about `seconds`, and measure how fast it drains."""
        rate = forecast_capacity(self._profile, self.traffic.sizes(200, self._room, self._rng))
        sizes = self.traffic.sizes(max(12, int(rate * seconds)), self._room, self._rng)
        forecast = forecast_capacity(self._profile, sizes)
        results, failed = await self._send([Probe(p, o) for p, o in sizes])
        if failed:
            raise failed[0]
        start = min(r.sent_s for r in results)
        return CapacityReport(
            forecast_per_s=forecast,
            measured_per_s=_drain_rate([r.last_token_s - start for r in results]),
            requests=len(results),
        )

    async def at(self, load: float, seconds: float) -> tuple[CheckReport, list[Replayed]]:
        """Poisson traffic at `load` of the forecast capacity for `seconds`, forecast by replay of what was sent."""
        many = self.traffic.sizes(400, self._room, self._rng)
        rate = load * forecast_capacity(self._profile, many)
        probes: list[Probe] = []
        now = 0.0
        for prompt, output in self.traffic.sizes(10_000, self._room, self._rng):
            if now > seconds:
                break
            probes.append(Probe(prompt, output, after_s=now))
            now += self._rng.expovariate(rate)
        results, failed = await self._send(probes)
        if not results:
            raise failed[0]
        return self._judge(results, len(failed), load, rate, seconds)

    def _judge(
        self, results: Sequence[ProbeResult], failed: int, load: float, rate: float, seconds: float
    ) -> tuple[CheckReport, list[Replayed]]:
        profile, config = self._profile, config_of(self._profile)
        assert profile.step is not None
        zero = results[0].sent_s
        requests = [r.record(index, zero) for index, r in enumerate(results)]
        done = replay(requests, profile.step, config, overhead_s=profile.overhead_s)
        bands = request_bands(requests, profile, config, rng=np.random.default_rng(0))
        inside = {}
        for metric in METRICS:
            observed = [getattr(r, metric) for r in requests]
            low, high = bands[metric]
            hits = [bool(lo <= o <= hi) for o, lo, hi in zip(observed, low, high, strict=True) if o is not None]
            inside[metric] = float(sum(hits)) / len(hits) if hits else float("nan")
        report = CheckReport(
            load=load,
            rate_per_s=rate,
            requests=len(results),
            failed=failed,
            seconds=seconds,
            metrics=compare(done),
            inside=inside,
        )
        return report, done

    async def _send(self, probes: Sequence[Probe]) -> tuple[list[ProbeResult], list[UpstreamError]]:
        load, _ = await read_load(self._client, self._endpoint)
        if busy(load):
            raise UpstreamError(f"{self._endpoint.url}: the engine serves others; check a profile when it is idle")
        ended = 0

        async def one(probe: Probe) -> ProbeResult:
            nonlocal ended
            await asyncio.sleep(probe.after_s)
            result = await self._prober.send("check", probe)
            ended += 1
            self._progress(ended, len(probes))
            return result

        outcomes = await asyncio.gather(*(one(p) for p in probes), return_exceptions=True)
        unexpected = [e for e in outcomes if isinstance(e, BaseException) and not isinstance(e, UpstreamError)]
        if unexpected:
            raise unexpected[0]
        results = sorted((r for r in outcomes if isinstance(r, ProbeResult)), key=lambda r: r.sent_s)
        return results, [e for e in outcomes if isinstance(e, UpstreamError)]


def _drain_rate(ends_s: Sequence[float]) -> float:
    """Requests per second between the first and the last fifth of the ends, where the batch is full."""
    ordered = sorted(ends_s)
    low, high = len(ordered) // 5, len(ordered) - 1 - len(ordered) // 5
    return (high - low) / (ordered[high] - ordered[low])
