"""A prefill engine that is up and fails: the decode engine computes prompts itself, and health notices who fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.gateway import Front, answer, chat, front, instance, text_of
from tests.support.loop import run, until
from tests.support.pairs import Mooncake, mooncake, pair, prefill
from tests.support.upstream import Call, FakeUpstream, Script
from weighbridge.gateway.settings import HealthSettings
from weighbridge.routing.router import RouterSettings

FAULTS = ("status", "reset", "not_json", "early_end")


async def fail(call: Call, how: str) -> None:
    if how == "status":
        await call.reply(500, b"{}")
    elif how == "reset":
        call.reset()
    elif how == "not_json":
        await call.reply(200, b"<html>")
    else:
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        call.close()


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("policy", ["least_requests", "calibrated"])
@pytest.mark.parametrize("binding", ["auto", "early"])
def test_the_last_try_needs_no_prefill_engine(how: str, policy: str, binding: Any) -> None:
    async def broken(call: Call) -> None:
        await fail(call, how)

    async def main() -> None:
        async with pair(broken, answer, router=RouterSettings(policy=policy, binding=binding)) as (f, p, d):
            for stream in (True, False):
                p.calls.clear()
                d.calls.clear()
                body = chat(stream=stream, stream_options={"include_usage": True}) if stream else chat(stream=False)
                reply = await f.post(body)
                assert reply.status == 200
                assert "abc" in (text_of(reply.body) if stream else reply.body.decode())
                assert (len(p.calls), len(d.calls)) == (2, 1)
                assert d.calls[0].body == body, "the request itself, nothing added"
                (last,) = list(f.gateway.driver.decisions)[-1:]
                assert (last.decision.attempt, last.decision.chosen) == (3, "d0")
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", FAULTS)
def test_a_mooncake_decode_engine_stands_in_too(how: str) -> None:
    async def broken(call: Call) -> None:
        await fail(call, how)

    async def main() -> None:
        fake = Mooncake()

        async def decode(call: Call) -> None:
            if "kv_transfer_params" in json.loads(call.body):
                await call.wait_closed(20.0)
            else:
                await answer(call)

        async with mooncake(fake, broken, decode) as (f, p, d):
            assert text_of((await f.post(chat())).body) == "abc"
            # how a prompt's leg is answered there says nothing: the KV goes another way, so only a failed leg counts
            assert len(p.calls) == 2
            assert sum("kv_transfer_params" not in json.loads(call.body) for call in d.calls) == 1
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["status", "reset"])
def test_an_sglang_pair_has_nobody_to_stand_in_and_says_so(how: str) -> None:
    async def broken(call: Call) -> None:
        await fail(call, how)

    async def waits(call: Call) -> None:
        await call.wait_closed(20.0)

    async def main() -> None:
        health = HealthSettings(interval_s=0.05, timeout_s=2.0, eject_failures=2)
        async with pair(broken, waits, kind="sglang", health=health) as (f, p, d):
            for n in range(1, 3):
                assert (await f.post(chat())).status == 502
                assert len(p.calls) == 3 * n
            assert all("bootstrap_room" in json.loads(call.body) for call in d.calls)
            endpoints = f.gateway.driver.endpoints
            assert endpoints["p0"].up, "the last prefill engine of engines that need one stays, however it fails"
            f.assert_idle()

    run(main())


def test_a_prefill_engine_that_fails_is_ejected_and_the_decode_engine_is_not() -> None:
    async def broken(call: Call) -> None:
        await call.reply(500, b"{}")

    async def main() -> None:
        async with pair(broken, answer) as (f, p, d):
            for _ in range(3):
                assert (await f.post(chat())).status == 200
            endpoints = f.gateway.driver.endpoints
            assert (endpoints["p0"].up, endpoints["d0"].up) == (False, True)
            assert len(p.calls) == 5, "five failures in a row"
            assert (await f.post(chat())).status == 200
            assert len(p.calls) == 5, "while it is out nobody tries it"
            assert len(d.calls) == 4
            assert f.gateway.driver.decisions[-1].decision.attempt == 1
            f.assert_idle()

    run(main())


def test_only_failures_in_a_row_eject_a_prefill_engine() -> None:
    async def main() -> None:
        tries = 0

        async def every_other(call: Call) -> None:
            nonlocal tries
            tries += 1
            await (call.reply(500, b"{}") if tries % 2 else prefill(call))

        async with pair(every_other, answer) as (f, p, _):
            for _ in range(8):
                assert (await f.post(chat())).status == 200
            assert len(p.calls) == 16
            assert f.gateway.driver.endpoints["p0"].up
            f.assert_idle()

    run(main())


def test_the_only_decode_engine_is_never_ejected() -> None:
    async def broken(call: Call) -> None:
        await call.reply(500, b"{}")

    async def main() -> None:
        async with pair(prefill, broken) as (f, _, d):
            for _ in range(3):
                assert (await f.post(chat())).status == 502
            assert len(d.calls) == 9
            assert f.gateway.driver.endpoints["d0"].up, "a prefill engine alone answers nobody"
            f.assert_idle()

    run(main())


@asynccontextmanager
async def mixed_fleet(*scripts: tuple[str, Script], **fields: Any) -> AsyncIterator[tuple[Front, list[FakeUpstream]]]:
    upstreams = [FakeUpstream(script) for _, script in scripts]
    for upstream in upstreams:
        await upstream.__aenter__()
    try:
        rows = tuple(
            instance(upstream, f"{role}{n}", role=role, kind="vllm")
            for n, (upstream, (role, _)) in enumerate(zip(upstreams, scripts, strict=True))
        )
        async with front(instances=rows, router=RouterSettings(policy="least_requests"), **fields) as f:
            yield f, upstreams
    finally:
        for upstream in upstreams:
            await upstream.__aexit__()


def test_another_prefill_engine_is_asked_first() -> None:
    async def broken(call: Call) -> None:
        await call.reply(500, b"{}")

    async def main() -> None:
        async with mixed_fleet(("prefill", broken), ("prefill", prefill), ("decode", answer)) as (f, (bad, good, d)):
            for n in range(1, 5):
                assert (await f.post(chat())).status == 200
                assert len(good.calls) == n
            assert len(bad.calls) <= 4
            assert all("kv_transfer_params" in json.loads(call.body) for call in d.calls)
            f.assert_idle()

    run(main())


def test_a_decode_engine_that_failed_is_not_the_one_to_stand_in() -> None:
    async def broken(call: Call) -> None:
        await call.reply(500, b"{}")

    async def main() -> None:
        scripts = (("prefill", broken), ("decode", broken), ("decode", answer))
        async with mixed_fleet(*scripts) as (f, (p, _, second)):
            p.script = prefill
            replies = []
            for _ in range(4):
                replies.append(await f.post(chat()))
                p.script = broken if p.script is prefill else prefill
            assert [reply.status for reply in replies] == [200] * 4
            assert second.calls
            f.assert_idle()

    run(main())


def test_a_client_that_leaves_the_last_try_leaves_nothing_running() -> None:
    async def broken(call: Call) -> None:
        await call.reply(500, b"{}")

    async def stuck(call: Call) -> None:
        await call.wait_closed()

    async def main() -> None:
        async with pair(broken, stuck) as (f, _, d):
            task = asyncio.create_task(f.post(chat()))
            await until(lambda: len(d.calls) == 1)
            task.cancel()
            await until(lambda: d.calls[0].peer_closed_s is not None, 1.0)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()

    run(main())
