"""No client can take the id of another one's request: neither the next of ours, nor one that runs."""

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.support.gateway import chat, front, text_of
from tests.support.loop import run, until
from tests.support.relays import Gate, pair
from tests.support.upstream import FakeUpstream


def later(name: bytes, by: int) -> str:
    """The id that the gateway which gave `name` would give `by` requests later."""
    stem, _, number = name.decode().rpartition("-")
    return f"{stem}-{int(number) + by}"


@pytest.mark.parametrize("own", [True, False])
def test_an_id_of_ours_or_one_in_use_is_not_taken_over(own: bool) -> None:
    async def main() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, front(upstream) as f:
            gate.open.set()
            first = (await f.post(chat())).header(b"x-request-id")
            taken = later(first, 2) if own else "mine"
            gate.open.clear()
            posts = [asyncio.create_task(f.post(chat(), x_request_id=taken))]
            await until(lambda: len(upstream.calls) == 2)
            posts += [asyncio.create_task(f.post(chat(), x_request_id=taken)) for _ in range(2)]
            posts.append(asyncio.create_task(f.post(chat())))
            await until(lambda: len(upstream.calls) == 5)
            gate.open.set()
            replies = await asyncio.gather(*posts)
            assert [(r.status, text_of(r.body)) for r in replies] == [(200, "abc")] * 4
            names = [r.header(b"x-request-id").decode() for r in replies]
            assert len(set(names)) == 4
            assert (names[0] == taken) is not own
            f.assert_idle()

    run(main())


def test_an_id_in_use_is_never_given_even_if_it_is_of_ours() -> None:
    async def main() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, front(upstream) as f:
            posts = [asyncio.create_task(f.post(chat()))]
            await until(lambda: len(upstream.calls) == 1)
            f.gateway.surface.ids._numbers = itertools.count(1)  # as if it began anew
            posts.append(asyncio.create_task(f.post(chat())))
            await until(lambda: len(upstream.calls) == 2)
            gate.open.set()
            names = [r.header(b"x-request-id")[-2:] for r in await asyncio.gather(*posts)]
            assert names == [b"-1", b"-2"]
            f.assert_idle()

    run(main())


def test_ids_are_unique_over_relays(tmp_path: Path) -> None:
    async def run() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, pair(tmp_path, upstream, relays=2) as both:
            gate.open.set()
            taken = later((await both.post(relay=0)).header(b"x-request-id"), 3)
            gate.open.clear()
            posts = [asyncio.create_task(both.post(relay=r, x_request_id=taken)) for r in (1, 0, 0)]
            await until(lambda: len(upstream.calls) == 4)
            posts.append(asyncio.create_task(both.post(relay=0)))
            await until(lambda: len(upstream.calls) == 5)
            gate.open.set()
            replies = await asyncio.gather(*posts)
            assert [(r.status, text_of(r.body)) for r in replies] == [(200, "abc")] * 4
            names = [r.header(b"x-request-id").decode() for r in replies]
            assert len(set(names)) == 4
            assert names[3] == taken, "still free for whom it is meant"
            assert both.router is not None
            await until(lambda: not both.router.driver.flights)
            both.assert_idle()

    asyncio.run(run())
