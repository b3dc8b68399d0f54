"""Disaggregated requests: the two-step KV transfer, the bootstrap pair, and what happens when a leg fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.gateway import Front, answer, chat, front, instance, text_of
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream, Script
from weighbridge.routing.router import RouterSettings

PARAMS = (
    b'{"do_remote_prefill": true, "remote_block_ids": [[1,2,3]], "remote_engine_id":"6be3c88a", "zzz":1e-7,'
    b' "remote_host": "127.0.0.1", "remote_port": 15600, "remote_blocks_expiry_time":null}'
)


async def prefill(call: Call) -> None:
    await call.reply(200, b'{"id":"p","choices":[],"usage":{"prompt_tokens":9},"kv_transfer_params":' + PARAMS + b"}")


@asynccontextmanager
async def pair(
    prefill_script: Script, decode_script: Script, *, kind: str = "vllm", **fields: Any
) -> AsyncIterator[tuple[Front, FakeUpstream, FakeUpstream]]:
    async with FakeUpstream(prefill_script) as p, FakeUpstream(decode_script) as d:
        extra = {"bootstrap_port": 8998} if kind == "sglang" else {}
        instances = (
            instance(p, "p0", role="prefill", kind=kind, **extra),
            instance(d, "d0", role="decode", kind=kind),
        )
        settings = {"router": RouterSettings(policy="least_requests"), **fields}
        async with front(instances=instances, **settings) as f:
            yield f, p, d


@pytest.mark.parametrize("stream", [True, False])
def test_two_steps(stream: bool) -> None:
    async def main() -> None:
        async with pair(prefill, answer) as (f, p, d):
            body = chat(
                stream=stream,
                min_tokens=5,
                max_completion_tokens=7,
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )
            reply = await f.post(body, x_request_id="join-me")
            assert reply.status == 200
            if stream:
                assert text_of(reply.body) == "abc"
            first, second = p.calls[0], d.calls[0]
            sent = json.loads(first.body)
            assert (sent["stream"], sent["max_tokens"], sent["max_completion_tokens"]) == (False, 1, 1)
            assert "stream_options" not in sent
            assert "min_tokens" not in sent
            assert sent["kv_transfer_params"] == {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
            }
            assert second.body.replace(b'"kv_transfer_params":' + PARAMS + b",", b"") == body, "verbatim, nothing else"
            assert first.headers["x-request-id"] == second.headers["x-request-id"] == "join-me"
            f.assert_idle()

    run(main())


def test_an_engine_that_gives_no_parameters_means_a_plain_decode() -> None:
    async def main() -> None:
        async with pair(answer, answer) as (f, _, d):
            assert (await f.post(chat(stream=False))).status == 200
            assert "kv_transfer_params" not in json.loads(d.calls[0].body)
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["status", "reset", "silent"])
def test_a_failed_decode_leg_redoes_the_prefill(how: str) -> None:
    async def decode(call: Call) -> None:
        if how == "status":
            await call.reply(500, b'{"error":{"message":"Internal server error"}}')
        elif how == "reset":
            call.reset()
        else:
            await call.sse_head()
            call.close()

    async def main() -> None:
        async with pair(prefill, decode) as (f, p, d):
            reply = await f.post(chat())
            assert reply.status == 502
            assert len(d.calls) == 3
            assert len(p.calls) == 3, "parameters are good for one use: each attempt prefills anew"
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["status", "reset"])
def test_a_failed_prefill_leg_is_retried_and_nobody_waits_for_its_kv(how: str) -> None:
    async def main() -> None:
        tries = 0

        async def sometimes(call: Call) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                if how == "status":
                    await call.reply(500, b"{}")
                else:
                    call.reset()
            else:
                await prefill(call)

        async with pair(sometimes, answer) as (f, p, d):
            reply = await f.post(chat())
            assert reply.status == 200
            assert (len(p.calls), len(d.calls)) == (3, 1)
            f.assert_idle()

    run(main())


def test_a_request_the_prefill_engine_refuses_is_the_clients_fault() -> None:
    async def refuse(call: Call) -> None:
        await call.reply(400, b'{"error":{"message":"too long"}}')

    async def main() -> None:
        async with pair(refuse, answer) as (f, p, d):
            assert (await f.post(chat())).status == 400
            assert (len(p.calls), len(d.calls)) == (1, 0)
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_disconnect_ends_either_leg(leg: str) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def stuck(call: Call) -> None:
            reached.set()
            await call.wait_closed()

        scripts = (stuck, answer) if leg == "prefill" else (prefill, stuck)
        async with pair(*scripts) as (f, p, d):
            task = asyncio.create_task(f.post(chat()))
            await reached.wait()
            task.cancel()
            upstream = p if leg == "prefill" else d
            await until(lambda: upstream.calls[0].peer_closed_s is not None, 1.0)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()

    run(main())


def test_late_parameters_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge.gateway.flight.LEASE_S", -1.0)

    async def main() -> None:
        async with pair(prefill, answer) as (f, _, d):
            reply = await f.post(chat())
            assert reply.status == 502
            assert d.calls == [], "what the prefill engine may have freed is never read"
            f.assert_idle()

    run(main())


def test_bootstrap_pairs_are_sent_at_once_with_one_room() -> None:
    async def main() -> None:
        prefilled = asyncio.Semaphore(0)

        async def first(call: Call) -> None:
            prefilled.release()
            await call.reply(200, b"{}")

        async def second(call: Call) -> None:
            await prefilled.acquire()  # as a decode engine waits for its KV
            await answer(call)

        settings = RouterSettings(policy="least_requests", binding="early")
        async with pair(first, second, kind="sglang", router=settings) as (f, p, d):
            reply = await f.post(chat())
            assert text_of(reply.body) == "abc"
            one, two = json.loads(p.calls[0].body), json.loads(d.calls[0].body)
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
                assert one[name] == two[name]
            assert (one["bootstrap_host"], one["bootstrap_port"]) == ("127.0.0.1", 8998)
            assert 0 <= one["bootstrap_room"] < 2**63
            await f.post(chat())
            assert json.loads(p.calls[1].body)["bootstrap_room"] != one["bootstrap_room"]
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["status", "reset"])
def test_a_bootstrap_pair_whose_prefill_fails_lets_the_decode_leg_go(how: str) -> None:
    async def main() -> None:
        async def broken(call: Call) -> None:
            await asyncio.sleep(0.05)
            if how == "status":
                await call.reply(500, b"{}")
            else:
                call.reset()

        async def waits(call: Call) -> None:
            await call.wait_closed()

        settings = RouterSettings(policy="least_requests", binding="early")
        async with pair(broken, waits, kind="sglang", router=settings) as (f, _, d):
            reply = await f.post(chat())
            assert reply.status == 502
            await until(lambda: all(c.peer_closed_s is not None for c in d.calls), 1.0)
            assert len(d.calls) == 3
            f.assert_idle()

    run(main())


def test_clients_cannot_name_addresses_to_the_engines() -> None:
    async def main() -> None:
        async with pair(prefill, answer) as (f, p, d):
            for name in ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
                reply = await f.post(chat(**{name: {"remote_host": "10.0.0.1"}}))
                assert (reply.status, reply.json()["error"]["param"]) == (400, name)
            assert p.calls == d.calls == []

    run(main())
