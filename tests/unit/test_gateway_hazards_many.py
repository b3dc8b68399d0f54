"""Hazards of many requests: shared prefixes, full warm engines, urgent ones, engines that come up late."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.gateway import QUICK, Front, answer, chat, front, instance, whole
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.instance import Limits
from weighbridge.gateway import Gateway, GatewaySettings
from weighbridge.http import HttpClient
from weighbridge.routing.router import RouterSettings

# many requests


@pytest.mark.parametrize(
    ("policy", "path"),
    [
        *(
            (name, "/v1/chat/completions")
            for name in ("least_requests", "least_tokens", "prefix_affinity", "calibrated")
        ),
        *((name, path) for name in ("prefix_affinity", "calibrated") for path in ("/v1/completions", "/v1/embeddings")),
    ],
)
def test_a_shared_prefix_does_not_pile_up_on_one_engine(policy: str, path: str) -> None:
    """480 requests at once with 2,000 tokens in common over 8 engines: the fullest holds at most 1.3 times the mean.

    `affinity_gate` is a peer's formula without such a bound, and is not among ours.
    """
    text = "The same long beginning, which every request of this load has in common. " * 110

    async def main() -> None:
        gate = asyncio.Event()

        async def script(call: Call) -> None:
            await gate.wait()
            await call.reply(200, whole(prompt=2000))

        upstreams = [FakeUpstream(script) for _ in range(8)]
        for upstream in upstreams:
            await upstream.__aenter__()
        try:
            rows = tuple(instance(u, f"i{n}", kind="vllm") for n, u in enumerate(upstreams))
            async with front(instances=rows, router=RouterSettings(policy=policy, dispatch="immediate")) as f:
                tasks = [asyncio.create_task(f.post(_shared(path, text, n), path)) for n in range(480)]
                await until(lambda: len(f.gateway.driver.flights) == 480, 20.0)
                counts = [e.running for e in f.gateway.driver.endpoints.values()]
                gate.set()
                replies = await asyncio.gather(*tasks)
                assert {reply.status for reply in replies} == {200}
                assert sum(counts) == 480
                assert max(counts) / (480 / 8) <= 1.3, counts
                f.assert_idle()
        finally:
            gate.set()
            for upstream in upstreams:
                await upstream.__aexit__()

    run(main(), 60.0)


def _shared(path: str, text: str, n: int) -> bytes:
    if path == "/v1/embeddings":
        return json.dumps({"model": "m", "input": f"{text} {n}"}).encode()
    if path == "/v1/completions":
        return json.dumps({"model": "m", "prompt": f"{text} {n}", "max_tokens": 20}).encode()
    return chat(stream=False, messages=[{"role": "user", "content": f"{text} {n}"}])


@pytest.mark.parametrize("policy", ["prefix_affinity", "calibrated"])
def test_a_warm_engine_that_is_full_loses_to_a_cold_one_that_is_idle(policy: str) -> None:
    text = "Something long that was asked before. " * 60

    async def main() -> None:
        gate = asyncio.Event()

        async def script(call: Call) -> None:
            if b"hold" in call.body:
                await gate.wait()
            await call.reply(200, whole(prompt=600))

        async with FakeUpstream(script) as a, FakeUpstream(script) as b:
            rows = (instance(a, "i0", kind="vllm"), instance(b, "i1", kind="vllm"))
            async with front(instances=rows, router=RouterSettings(policy=policy, dispatch="immediate")) as f:
                await f.post(_shared("/v1/chat/completions", text, 0))
                warm = f.gateway.driver.decisions[-1].decision.chosen
                await f.post(_shared("/v1/chat/completions", text, 1))
                assert f.gateway.driver.decisions[-1].decision.chosen == warm, "idle and warm: there"
                f.gateway.health.drain(f.gateway.driver.endpoints["i1" if warm == "i0" else "i0"])
                held = [
                    asyncio.create_task(f.post(chat(stream=False, max_tokens=400, user=f"hold {n}" + "x" * 3000)))
                    for n in range(40)
                ]
                await until(lambda: len(f.gateway.driver.flights) == 40)
                f.gateway.health.undrain(f.gateway.driver.endpoints["i1" if warm == "i0" else "i0"])
                await until(lambda: all(e.up for e in f.gateway.driver.endpoints.values()))
                await f.post(_shared("/v1/chat/completions", text, 2))
                assert f.gateway.driver.decisions[-1].decision.chosen != warm
                gate.set()
                await asyncio.gather(*held)
                f.assert_idle()

    run(main(), 60.0)


def test_an_urgent_request_waits_for_one_running_one_at_most_and_equals_never_change_places() -> None:
    """All slots run long requests of the lowest tier and more of them wait. The bound on an urgent one's wait is one
    of the running requests' remaining time: it takes the first slot that is free. Nothing is sent twice."""

    async def main() -> None:
        started: list[str] = []
        gates: dict[str, asyncio.Event] = {}

        async def script(call: Call) -> None:
            user = json.loads(call.body)["user"]
            started.append(user)
            await gates.setdefault(user, asyncio.Event()).wait()
            await call.reply(200, whole())

        async with FakeUpstream(script) as upstream:
            row = instance(upstream, "i0", kind="llamacpp", limits=Limits(max_context=4096, max_sequences=2))
            router = RouterSettings(policy="least_requests", dispatch="hold", headroom=0.0)
            async with front(instances=(row,), router=router) as f:

                async def ask(user: str, tier: str) -> Any:
                    return await f.post(chat(stream=False, user=user, max_tokens=200), x_weighbridge_tier=tier)

                tasks = []
                for n in range(8):
                    tasks.append(asyncio.create_task(ask(f"low{n}", "batch")))
                    await until(lambda n=n: len(f.gateway.driver.flights) == n + 1)
                await until(lambda: len(started) == 2)
                tasks.append(asyncio.create_task(ask("urgent", "interactive")))
                await until(lambda: len(f.gateway.driver.flights) == 9)
                assert f.gateway.driver.router.held_requests == 7
                gates["low1"].set()
                await until(lambda: len(started) == 3)
                assert started == ["low0", "low1", "urgent"], "before six that came earlier"
                for n in range(8):
                    gates.setdefault(f"low{n}", asyncio.Event()).set()
                gates["urgent"].set()
                replies = await asyncio.gather(*tasks)
                assert {reply.status for reply in replies} == {200}
                assert Counter(started).most_common(1)[0][1] == 1, "nothing was preempted and sent again"
                assert started[3:] == [f"low{n}" for n in range(2, 8)], "equals keep their order"
                f.assert_idle()

    run(main(), 30.0)


