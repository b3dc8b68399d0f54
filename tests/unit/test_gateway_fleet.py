"""Health, restarts, models, the admin listener and the parity of the recorded event log."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import QUICK, answer, chat, data_of, frame, front, instance
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.event_log import LogReader
from weighbridge.core.events import RequestArrived
from weighbridge.core.instance import Limits, Rates
from weighbridge.cost.profile import Profile, Provenance, encode_profile
from weighbridge.gateway.settings import HealthSettings
from weighbridge.routing.replay import check
from weighbridge.routing.router import RouterSettings


def fleet_of(reply: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in reply.json()["instances"]}


def test_an_engine_that_dies_is_out_and_comes_back_as_a_new_generation() -> None:
    async def main() -> None:
        async def slow(call: Call) -> None:
            if not json.loads(call.body).get("stream"):
                await answer(call)
                return
            await call.sse_head()
            await call.chunk(frame("a"))
            await call.wait_closed(30)

        async with FakeUpstream(answer) as good:
            bad = FakeUpstream(slow)
            await bad.__aenter__()
            async with front(bad, good) as f:
                streams = [asyncio.create_task(f.post(chat())) for _ in range(6)]
                await until(lambda: len(bad.calls) == 3)
                for call in bad.calls:
                    call.reset()
                await bad.__aexit__()
                replies = await asyncio.gather(*streams)
                ends = [data_of(r.body)[-1] for r in replies]
                assert sorted("error" in e for e in ends) == [False] * 3 + [True] * 3
                for _ in range(10):
                    assert (await f.post(chat(stream=False))).status == 200, "the survivor takes over"
                await until(lambda: not f.gateway.driver.endpoints["i0"].up)
                row = fleet_of(await f.get("/fleet", admin=True))["i0"]
                assert (row["health"], row["up"], row["in_flight"]) == ("down", False, 0)
                again = FakeUpstream(answer, port=bad.port)
                async with again:
                    await until(lambda: f.gateway.driver.endpoints["i0"].up)
                    assert f.gateway.driver.endpoints["i0"].generation == 2
                    for _ in range(6):
                        assert (await f.post(chat())).status == 200
                    assert again.calls, "it is used again"
                    f.assert_idle()

    run(main())


def test_a_missed_probe_does_not_remove_an_engine() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two, front(one, two) as f:
            endpoint = f.gateway.driver.endpoints["i0"]
            state = f.gateway.health._states["i0"]
            for _ in range(5):
                one.health = 500
                await until(lambda: state.bad >= 1)
                one.health = 200
                await until(lambda: state.bad == 0)
                assert endpoint.up
            one.health = 500
            await until(lambda: not endpoint.up)
            assert state.bad >= QUICK.fall
            one.health = 200
            await until(lambda: endpoint.up)
            assert endpoint.generation == 1, "it never stopped listening, so its cache lives on"

    run(main())


def test_an_engine_whose_requests_fail_is_ejected_though_its_probe_is_fine() -> None:
    async def main() -> None:
        async def broken(call: Call) -> None:
            await call.reply(500, b"{}")

        health = HealthSettings(interval_s=0.05, eject_failures=3, eject_s=0.3)
        async with (
            FakeUpstream(broken) as bad,
            FakeUpstream(answer) as good,
            front(bad, good, health=health) as f,
        ):
            endpoint = f.gateway.driver.endpoints["i0"]

            async def breaker() -> str:
                text = (await f.get("/metrics", admin=True)).body.decode()
                return str(text.partition('weighbridge_instance_breaker_state{instance="i0"} ')[2][:3])

            assert await breaker() == "0.0"
            while endpoint.up:
                assert (await f.post(chat())).status == 200
            assert f.gateway.health.describe(endpoint) == "ejected"
            assert await breaker() == "1.0"
            seen = len(bad.calls)
            for _ in range(5):
                assert (await f.post(chat())).status == 200
            assert len(bad.calls) == seen
            await until(lambda: endpoint.up)
            assert await breaker() == "2.0"
            bad.script = answer
            for _ in range(6):
                assert (await f.post(chat())).status == 200
            assert len(bad.calls) > seen
            assert await breaker() == "0.0"

    run(main())


def test_the_last_engine_is_never_ejected() -> None:
    async def main() -> None:
        async def broken(call: Call) -> None:
            await call.reply(500, b"{}")

        async with FakeUpstream(broken) as one, FakeUpstream(broken) as two, front(one, two) as f:
            for _ in range(20):
                assert (await f.post(chat())).status in (502, 503)
            assert sum(e.up for e in f.gateway.driver.endpoints.values()) == 1
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("status", [429, 503])
def test_engines_that_are_full_are_neither_ejected_nor_called_broken(status: int) -> None:
    async def main() -> None:
        async def full(call: Call) -> None:
            await call.reply(status, b'{"error":{"message":"full"}}')

        async with FakeUpstream(full) as one, FakeUpstream(full) as two, front(one, two) as f:
            for _ in range(10):
                reply = await f.post(chat())
                assert reply.status == 503
                assert int(reply.header(b"retry-after")) >= 1
                assert int(reply.header(b"retry-after-ms")) >= 1
            assert all(e.up for e in f.gateway.driver.endpoints.values())

    run(main())


def test_no_instance_is_503_with_retry_after_and_unknown_model_404() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, front(one) as f:
            f.gateway.health.drain(f.gateway.driver.endpoints["i0"])
            reply = await f.post(chat())
            assert reply.status == 503
            assert reply.header(b"x-weighbridge-reason") == b"no_instance"
            assert int(reply.header(b"retry-after")) >= 1
            reply = await f.post(chat(model="nobody's 🙂"))
            assert reply.status == 404
            assert reply.json()["error"]["code"] == "model_not_found"
            assert (await f.get("/readyz", admin=True)).status == 503
            f.gateway.health.undrain(f.gateway.driver.endpoints["i0"])
            await until(lambda: f.gateway.driver.endpoints["i0"].up)
            assert (await f.post(chat())).status == 200
            f.assert_idle()

    run(main())


def test_models_are_merged_over_healthy_instances() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two:
            instances = (
                instance(one, "i0", models=("org/name-7b", "m"), limits=Limits(max_context=4096)),
                instance(two, "i1", models=("m",), limits=Limits(max_context=1024), aliases={"alias-模型": "m"}),
            )
            async with front(instances=instances) as f:
                await until(lambda: all(e.up for e in f.gateway.driver.endpoints.values()))
                rows = {row["id"]: row for row in (await f.get("/v1/models")).json()["data"]}
                assert set(rows) == {"org/name-7b", "m", "alias-模型"}
                assert rows["m"]["max_model_len"] == 1024
                for path in ("org/name-7b", "org%2Fname-7b"):
                    assert (await f.get(f"/v1/models/{path}")).json()["id"] == "org/name-7b"
                missing = await f.get("/v1/models/nope")
                assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")
                reply = await f.post(chat(model="alias-模型", extra={"z": 1, "a": 2}))
                assert reply.status == 200
                sent = two.calls[0].body
                assert json.loads(sent)["model"] == "m"
                assert b'"extra": {"z": 1, "a": 2}' in sent
                f.gateway.health.drain(f.gateway.driver.endpoints["i1"])
                rows = {row["id"]: row for row in (await f.get("/v1/models")).json()["data"]}
                assert set(rows) == {"org/name-7b", "m"}
                assert rows["m"]["max_model_len"] == 4096

    run(main())


def test_admin_listener() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, front(one) as f:
            for _ in range(3):
                await f.post(chat(), x_request_id="mine-1", x_weighbridge_explain="1")
            row = fleet_of(await f.get("/fleet", admin=True))["i0"]
            assert (row["up"], row["in_flight"], row["kv_tokens"]) == (True, 0, 0)
            rows = (await f.get("/decisions?last=2", admin=True)).json()["decisions"]
            assert [r["request_id"] for r in rows] == ["mine-1", "mine-1"]
            assert rows[0]["chosen"] == "i0"
            assert rows[0]["outcome"]["outcome"] == "ok"
            assert rows[0]["outcome"]["output_tokens"] == 3
            assert (await f.get("/decisions?last=x", admin=True)).status == 400
            text = (await f.get("/metrics", admin=True)).body.decode()
            assert 'weighbridge_requests_total{endpoint="chat",instance="i0",model="m",outcome="ok"} 3.0' in text
            assert 'weighbridge_instance_up{instance="i0"} 1.0' in text
            assert 'weighbridge_request_ttft_seconds_count{instance="i0",model="m",streaming="true"} 3.0' in text
            assert "weighbridge_fleet_load_ratio{" not in text, "no cost of i0 is known"
            assert "least_requests" in (await f.get("/policies", admin=True)).json()["known"]
            assert (await f.get("/healthz", admin=True)).status == 200
            assert (await f.get("/readyz", admin=True)).status == 200
            assert (await f.get("/fleet")).status == 404, "not on the public listener"

    run(main())


def test_the_load_on_the_fleet_is_exported_and_clients_may_allow_what_overload_does(tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    rates = Rates(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0)
    limits = Limits(token_budget=2048, kv_blocks=1000)
    profile.write_bytes(encode_profile(Profile(rates=rates, limits=limits, provenance=Provenance())))

    async def main() -> str:
        async with FakeUpstream(answer) as one:
            rows = (instance(one, "i0", profile=str(profile)),)
            async with front(instances=rows, data_dir=str(tmp_path)) as f:
                for _ in range(3):
                    await f.post(chat(), x_weighbridge_allow="Defer, clip, dance")
                    await asyncio.sleep(0.05)
                assert f.gateway.writer is not None
                assert f.gateway.writer.sync()
                return (await f.get("/metrics", admin=True)).body.decode()

    loads = dict(re.findall(r'weighbridge_fleet_load_ratio\{what="(\w+)"\} (\S+)', run(main())))
    assert set(loads) == {"tokens", "kv"}
    assert all(0.0 < float(load) < 1.0 for load in loads.values())
    (log,) = tmp_path.glob("events-*.jsonl")
    with log.open("rb") as stream:
        arrived = [entry.e for entry in LogReader(stream, log.name) if isinstance(entry.e, RequestArrived)]
    assert [event.request.allow for event in arrived] == [("clip", "defer")] * 3


def test_request_ids() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, front(one) as f:
            reply = await f.post(chat(), x_request_id="abc-1.2_3")
            assert reply.header(b"x-request-id") == b"abc-1.2_3"
            assert one.calls[-1].headers["x-request-id"] == "abc-1.2_3"
            for bad in ("a b", "x" * 129, 'a"b', "a/b"):
                reply = await f.post(chat(), x_request_id=bad)
                assert reply.header(b"x-request-id") != bad.encode()
                assert reply.header(b"x-request-id").startswith(b"wb-")
            explained = await f.post(chat(), x_weighbridge_explain="1")
            decision = json.loads(explained.header(b"x-weighbridge-decision"))
            assert decision["chosen"] == "i0"
            assert decision["candidates"]

    run(main())


@pytest.mark.parametrize("policy", ["least_tokens", "work", "round_robin", "power_of_two"])
def test_a_recorded_log_replays_to_identical_actions(tmp_path: Path, policy: str) -> None:
    rng = random.Random(3)

    async def script(call: Call) -> None:
        fate = rng.random()
        if fate < 0.1:
            call.reset()
            return
        await asyncio.sleep(rng.random() * 0.01)
        if fate < 0.2:
            await call.reply(400, b'{"error":{"message":"no"}}')
            return
        await answer(call)

    async def main() -> int:
        async with FakeUpstream(script) as one, FakeUpstream(script) as two:
            settings = RouterSettings(policy=policy, seed=5)
            async with front(one, two, router=settings, data_dir=str(tmp_path)) as f:

                async def client(number: int) -> None:
                    await asyncio.sleep(rng.random() * 0.2)
                    text = "shared prefix " * 40 + str(number)
                    limit_s = 0.01 if number % 7 == 0 else 10.0
                    try:
                        async with asyncio.timeout(limit_s):
                            await f.post(chat(messages=[{"role": "user", "content": text}]))
                    except TimeoutError:
                        pass

                await asyncio.gather(*(client(n) for n in range(120)))
                await until(lambda: not f.gateway.driver.flights)
                f.assert_idle()
                assert f.gateway.writer is not None
                assert f.gateway.writer.sync()
                return f.gateway.writer.dropped

    assert run(main()) == 0
    (log,) = tmp_path.glob("events-*.jsonl")
    with log.open("rb") as stream:
        reader = LogReader(stream, log.name)
        parity = check(reader.header, reader)
    assert parity.mismatches == ()
    assert 100 < parity.requests <= 120, "those cancelled at once may never have arrived"
    assert not reader.truncated
