"""Pairs whose legs run at once, Mooncake and SGLang bootstrap: failures of either leg, batches, bad configurations."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.gateway import answer, chat, text_of
from tests.support.loop import run, until
from tests.support.pairs import Mooncake, mooncake, pair
from tests.support.upstream import Call
from weighbridge.core.errors import ConfigError
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings
from weighbridge.http import ClientLimits
from weighbridge.routing.router import RouterSettings


@pytest.mark.parametrize("stream", [True, False])
def test_mooncake_legs_start_at_once_and_meet_by_transfer_id(stream: bool) -> None:
    async def main() -> None:
        fake = Mooncake(ranks=2)
        async with mooncake(fake) as (f, p, d):
            body = chat(stream=stream, min_tokens=5)
            reply = await f.post(body)
            assert reply.status == 200
            first, second = json.loads(p.calls[0].body), json.loads(d.calls[0].body)
            given, taken = first["kv_transfer_params"], second["kv_transfer_params"]
            assert (given["do_remote_decode"], given["do_remote_prefill"]) == (True, False)
            assert (taken["do_remote_decode"], taken["do_remote_prefill"]) == (False, True)
            assert given["transfer_id"] == taken["transfer_id"]
            assert (first["stream"], first["max_tokens"], "min_tokens" in first) == (False, 1, False)
            rank = p.calls[0].headers["x-data-parallel-rank"]
            assert taken["remote_engine_id"] == f"engine-{rank}"
            assert taken["remote_bootstrap_addr"] == f"http://127.0.0.1:{fake.bootstrap.port}"
            assert "x-data-parallel-rank" not in d.calls[0].headers
            del second["kv_transfer_params"]
            assert second.pop("stream_options", None) == ({"include_usage": True} if stream else None)
            assert json.dumps(second) == json.dumps(json.loads(body)), "nothing else is changed for the decode leg"
            await f.post(body)
            assert json.loads(p.calls[1].body)["kv_transfer_params"]["transfer_id"] != given["transfer_id"]
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("protocol", ["bootstrap", "mooncake"])
@pytest.mark.parametrize("how", ["status", "reset", "silent"])
def test_a_prefill_leg_that_fails_or_hangs_frees_the_decode_leg_at_once(protocol: str, how: str) -> None:
    async def broken(call: Call) -> None:
        if how == "status":
            await call.reply(500, b"{}")
        elif how == "reset":
            call.reset()
        else:
            await call.wait_closed(20.0)

    async def waits(call: Call) -> None:
        if "kv_transfer_params" not in json.loads(call.body) and protocol == "mooncake":
            await answer(call)
        else:
            await call.wait_closed(20.0)

    async def main() -> None:
        quick = {"client": ClientLimits(head_s=0.2)} if how == "silent" else {}
        pairs = (
            mooncake(Mooncake(), broken, waits, **quick)
            if protocol == "mooncake"
            else pair(broken, waits, kind="sglang", **quick)
        )
        async with pairs as (f, p, d):
            reply = await f.post(chat())
            alone = protocol == "mooncake"  # SGLang's decode engines answer nothing without a prefill engine
            assert (reply.status, len(p.calls)) == ((200, 2) if alone else (502, 3)), "each pair runs both legs anew"
            if alone:
                assert text_of(reply.body) == "abc"
                d.calls.pop()
            await until(lambda: all(c.peer_closed_s is not None for c in d.calls), 1.0)
            rooms = {json.dumps(json.loads(c.body).get("bootstrap_room", c.body.decode())) for c in d.calls}
            assert len(rooms) == len(d.calls) > 0 or how != "silent"
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("protocol", ["bootstrap", "mooncake"])
@pytest.mark.parametrize("how", ["status", "reset", "client"])
def test_a_decode_leg_that_fails_frees_the_prefill_leg_at_once(protocol: str, how: str) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def broken(call: Call) -> None:
            reached.set()
            if how == "status":
                await call.reply(500, b"{}")
            elif how == "reset":
                call.reset()
            else:
                await call.wait_closed(20.0)

        async def computes(call: Call) -> None:
            await call.wait_closed(20.0)

        pairs = (
            mooncake(Mooncake(), computes, broken) if protocol == "mooncake" else pair(computes, broken, kind="sglang")
        )
        async with pairs as (f, p, d):
            task = asyncio.create_task(f.post(chat()))
            await reached.wait()
            if how == "client":
                await until(lambda: len(p.calls) == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert (await task).status == 502
            await until(lambda: all(c.peer_closed_s is not None for c in p.calls), 1.0)
            await until(lambda: not f.gateway.driver.flights)
            tries = 1 if how == "client" else 3
            pairs_tried = 2 if tries == 3 and protocol == "mooncake" else tries
            # a prefill leg given up before its engine read it is no call there
            assert (len(d.calls), len(p.calls) <= pairs_tried) == (tries, True)
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_request_that_either_leg_of_a_pair_refuses_is_the_clients_fault(leg: str) -> None:
    async def refuse(call: Call) -> None:
        await call.reply(400, b'{"error":{"message":"too long"}}')

    async def waits(call: Call) -> None:
        await call.wait_closed(20.0)

    async def main() -> None:
        scripts = (refuse, waits) if leg == "prefill" else (waits, refuse)
        async with pair(*scripts, kind="sglang") as (f, p, d):
            reply = await f.post(chat())
            assert (reply.status, reply.json()["error"]["message"]) == (400, "too long")
            other = d if leg == "prefill" else p
            await until(lambda: all(c.peer_closed_s is not None for c in other.calls), 1.0)
            assert len(p.calls) == 1
            f.assert_idle()

    run(main())


def test_a_mooncake_engine_whose_bootstrap_server_is_silent_is_done_without() -> None:
    async def main() -> None:
        fake = Mooncake(ranks=0)
        async with mooncake(fake, None, answer) as (f, p, d):
            reply = await f.post(chat())
            assert text_of(reply.body) == "abc", "the decode engine computes the prompt itself"
            assert p.calls == []
            assert "kv_transfer_params" not in json.loads(d.calls[0].body)
            f.assert_idle()

    run(main())


def test_a_batch_of_prompts_gets_a_room_each() -> None:
    async def main() -> None:
        async def first(call: Call) -> None:
            await call.reply(200, b"{}")

        async def second(call: Call) -> None:
            await call.reply(200, b'{"choices":[]}')

        async with pair(first, second, kind="sglang") as (f, p, d):
            body = {"model": "m", "prompt": ["a", "b", "c"], "max_tokens": 3}
            assert (await f.post(json.dumps(body).encode(), "/v1/completions")).status == 200
            for call in (p.calls[0], d.calls[0]):
                sent = json.loads(call.body)
                assert len(set(sent["bootstrap_room"])) == 3
                assert sent["bootstrap_host"] == ["127.0.0.1"] * 3
                assert sent["bootstrap_port"] == [8998] * 3
            one = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 3}
            await f.post(json.dumps(one).encode(), "/v1/completions")
            assert isinstance(json.loads(d.calls[1].body)["bootstrap_room"], int), "token ids are one prompt"

    run(main())


@pytest.mark.parametrize(
    ("instances", "router", "words"),
    [
        ([("a", "tgi", "prefill", None)], {}, "must be `mixed`"),
        ([("a", "sglang", "prefill", "two_step")], {}, "does not speak `two_step`"),
        ([("a", "vllm", "prefill", "mooncake"), ("b", "vllm", "decode", None)], {}, "must understand each other"),
        ([("a", "vllm", "prefill", None), ("b", "embedded", "decode", None)], {}, "must understand each other"),
        ([("a", "sglang", "prefill", None), ("b", "sglang", "decode", None)], {"binding": "late"}, "start at once"),
    ],
)
def test_pairs_that_cannot_work_are_refused_before_anything_starts(
    instances: list[tuple[str, str, Any, Any]], router: dict[str, Any], words: str
) -> None:
    rows = tuple(
        InstanceSettings(name=name, url="http://127.0.0.1:9", kind=kind, role=role, transfer=transfer)
        for name, kind, role, transfer in instances
    )
    with pytest.raises(ConfigError, match=words):
        Gateway(GatewaySettings(instances=rows, router=RouterSettings(**router)), {})
