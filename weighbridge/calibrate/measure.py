"""Run the probes of a calibration within a time budget, watch the engine meanwhile, and keep what was measured.

Nothing is written here. Cold start is measured apart; the requests after it warm the engine up and are not fitted.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weighbridge.calibrate.endpoint import Endpoint, busy, read_load
from weighbridge.calibrate.probe import Probe, Prober, ProbeResult
from weighbridge.calibrate.stages import HELD_OUT, TRAFFIC, Shape, Speed, Stage, random_stage, repeat_stages, round_of
from weighbridge.core.errors import UpstreamError
from weighbridge.core.instance import LoadReport
from weighbridge.http.client import HttpClient

GRID_SHARE, TRAFFIC_SHARE = 0.4, 0.3
"""Of the budget; the rest judges the fit."""
ALLOWED_FAILURES = 0.1
_PAUSE_S = 0.05


@dataclass(slots=True)
class Measurement:
    """What a calibration saw. `results` are warm and in the order sent; `missing` names stages that did not run."""

    endpoint: Endpoint
    results: list[ProbeResult] = field(default_factory=list)
    cold: ProbeResult | None = None
    repeat_cold: ProbeResult | None = None
    repeat_warm: ProbeResult | None = None
    failures: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    most_running: int = 0
    queued_while_free: bool = False
    interrupted: bool = False
    under_load: bool = False
    seconds: float = 0.0
    rounds: int = 0

    def stage(self, name: str) -> list[ProbeResult]:
        """The results of one stage."""
        return [r for r in self.results if r.stage == name]


class Measurer:
    """Measures one endpoint once. `stop` may be set from outside: what was measured until then is kept."""

    def __init__(
        self,
        client: HttpClient,
        endpoint: Endpoint,
        *,
        budget_s: float,
        seed: int,
        progress: Callable[[float, float], None] = lambda done, total: None,
        stop: asyncio.Event | None = None,
        under_load: bool = False,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._budget_s = budget_s
        self._rng = random.Random(seed)
        self._prober = Prober(client, endpoint, self._rng)
        self._progress = progress
        self._stop = stop or asyncio.Event()
        self._speed = Speed()
        self._begun = time.monotonic()
        self._seed = seed
        self.found = Measurement(endpoint, under_load=under_load)

    async def run(self) -> Measurement:
        """Measure.

        Raises:
            UpstreamError: the engine is busy with others, restarted, failed too many probes, or cannot be measured.
        """
        await self._refuse_busy()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._measure()
        finally:
            ticker.cancel()
            self.found.seconds = time.monotonic() - self._begun
        return self.found

    async def _measure(self) -> None:
        cold = await self._run(Stage("cold", (Probe(16, 4),)))
        self.found.cold = cold[0] if cold else None
        for _ in range(2):
            await self._run(Stage("warm-up", (Probe(64, 16),)))
        self._learn_alone(await self._run(Stage("first", (Probe(128, 12),))))
        shape = Shape.of(self._endpoint.limits)
        # the longest prompt may take a sixtieth of the budget, so that a round fits into it
        long_tokens = max(64, min(shape.context_tokens - 64, int(self._budget_s / 60 / self._speed.prefill_s)))
        for stage in repeat_stages(long_tokens, self._seed + 1):
            results = await self._run(stage)
            if results and stage.name == "repeat-cold":
                self.found.repeat_cold = results[0]
            elif results:
                self.found.repeat_warm = results[0]
        until = GRID_SHARE * self._budget_s
        while not self._stop.is_set() and self._elapsed() < until:
            if not await self._round(shape, long_tokens, until):
                break
        await self._traffic(TRAFFIC, (GRID_SHARE + TRAFFIC_SHARE) * self._budget_s, shape, long_tokens, busy=0.85)
        await self._traffic(HELD_OUT, self._budget_s, shape, long_tokens, busy=0.6)
        self.found.interrupted = self._stop.is_set()

    async def _traffic(self, name: str, until: float, shape: Shape, long_tokens: int, *, busy: float) -> None:
        """Random requests until the given second of the budget, their draining included."""
        left = until - self._elapsed()
        if self._stop.is_set() or left < 0.1 * self._budget_s:
            self.found.missing.append(name)
            return
        stage = random_stage(name, shape, self._speed, 0.85 * left, self._rng, long_tokens=long_tokens, busy=busy)
        self.found.results += await self._run(stage)

    async def _round(self, shape: Shape, long_tokens: int, until: float) -> bool:
        """One pass over the grid; False when nothing of it fitted into the time left."""
        number = self.found.rounds
        ran = False
        for stage in round_of(shape, number, self._rng, long_tokens=long_tokens):
            needs = self._speed.seconds(stage, shape.sequences)
            if self._stop.is_set() or self._elapsed() + needs > until:
                if number == 0:
                    self.found.missing.append(stage.name)
                continue
            results = await self._run(stage)
            self.found.results += results
            self._learn(stage, results)
            ran = True
        self.found.rounds += 1
        return ran

    async def _run(self, stage: Stage) -> list[ProbeResult]:
        """One stage; a failed probe is counted, and too many of them end the calibration."""
        if self._stop.is_set():
            return []
        tasks = [asyncio.create_task(self._send(stage.name, probe)) for probe in stage.probes]
        stopping = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._watch()) if stage.name in ("burst", TRAFFIC, HELD_OUT) else None
        waiting = set(tasks)
        try:
            while waiting and not stopping.done():
                done, _ = await asyncio.wait({*waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
        finally:
            for task in (*tasks, stopping, *([watching] if watching is not None else [])):
                task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        results = [r for r in outcomes if isinstance(r, ProbeResult)]
        failed = [e for e in outcomes if isinstance(e, Exception)]
        self.found.failures += [str(e) for e in failed]
        await self._check_failures(stage, failed)
        await asyncio.sleep(_PAUSE_S)
        return sorted(results, key=lambda r: r.sent_s)

    async def _check_failures(self, stage: Stage, failed: list[Exception]) -> None:
        if not failed:
            return
        unexpected = next((e for e in failed if not isinstance(e, UpstreamError)), None)
        if unexpected is not None:
            raise unexpected
        await self._refuse_restart()
        seen = len(self.found.results) + len(self.found.failures)
        if stage.name in ("cold", "warm-up", "first") or len(self.found.failures) > max(2, ALLOWED_FAILURES * seen):
            raise failed[0]

    async def _send(self, stage: str, probe: Probe) -> ProbeResult:
        if probe.after_s > 0:
            await asyncio.sleep(probe.after_s)
        return await self._prober.send(stage, probe)

    async def _refuse_busy(self) -> None:
        load, _ = await read_load(self._client, self._endpoint)
        if busy(load) and not self.found.under_load:
            raise UpstreamError(
                f"{self._endpoint.url}: the engine has {load.running or 0} running and {load.waiting or 0} waiting "
                "requests of others; calibrate when it is idle, or say --under-load and get a profile of it under load"
            )

    async def _refuse_restart(self) -> None:
        _, started = await read_load(self._client, self._endpoint)
        before = self._endpoint.started_s
        if before is not None and started is not None and abs(started - before) > 1.0:
            raise UpstreamError(f"{self._endpoint.url}: the engine restarted while it was measured; calibrate again")

    async def _watch(self) -> None:
        """Sample the engine's own counts: how many run at most, and whether others wait meanwhile."""
        while True:
            load, _ = await read_load(self._client, self._endpoint)
            self._note(load)
            await asyncio.sleep(0.1)

    def _note(self, load: LoadReport) -> None:
        if load.running is not None and load.running >= self.found.most_running:
            self.found.most_running = load.running
            self.found.queued_while_free = bool(load.waiting) and (load.kv_usage or 0.0) < 0.9

    async def _tick(self) -> None:
        while True:
            self._progress(min(self._elapsed(), self._budget_s), self._budget_s)
            await asyncio.sleep(0.25)

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _learn_alone(self, results: list[ProbeResult]) -> None:
        for r in results:
            self._speed.step_s = r.tpot_s or self._speed.step_s
            self._speed.prefill_s = max(1e-7, (r.ttft_s - self._speed.step_s) / r.prompt_tokens)
            self._speed.sequence_s = 0.5 * self._speed.step_s

    def _learn(self, stage: Stage, results: list[ProbeResult]) -> None:
        if stage.name.startswith("decode-") and not stage.name.endswith("-long") and len(results) > 1:
            tpot = statistics.median(r.tpot_s for r in results if r.tpot_s is not None)
            self._speed.sequence_s = max(1e-7, (tpot - self._speed.step_s) / (len(results) - 1))
