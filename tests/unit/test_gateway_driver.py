"""Orders that the driver cannot carry out: the request they are for ends with 500, and no other notices."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.support.compiled import interpreted
from tests.support.gateway import answer, chat, front, text_of
from tests.support.loop import run, until
from tests.support.relays import Gate
from tests.support.upstream import FakeUpstream
from weighbridge.core.actions import Abort, Action
from weighbridge.core.events import Event, RequestArrived, Tick


class Gathering:
    """A Router whose dispatches of new requests come all together, with the next tick."""

    def __init__(self, router: Any) -> None:
        self.router = router
        self.kept: list[Action] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        actions: list[Action] = self.router.handle(event, now_s)
        if isinstance(event, RequestArrived):
            self.kept += actions
            return []
        if isinstance(event, Tick):
            actions += self.kept
            self.kept = []
        return actions


class OnceUnreadable(dict[str, str]):
    """Aliases that fail the second time they are looked at."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looks += 1
        if self.looks == 2:
            raise RuntimeError("a bug")
        return default


@interpreted
def test_one_order_that_fails_costs_no_other_request() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            driver = f.gateway.driver
            gathering: Any = Gathering(driver.router)
            driver.router = gathering
            endpoint = driver.endpoints["i0"]
            settings = endpoint.settings
            endpoint.settings = msgspec.structs.replace(settings, aliases=OnceUnreadable())
            posts = [asyncio.create_task(f.post(chat())) for _ in range(3)]
            await until(lambda: len(gathering.kept) == 3)
            driver.feed(Tick())
            replies = await asyncio.gather(*posts)
            assert sorted(r.status for r in replies) == [200, 200, 500]
            (broken,) = [r for r in replies if r.status == 500]
            assert broken.header(b"x-weighbridge-reason") == b"internal_error"
            driver.router = gathering.router
            endpoint.settings = settings
            assert (await f.post(chat())).status == 200
            await until(lambda: not driver.flights)
            f.assert_idle()

    run(main())


@interpreted
def test_a_stream_whose_order_fails_is_cut_and_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, front(upstream) as f:
            driver = f.gateway.driver
            first, second = (asyncio.create_task(f.post(chat(), x_request_id=name)) for name in ("a", "b"))
            await until(
                lambda: sum(getattr(x, "first_token_s", None) is not None for x in driver.flights.values()) == 2
            )
            handle = driver.router.handle

            def abort(event: Event, now_s: float) -> list[Action]:
                made = handle(event, now_s)
                if isinstance(event, Tick):
                    made.append(Abort(request_id="a", instance="i0", reason="a test"))
                return made

            def fail(reason: str) -> None:
                raise RuntimeError("a bug")

            monkeypatch.setattr(driver.router, "handle", abort)
            monkeypatch.setattr(type(driver.flights["a"]), "abort", lambda flight, reason: fail(reason))
            driver.feed(Tick())
            assert list(driver.flights) == ["b"]
            gate.open.set()
            cut, whole = await asyncio.gather(first, second, return_exceptions=True)
            assert isinstance(cut, Exception)
            assert not isinstance(whole, BaseException)
            assert text_of(whole.body) == "abc"
            await until(lambda: not driver.flights)
            f.assert_idle()

    run(main())
