"""Seeded histories whose gateway is a process of its own: it is stopped for a while, killed by SIGKILL, started again.

Only what clients and engines see can be checked here, and that the last life of the gateway has nothing left to do.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tests.support.gateway import MODEL, instance
from tests.support.history import POLICIES, Engine, Outcome, check, client
from tests.support.history_tiers import Urgency
from tests.support.upstream import FakeUpstream
from weighbridge.gateway import Gateway, GatewaySettings
from weighbridge.gateway.settings import HealthSettings
from weighbridge.http import HttpClient
from weighbridge.routing.router import RouterSettings

READY_S = 30.0


def _serve(settings: GatewaySettings, told: Connection) -> None:
    """The child: a gateway until it is killed."""
    import uvloop

    async def main() -> None:
        gateway = Gateway(settings, {})
        await gateway.start()
        await gateway.wait_ready(READY_S)
        told.send((gateway.port, gateway.admin_port))
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")  # a fork of a process with threads may hang
    context.set_forkserver_preload([__name__])
    return context


class Life:
    """A gateway's process, and the port that it and those after it have."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.client = HttpClient()
        self.lives = 0
        self.process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    async def begin(self) -> None:
        """Start a process. Others may have been given the port meanwhile: of many histories at once, one ends soon."""
        context = _context()
        limit_s = time.monotonic() + READY_S
        while True:
            here, there = context.Pipe(duplex=False)
            self.process = context.Process(target=_serve, args=(self.settings, there), daemon=True)
            await asyncio.to_thread(self.process.start)
            there.close()
            try:
                port, self.admin_port = await asyncio.to_thread(here.recv)
                break
            except EOFError:
                self.process.join()
                assert time.monotonic() < limit_s, "the gateway does not start"
                await asyncio.sleep(0.02)
            finally:
                here.close()
        self.settings = msgspec.structs.replace(self.settings, port=port)
        self.lives += 1

    async def kill(self) -> None:
        """SIGKILL, from which nobody can recover anything."""
        self.process.kill()
        await asyncio.to_thread(self.process.join)

    async def pause(self, seconds: float) -> None:
        """SIGSTOP: connections stay open and nobody answers."""
        os.kill(self.process.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(self.process.pid, signal.SIGCONT)

    async def idle(self) -> None:
        """Returns once the gateway says that nothing runs, waits or is counted any more."""
        async with asyncio.timeout(READY_S):
            while True:
                url = f"http://127.0.0.1:{self.admin_port}/fleet"
                fleet = json.loads((await self.client.request("GET", url, timeout_s=10.0)).body)
                names = ("in_flight", "prefill_tokens", "decode_tokens", "kv_tokens")
                left = [row[name] for row in fleet["instances"] for name in names]
                if not any(left) and not fleet["held_requests"]:
                    return
                await asyncio.sleep(0.01)


async def _troubles(life: Life, rng: random.Random, kills: int) -> None:
    for _ in range(kills):
        await asyncio.sleep(rng.random() * 0.04)
        if rng.random() < 0.3:
            await life.pause(rng.random() * 0.1)
        await life.kill()
        await asyncio.sleep(rng.random() * 0.03)
        await life.begin()


async def _patient(life: Life, outcome: Outcome, first: int, delay_s: float) -> None:
    """A client that comes after the gateway's start number `first`, whether it still lives then or not."""
    while life.lives < first:
        await asyncio.sleep(0.002)
    await client(life, outcome, outcome.limit_s, delay_s)


async def process_history(seed: int, requests: int = 14) -> dict[str, int]:
    """One seeded history, checked; how often each end was seen, and how many `lives` its gateways had."""
    rng = random.Random(f"process-{seed}")
    engines = [Engine(random.Random(rng.random())) for _ in range(rng.choice((1, 2, 3)))]
    upstreams = [FakeUpstream(engine) for engine in engines]
    urgency = Urgency(seed, MODEL)
    router = urgency.router(RouterSettings(policy=rng.choice(POLICIES), seed=seed))
    for upstream in upstreams:
        await upstream.__aenter__()
    life = Life(
        GatewaySettings(
            port=0,
            admin_port=0,
            instances=tuple(instance(u, f"i{n}", **urgency.instance_fields(n)) for n, u in enumerate(upstreams)),
            health=HealthSettings(interval_s=0.05, timeout_s=1.0, eject_s=0.05, eject_max_s=0.1),
            router=router,
            keys=urgency.keys(),
        )
    )
    try:
        await life.begin()
        outcomes = [
            Outcome(word, rng.randrange(1, 12), rng.random() < 0.7, urgency.caller(word))
            for word in (f"p{seed}-{n}" for n in range(requests))
        ]
        kills = rng.choice((1, 1, 2))
        jobs = [asyncio.create_task(_troubles(life, rng, kills))]
        for outcome in outcomes:
            outcome.limit_s = rng.random() * 0.03 if rng.random() < 0.2 else READY_S
            first, delay_s = rng.randrange(kills + 1) + 1, rng.random() * 0.05
            jobs.append(asyncio.create_task(_patient(life, outcome, first, delay_s)))
        await asyncio.gather(*jobs)
        await life.idle()
        check(outcomes, engines, 2 * router.max_attempts * life.lives)
        for outcome in outcomes:
            assert outcome.end != "cancelled" or outcome.limit_s < READY_S, f"{outcome.word} was never answered"
    finally:
        await life.client.close()
        if life.process is not None:
            await life.kill()
        for upstream in upstreams:
            await upstream.__aexit__()
    ends = {"lives": life.lives}
    for outcome in outcomes:
        ends[outcome.end] = ends.get(outcome.end, 0) + 1
    return ends
