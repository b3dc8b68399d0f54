"""What may come between an engine's leaving and its successor: undrains, requests, legs that were bound to it."""

import asyncio
import json

import msgspec
import pytest

from tests.support.gateway import answer, chat, front, instance, text_of
from tests.support.loop import run, until
from tests.support.pairs import PARAMS
from tests.support.upstream import Call, FakeUpstream
from tests.unit.test_gateway_membership import Gate
from weighbridge.http import ClientLimits
from weighbridge.http.pool import Pool
from weighbridge.routing.router import RouterSettings


def test_undraining_an_engine_that_leaves_does_not_bring_it_back() -> None:
    """Found by a history: it came up again, left all the same, and the next request was sent to nobody."""

    async def main() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as old, FakeUpstream(answer) as new, front(old) as f:
            stream = asyncio.create_task(f.post(chat()))
            await until(lambda: f.gateway.driver.endpoints["i0"].running == 1)
            leaving = f.gateway.driver.endpoints["i0"]
            await f.gateway.reload(msgspec.structs.replace(f.gateway.settings, instances=(instance(new, "i0"),)))
            url = f"http://127.0.0.1:{f.gateway.admin_port}/instances/undrain?name=i0"
            reply = await f.client.request("POST", url, timeout_s=5.0)
            assert (reply.status, reply.json()["draining"]) == (200, True)
            await asyncio.sleep(0.3)  # several probes
            assert not leaving.up
            assert (await f.post(chat())).status == 503
            gate.open.set()
            assert text_of((await stream).body) == "ab"
            await until(lambda: "i0" in f.gateway.driver.endpoints and f.gateway.driver.endpoints["i0"].up)
            assert text_of((await f.post(chat())).body) == "abc"
            assert len(old.calls) == 1
            f.assert_idle()

    run(main())


def test_while_the_only_engine_is_replaced_its_model_is_busy_and_never_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """404 is final for a client, 503 is not. Found by a history, in the moment in which connections are closed."""
    close = Pool.close

    async def slow(self: Pool) -> None:
        await asyncio.sleep(0.2)
        await close(self)

    monkeypatch.setattr(Pool, "close", slow)

    async def main() -> None:
        async with FakeUpstream(answer) as old, FakeUpstream(answer) as new, front(old) as f:
            assert (await f.post(chat())).status == 200
            await f.gateway.reload(msgspec.structs.replace(f.gateway.settings, instances=(instance(new, "i0"),)))
            seen = set()
            while not new.calls:
                seen.add((await f.post(chat())).status)
                await asyncio.sleep(0.01)
            assert 404 not in seen
            f.assert_idle()

    run(main())


def test_a_bound_decode_engine_that_is_taken_out_between_the_legs_is_not_waited_for() -> None:
    async def main() -> None:
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def slow_prefill(call: Call) -> None:
            reached.set()
            await go_on.wait()
            await call.reply(200, b'{"choices":[],"kv_transfer_params":' + PARAMS + b"}")

        async with FakeUpstream(slow_prefill) as p, FakeUpstream(answer) as d, FakeUpstream(answer) as other:
            rows = (
                instance(p, "p", role="prefill", kind="vllm"),
                instance(d, "d0", role="decode", kind="vllm"),
            )
            router = RouterSettings(policy="least_requests", binding="early")
            async with front(instances=rows, router=router, client=ClientLimits(idle_s=3.0)) as f:
                task = asyncio.create_task(f.post(chat()))
                await reached.wait()
                await f.gateway.add_instance(instance(other, "d1", role="decode", kind="vllm"))
                assert await f.gateway.wait_ready(5.0, ("d1",))
                assert await f.gateway.remove_instance("d0")
                go_on.set()
                reply = await task
                assert (reply.status, text_of(reply.body)) == (200, "abc")
                assert d.calls == []
                assert len(p.calls) == 2, "its KV was for the other one: the prompt is computed anew"
                assert json.loads(other.calls[0].body)["kv_transfer_params"]
                f.assert_idle()

    run(main())
