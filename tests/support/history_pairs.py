"""Seeded histories of disaggregated fleets, and of engines whose whole replies are put together from streams."""

import asyncio
import json
import random
from typing import Any

from tests.support.gateway import front, instance
from tests.support.history import TROUBLE, Engine, Outcome, check, client
from tests.support.loop import until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.gateway.settings import HealthSettings
from weighbridge.routing.router import RouterSettings

SHAPES = ("llamacpp", "two_step", "two_step_early", "bootstrap", "mooncake")
PREFILL_FATES = ("ok", "ok", "ok", "ok", "ok", "slow", "reset_before", "eof_before", "500", "503", "stall", "no_params")
KINDS = {"llamacpp": "llamacpp", "bootstrap": "sglang"}


class Prefill(Engine):
    """Computes prompts: each reply has parameters of its own."""

    def __init__(self, rng: random.Random, name: str) -> None:
        super().__init__(rng)
        self.name = name
        self.given = 0

    async def __call__(self, call: Call) -> None:
        body = json.loads(call.body)
        fate = self.rng.choice(PREFILL_FATES)
        try:
            if fate in ("ok", "slow", "no_params"):
                await asyncio.sleep(self.rng.random() * (0.02 if fate == "slow" else 0.002))
                self.given += 1
                params = None if fate == "no_params" else {"id": f"{self.name}-{self.given}"}
                concurrent = "bootstrap_room" in body or "transfer_id" in (body.get("kv_transfer_params") or {})
                reply = {"choices": [], "kv_transfer_params": None if concurrent else params}
                await call.reply(200, json.dumps(reply).encode())
            else:
                await self.answer(call, body, "", fate)
        except ConnectionError:
            call.keep_alive = False


class Decode(Engine):
    """Decodes, and notes by what it was handed each prompt's KV."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.taken: list[str] = []

    async def __call__(self, call: Call) -> None:
        body = json.loads(call.body)
        params = body.get("kv_transfer_params") or {}
        handed = params.get("id") or params.get("transfer_id") or body.get("bootstrap_room")
        if handed is not None:
            self.taken.append(str(handed))
        await super().__call__(call)


async def _tell_ranks(call: Call) -> None:
    await call.reply(200, b'{"0":{"engine_id":"e0"},"1":{"engine_id":"e1"}}')


def _rows(shape: str, upstreams: list[FakeUpstream], prefills: int, bootstrap: FakeUpstream) -> tuple[Any, ...]:
    kind = KINDS.get(shape, "vllm")
    if shape == "llamacpp":
        return tuple(instance(u, f"i{n}", kind=kind) for n, u in enumerate(upstreams))
    more: dict[str, Any] = {"transfer": "mooncake", "bootstrap_port": bootstrap.port} if shape == "mooncake" else {}
    return tuple(
        instance(u, f"i{n}", kind=kind, role="prefill" if n < prefills else "decode", **more)
        for n, u in enumerate(upstreams)
    )


async def pair_history(shape: str, seed: int, requests: int = 12) -> dict[str, int]:
    """One seeded history, checked; how often each end was seen."""
    rng = random.Random(f"{shape}-{seed}")
    prefills = 0 if shape == "llamacpp" else rng.choice((1, 2))
    decodes = rng.choice((1, 2))
    engines: list[Engine] = [Prefill(random.Random(rng.random()), f"p{n}") for n in range(prefills)]
    decoding = [Decode(random.Random(rng.random())) for _ in range(decodes)]
    upstreams = [FakeUpstream(engine) for engine in (*engines, *decoding)]
    bootstrap = FakeUpstream(_tell_ranks, health=0)
    for upstream in (*upstreams, bootstrap):
        await upstream.__aenter__()
    health = HealthSettings(interval_s=0.05, timeout_s=1.0, eject_s=0.05, eject_max_s=0.1)
    binding = "early" if shape == "two_step_early" else "auto"
    router = RouterSettings(policy="least_requests", seed=seed, binding=binding, dispatch=rng.choice(("auto", "hold")))
    try:
        rows = _rows(shape, upstreams, prefills, bootstrap)
        async with front(instances=rows, health=health, router=router) as f:
            outcomes = [Outcome(f"w{seed}-{n}", rng.randrange(1, 12), rng.random() < 0.5) for n in range(requests)]
            jobs = []
            for outcome in outcomes:
                limit_s = rng.random() * 0.03 if rng.random() < 0.25 else 30.0
                jobs.append(asyncio.create_task(client(f, outcome, limit_s, rng.random() * 0.03)))
            if rng.random() < 0.5:
                trouble = TROUBLE[rng.choice(("drain", "kill"))]
                jobs.append(asyncio.create_task(trouble(f, rng, upstreams)))
            await asyncio.gather(*jobs)
            await until(lambda: not f.gateway.driver.flights, 30.0)
            f.assert_idle()
            check(outcomes, list(decoding), 2 * router.max_attempts)
            taken = [handed for engine in decoding for handed in engine.taken]
            # a connection found stale may be replaced within its attempt, with the same bytes
            assert all(taken.count(handed) <= 2 for handed in taken), "transfer parameters are good for one use"
    finally:
        for upstream in (*upstreams, bootstrap):
            await upstream.__aexit__()
    ends: dict[str, int] = {}
    for outcome in outcomes:
        ends[outcome.end] = ends.get(outcome.end, 0) + 1
    return ends
