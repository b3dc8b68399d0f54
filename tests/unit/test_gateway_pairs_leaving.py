"""A client leaves a disaggregated request whose KV can no longer be given up: the request ends all the same."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import ROLE, chat, frame
from tests.support.loop import run, until
from tests.support.pairs import pair
from tests.support.relays import pair as relayed
from tests.support.upstream import Call, FakeUpstream
from weighbridge.gateway.flight import Flight


class Engines:
    """A prefill and a decode engine; the decode engine stops after its first token."""

    def __init__(self, params: bytes = b'{"remote_request_id": "abc"}') -> None:
        self.params = params
        self.freed: list[str] = []
        self.decoding = asyncio.Event()

    async def prefill(self, call: Call) -> None:
        if call.request_line.startswith("DELETE"):
            self.freed.append(call.request_line)
            await call.reply(200, b"{}")
            return
        await call.reply(200, b'{"id":"p","choices":[],"kv_transfer_params":' + self.params + b"}")

    async def decode(self, call: Call) -> None:
        await call.sse_head()
        await call.chunk(ROLE)
        await call.chunk(frame("a"))
        self.decoding.set()
        await call.wait_closed()


async def leave(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_after_the_prefill_engine_was_taken_out() -> None:
    async def main() -> None:
        engines = Engines()
        async with pair(engines.prefill, engines.decode, kind="embedded") as (f, _, d):
            task = asyncio.create_task(f.post(chat()))
            await engines.decoding.wait()
            assert await f.gateway.remove_instance("p0", 5.0)
            await leave(task)
            await until(lambda: d.calls[0].peer_closed_s is not None)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()
            assert engines.freed == []

    run(main())


def test_after_the_prefill_engine_was_taken_out_through_a_relay(tmp_path: Path) -> None:
    async def main() -> None:
        engines = Engines()
        roles = [{"role": "prefill"}, {"role": "decode"}]
        async with (
            FakeUpstream(engines.prefill) as p,
            FakeUpstream(engines.decode) as d,
            relayed(tmp_path, p, d, per=roles) as both,
        ):
            (relay,), router = both.relays, both.router
            assert router is not None
            task = asyncio.create_task(both.post())
            await engines.decoding.wait()
            assert await router.remove_instance("i0", 5.0)
            await until(lambda: "i0" not in relay.desk.endpoints and not relay._retired)
            await leave(task)
            await until(lambda: d.calls[0].peer_closed_s is not None)
            await until(lambda: not router.driver.flights)
            both.assert_idle()

    asyncio.run(main())


@pytest.mark.parametrize("params", [b"[1]", b'{"remote_request_id": "abc", "n": 1e999}', b'{"remote_request_id": 7}'])
def test_whatever_the_parameters_are(params: bytes) -> None:
    async def main() -> None:
        engines = Engines(params)
        async with pair(engines.prefill, engines.decode, kind="embedded") as (f, _, d):
            task = asyncio.create_task(f.post(chat()))
            await engines.decoding.wait()
            await leave(task)
            await until(lambda: d.calls[0].peer_closed_s is not None)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()

    run(main())


def test_a_client_that_leaves_is_counted_out_whatever_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engines = Engines()
        async with pair(engines.prefill, engines.decode, kind="embedded") as (f, _, d):
            task = asyncio.create_task(f.post(chat()))
            await engines.decoding.wait()
            letting_go = Flight.detach

            def broken(flight: Flight) -> None:
                letting_go(flight)
                raise ValueError("a bug")

            monkeypatch.setattr(Flight, "detach", broken)
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            await leave(task)
            await until(lambda: d.calls[0].peer_closed_s is not None)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()

    run(main())