@asynccontextmanager
async def starting(instances: Any) -> AsyncIterator[Front]:
    """A gateway that does not wait for all its engines."""
    router = RouterSettings(policy="least_requests")
    gateway = Gateway(GatewaySettings(port=0, admin_port=0, health=QUICK, instances=instances, router=router), {})
    await gateway.start()
    client = HttpClient()
    try:
        assert await gateway.wait_ready(10.0)
        yield Front(gateway, client)
    finally:
        await client.close()
        await gateway.stop()


def test_probes_of_an_engine_see_it_load_and_come_up() -> None:
    """vLLM does not listen while it loads; nothing is sent before its first good probe."""

    async def main() -> None:
        holder = FakeUpstream(answer)
        await holder.__aenter__()
        port = holder.port
        await holder.__aexit__()
        async with FakeUpstream(answer) as ready:
            rows = (instance(ready, "i0"), instance(FakeUpstream(answer, port=port), "i1"))
            async with starting(rows) as f:
                endpoint = f.gateway.driver.endpoints["i1"]
                assert f.gateway.health.describe(endpoint) == "starting"
                for _ in range(6):
                    assert (await f.post(chat(stream=False))).status == 200
                assert len(ready.calls) == 6
                async with FakeUpstream(answer, port=port):
                    await until(lambda: endpoint.up, 10.0)

    run(main())
