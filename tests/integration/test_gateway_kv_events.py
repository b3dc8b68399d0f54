"""Two embedded engines publish what their caches hold, and the gateway routes by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines import Listening, listening
from tests.support.gateway import Front, front
from tests.support.loop import run, until
from weighbridge.engine.instance import InstanceOptions
from weighbridge.gateway import InstanceSettings
from weighbridge.routing.router import RouterSettings

pytestmark = pytest.mark.engine
SYSTEM = "You answer in one word. Never explain. These are the rules of the house, and they are many: " * 4


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Listening, Listening]]:
    shape: dict[str, Any] = {
        "slots": 2,
        "context_tokens": 640,
        "threads": 1,
        "probe": False,
        "prefix_store_bytes": 0,
        "kv_events": "tcp://127.0.0.1:*",
        "kv_events_replay": "tcp://127.0.0.1:*",
    }
    with listening(InstanceOptions(name="a", **shape)) as a, listening(InstanceOptions(name="b", **shape)) as b:
        yield a, b


def settings(engines: tuple[Listening, Listening]) -> dict[str, Any]:
    instances = tuple(
        InstanceSettings(name=name, url=engine.url, kind="embedded", kv_events="auto")
        for name, engine in zip("ab", engines, strict=True)
    )
    return {"instances": instances, "router": RouterSettings(policy="prefix_affinity")}


def ask(f: Front, question: str, **fields: Any) -> bytes:
    model = f.gateway.driver.endpoints["a"].models[0]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": 4, **fields}).encode()


def believed(f: Front) -> dict[str, int]:
    """Cached tokens the Router saw on each instance at its last decision."""
    decision = f.gateway.driver.decisions[-1].decision
    return {c.instance: c.cached_tokens for c in decision.candidates}


def test_the_router_knows_what_each_engine_holds(engines: tuple[Listening, Listening]) -> None:
    async def main() -> None:
        async with front(**settings(engines)) as f:
            watches = f.gateway.kv.watches
            await until(lambda: all(w.subscribers for w in watches.values()))
            first = (await f.post(ask(f, "Which colour has the sky?"))).json()
            holder = f.gateway.driver.decisions[-1].decision.chosen
            other = "b" if holder == "a" else "a"
            await until(lambda: f.gateway.driver.router.fleet.instances[holder].prefix.precise)
            second = (await f.post(ask(f, "And grass, in summer?"))).json()
            cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            prompt = first["usage"]["prompt_tokens"]
            assert cached > prompt // 2
            assert believed(f)[other] == 0
            assert believed(f)[holder] == pytest.approx(cached, abs=32), "byte blocks by proportion: two blocks at most"
            assert watches[holder].state == "live"

            # somebody else fills its slots, behind the gateway's back: what is gone there is gone here
            engine = engines["ab".index(holder)]
            model = engine.instance.server.model_id
            known = [name for name in list(watches[holder].names._keys) if watches[holder].holds(name)]
            assert len(known) > 5
            for n in range(2):
                text = [{"role": "user", "content": f"{n} completely different words without any system text " * 12}]
                body = {"model": model, "messages": text, "max_tokens": 1}
                assert (await asyncio.to_thread(engine.post, "/v1/chat/completions", body))[0] == 200
            await until(lambda: sum(watches[holder].holds(name) for name in known) < 4)
            third = (await f.post(ask(f, "And snow?"))).json()
            assert third["usage"]["prompt_tokens_details"]["cached_tokens"] < 64
            assert max(believed(f).values()) < 64, "guessing would still credit the whole beginning"
            row = next(r for r in f.gateway.admin.fleet()["instances"] if r["name"] == holder)
            assert row["kv_events"]["lost"] == row["kv_events"]["unreadable"] == row["kv_events"]["orphans"] == 0
            f.assert_idle()

    run(main(), 110.0)


def test_a_gateway_that_comes_later_replays_what_was_published(engines: tuple[Listening, Listening]) -> None:
    async def main() -> None:
        engine = engines[0]
        model = engine.instance.server.model_id
        text = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Before."}]
        assert engine.post("/v1/chat/completions", {"model": model, "messages": text, "max_tokens": 1})[0] == 200
        async with front(**settings(engines)) as f:
            watch = f.gateway.kv.watches["a"]
            await until(lambda: watch.counts.replayed > 0 and len(watch.blocks) > 5)
            assert watch.counts.lost == 0
            # the same words through another kind of request, answered by the other engine: its tokens are the key
            await f.post(ask(f, "Once.", temperature=0))
            await f.post(ask(f, "Twice."))
            await until(lambda: len(watch.names) > 0)
            await f.post(ask(f, "Thrice."))
            assert believed(f)["a"] > 64

    run(main(), 110.0)


def test_tenants_are_told_apart_in_events(engines: tuple[Listening, Listening]) -> None:
    async def main() -> None:
        async with front(**settings(engines)) as f:
            for salt in ("one", "two"):
                await f.post(ask(f, "Who?", cache_salt=salt))
            watches = f.gateway.kv.watches.values()
            await until(lambda: any(len(w.names) > 0 for w in watches))
            assert not any(w.state == "unmatched" for w in watches)

    run(main(), 110.0)


def test_a_prefill_engine_is_known_by_its_events(engines: tuple[Listening, Listening]) -> None:
    async def main() -> None:
        rows = tuple(
            InstanceSettings(name=name, url=engine.url, kind="embedded", kv_events="auto", role=role)
            for name, engine, role in zip("ab", engines, ("prefill", "decode"), strict=True)
        )
        async with front(instances=rows, router=RouterSettings(policy="least_requests")) as f:
            watch = f.gateway.kv.watches["a"]
            await until(lambda: bool(watch.subscribers))
            await f.post(ask(f, "Once more, for the pair."))
            await until(lambda: len(watch.names) > 5 and f.gateway.driver.router.fleet.instances["a"].prefix.precise)
            await f.post(ask(f, "And twice."))
            prefill = [r.decision for r in f.gateway.driver.decisions if r.decision.chosen == "a"][-1]
            assert {c.instance: c.cached_tokens for c in prefill.candidates}["a"] > 64
            f.assert_idle()

    run(main(), 110.0)
