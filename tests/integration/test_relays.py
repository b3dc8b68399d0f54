"""Relay processes in front of one Router process: equal text, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import DONE, MODEL, ROLE, answer, chat, frame, text_of, usage_frame
from tests.support.private import assert_private
from tests.support.served import Served, serve
from tests.support.upstream import Call, FakeUpstream, Script
from weighbridge.core.event_log import LogReader
from weighbridge.http import HttpClient
from weighbridge.http.client import Reply
from weighbridge.http.errors import ExchangeFailed
from weighbridge.routing.replay import check

SETTINGS = """
relays: 2
router: {policy: least_requests%s}
health: {slow_start_s: 0, interval_s: 0.2}
keys:
  - {sha256: 2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90, tenant: alice}
  - {sha256: 81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9, tenant: bob, tokens_per_minute: 60}
instances:
"""
ALICE, BOB = "alice", "bob"
INSTANCE = "  - {name: %s, url: '%s', kind: openai, models: [%s], limits: {max_sequences: 4}}\n"


class Fleet:
    """A served gateway with relays, and clients of it that never share a connection."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.clients: list[HttpClient] = []

    async def post(self, body: bytes | None = None, key: str = ALICE, **headers: str) -> Reply:
        client = HttpClient()
        self.clients.append(client)
        pairs = [("authorization", f"Bearer {key}"), *((k.replace("_", "-"), v) for k, v in headers.items())]
        url = self.served.url + "/v1/chat/completions"
        return await client.request("POST", url, body=body or chat(stream=True), headers=pairs, timeout_s=30.0)

    async def get(self, path: str, *, admin: bool = True) -> Any:
        return await asyncio.to_thread(self.served.get, path, admin=admin)

    async def until(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        limit = time.monotonic() + timeout_s
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < limit, (self.served.data_dir / "stderr.txt").read_text()
            await asyncio.sleep(0.05)

    async def assert_idle(self) -> None:
        fleet = await asyncio.to_thread(self.served.wait_idle)
        for row in fleet.values():
            assert [row[k] for k in ("in_flight", "prefill_tokens", "decode_tokens", "kv_tokens")] == [0] * 4, row
        await self.until(lambda: self.served.get("/fleet")["live_requests"] == 0)

    def metric(self, begin: str) -> float:
        """The sum of a metric's lines that begin so."""
        text: str = self.served.get("/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(begin))


@contextlib.asynccontextmanager
async def relayed(folder: Path, *scripts: Script, router: str = "", more: str = "") -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(FakeUpstream(script)) for script in scripts]
        file = folder / "fleet.yaml"
        rows = "".join(INSTANCE % (f"i{n}", u.url, MODEL) for n, u in enumerate(upstreams))
        file.write_text(SETTINGS % router + rows + more)
        running = serve(folder, "--config", str(file))
        served = await asyncio.to_thread(running.__enter__)
        fleet = Fleet(served)
        try:
            yield fleet
        finally:
            for client in fleet.clients:
                await client.close()
            await asyncio.to_thread(running.__exit__, None, None, None)


def ends(folder: Path) -> Counter[str]:
    """How often each request ended, over all event logs of a run."""
    counted: Counter[str] = Counter()
    for path in sorted(folder.glob("events/events-*.jsonl")):
        for line in path.read_text().splitlines()[1:]:
            entry = json.loads(line)
            event = entry["e"]
            kind = event["type"]
            if kind in ("finished", "cancelled") or (kind == "failed" and not event.get("retriable")):
                counted[event["request_id"]] += 1
            counted.update(a["request_id"] for a in entry["a"] if a["type"] == "reject")
    return counted


def arrived(folder: Path) -> set[str]:
    """The requests that any event log of a run knows."""
    found = set()
    for path in folder.glob("events/events-*.jsonl"):
        for line in path.read_text().splitlines()[1:]:
            event = json.loads(line)["e"]
            if event["type"] in ("arrived", "adopted"):
                found.add(event["request"]["id"])
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_text_is_equal_through_both_relays_and_everything_is_counted_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with relayed(tmp_path, answer, answer, more=f"access_log: {tmp_path}/access\n") as fleet:
            replies = await asyncio.gather(*(fleet.post(chat(stream=n % 2 == 0)) for n in range(40)))
            for n, reply in enumerate(replies):
                assert reply.status == 200
                text = text_of(reply.body) if n % 2 == 0 else reply.json()["choices"][0]["message"]["content"]
                assert text == "abc"
            explained = await fleet.post(x_weighbridge_explain="1")
            decision = json.loads(explained.header(b"x-weighbridge-decision"))
            assert decision["chosen"] in ("i0", "i1")
            assert len(decision["candidates"]) == 2
            assert (await fleet.post(key="mallory")).status == 401
            # one bucket for both relays: 60 tokens a minute are two requests of 20 and a bit, however they are spread
            statuses = sorted([(await fleet.post(key=BOB)).status for _ in range(4)])
            assert statuses == [200, 200, 200, 429] or statuses == [200, 200, 429, 429], statuses
            assert_private(fleet.served.process.pid, "2bd806c9", "alice", "bob")
            await fleet.assert_idle()
            fine = 41 + statuses.count(200)
            await fleet.until(lambda: fleet.metric('weighbridge_requests_total{endpoint="chat",instance="i') == fine)
            assert fleet.metric("weighbridge_request_output_tokens_count") == fine
            assert fleet.metric("weighbridge_http_refused") >= 1
            assert fleet.metric("weighbridge_relay_up") == 2
            decisions = (await fleet.get("/decisions?last=2000"))["decisions"]
            assert len(decisions) == fine
            assert {d["outcome"]["outcome"] for d in decisions} == {"ok"}
        lines = [json.loads(x) for p in tmp_path.glob("access/*.jsonl") for x in p.read_text().splitlines()]
        assert len(lines) == 41 + 4 + 1
        assert len(list(tmp_path.glob("access/*.jsonl"))) == 2
        assert {line["attempts"] for line in lines if line["outcome"] == "ok"} == {1}
        counted = ends(tmp_path)
        assert set(counted.values()) == {1}
        assert set(counted) == arrived(tmp_path)

    asyncio.run(run())


def test_a_killed_router_loses_no_stream_and_new_requests_are_served_by_the_next_one(tmp_path: Path) -> None:
    async def run() -> None:
        killed, go_on, more = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def engine(call: Call) -> None:
            if killed.is_set() or not json.loads(call.body).get("stream"):
                await answer(call)
                return
            await call.sse_head()
            await call.chunk(ROLE)
            await call.chunk(frame("a"))
            await (go_on if len(upstream_calls) % 2 else more).wait()
            upstream_calls.append(call)
            for text in "bc":
                await call.chunk(frame(text))
                await asyncio.sleep(0.01)
            await call.chunk(frame(finish="stop"))
            await call.chunk(usage_frame(9, 3))
            await call.chunk(DONE)
            await call.last_chunk()

        upstream_calls: list[Call] = []
        holds = ", dispatch: hold"
        async with relayed(tmp_path, engine, router=holds) as fleet:
            running = [asyncio.create_task(fleet.post()) for _ in range(4)]
            await fleet.until(lambda: fleet.served.fleet()["i0"]["in_flight"] == 4)
            held = [asyncio.create_task(fleet.post(chat(stream=False))) for _ in range(3)]
            await fleet.until(lambda: fleet.served.get("/fleet")["held_requests"] == 3)
            await asyncio.sleep(0.3)  # the event log is written every quarter of a second
            os.kill(fleet.served.ready["router_pid"], signal.SIGKILL)
            killed.set()
            late = [asyncio.create_task(fleet.post(chat(stream=n == 0))) for n in range(3)]
            await asyncio.sleep(0.1)
            go_on.set()  # ends while there is no Router

            def back() -> bool:
                with contextlib.suppress(OSError):
                    return bool(fleet.served.fleet()["i0"]["in_flight"])
                return False

            await fleet.until(back)
            more.set()
            for reply in await asyncio.gather(*running):
                assert reply.status == 200
                assert text_of(reply.body) == "abc"
                assert reply.body.endswith(DONE)
            for reply in await asyncio.gather(*held, *late):
                assert reply.status == 200, reply.body
            assert (await fleet.post()).status == 200
            await fleet.assert_idle()
        counted = ends(tmp_path)
        assert len(counted) == 4 + 3 + 3 + 1
        assert set(counted.values()) == {1}, counted
        assert set(counted) == arrived(tmp_path)
        logs = sorted(tmp_path.glob("events/events-*.jsonl"))
        assert len(logs) == 2
        for path in logs:  # the second begins with what the first Router had begun, and decides alike all the same
            with path.open("rb") as stream:
                reader = LogReader(stream)
                assert check(reader.header, reader).mismatches == ()

    asyncio.run(run())


def stands_after_a(go_on: asyncio.Event) -> Script:
    """An engine whose streams stop after their first text until `go_on`."""

    async def engine(call: Call) -> None:
        if not json.loads(call.body).get("stream"):
            await answer(call)
            return
        await call.sse_head()
        await call.chunk(ROLE)
        await call.chunk(frame("a"))
        await go_on.wait()
        for data in (frame("b"), frame("c"), frame(finish="stop"), DONE):
            await call.chunk(data)
        await call.last_chunk()

    return engine


def test_a_router_that_stands_still_is_replaced_and_loses_no_stream(tmp_path: Path) -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        async with relayed(tmp_path, stands_after_a(go_on), more="router_wait_s: 2\n") as fleet:
            running = [asyncio.create_task(fleet.post()) for _ in range(4)]
            await fleet.until(lambda: fleet.served.fleet()["i0"]["in_flight"] == 4)
            stopped = fleet.served.ready["router_pid"]
            os.kill(stopped, signal.SIGSTOP)  # it lives, keeps its sockets open, and does nothing any more
            await fleet.until(lambda: not alive(stopped))

            def back() -> bool:
                with contextlib.suppress(OSError):
                    return fleet.metric("weighbridge_relay_up") == 2
                return False

            await fleet.until(back)
            go_on.set()
            for reply in await asyncio.gather(*running):
                assert text_of(reply.body) == "abc"
                assert reply.body.endswith(DONE)
            assert (await fleet.post(chat(stream=False))).status == 200
            await fleet.assert_idle()
            assert "the Router has not answered for 2.0 s; it is killed" in (tmp_path / "stderr.txt").read_text()

    asyncio.run(run())


def test_a_killed_relay_releases_its_requests_and_the_others_notice_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        async with relayed(tmp_path, stands_after_a(go_on)) as fleet:
            running = [asyncio.create_task(fleet.post()) for _ in range(16)]  # spread by the kernel, by chance
            await fleet.until(lambda: fleet.served.fleet()["i0"]["in_flight"] == 16)
            os.kill(fleet.served.ready["relay_pids"][0], signal.SIGKILL)
            await fleet.until(lambda: fleet.metric("weighbridge_relays_lost") == 1)
            await fleet.until(lambda: fleet.metric("weighbridge_relay_up") == 2)
            left = (await asyncio.to_thread(fleet.served.fleet))["i0"]["in_flight"]
            go_on.set()
            replies = await asyncio.gather(*running, return_exceptions=True)
            whole = [r for r in replies if isinstance(r, Reply) and text_of(r.body) == "abc"]
            assert len(whole) == left, "those of the other relay ended well, and only those were counted"
            assert all(isinstance(r, ExchangeFailed) for r in replies if r not in whole)
            assert [r.status for r in await asyncio.gather(*(fleet.post() for _ in range(8)))] == [200] * 8
            await fleet.assert_idle()
            lost = 'weighbridge_requests_total{endpoint="chat",instance="i0",model="m",outcome="relay_lost"}'
            assert await asyncio.to_thread(fleet.metric, lost) == 16 - left

            pids = [int(fleet.metric(f'weighbridge_relay_pid{{relay="{n}"}}')) for n in (1, 2)]
            pids.append(fleet.served.ready["router_pid"])
            os.kill(fleet.served.process.pid, signal.SIGKILL)  # the supervisor: nothing is left
            await fleet.until(lambda: not any(alive(pid) for pid in pids))
        counted = ends(tmp_path)
        assert set(counted.values()) == {1}
        assert len(counted) == 24

    asyncio.run(run())


def test_reload_reaches_every_relay_and_sigterm_drains(tmp_path: Path) -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def engine(call: Call) -> None:
            if json.loads(call.body).get("stream"):
                await go_on.wait()
            await answer(call)

        more = "unready_s: 0.4\n"
        async with relayed(tmp_path, engine, engine, more=more) as fleet:
            file = tmp_path / "fleet.yaml"
            text = file.read_text()
            file.write_text(text.replace("81b637d8", "91b637d8"))  # bob's key is another one now
            fleet.served.process.send_signal(signal.SIGHUP)
            said = tmp_path / "stderr.txt"
            await fleet.until(lambda: "reloaded: changed keys" in said.read_text())
            plain = chat(stream=False)
            replies = await asyncio.gather(*(fleet.post(plain, key=BOB) for _ in range(8)))
            assert [r.status for r in replies] == [401] * 8
            file.write_text(text + "oops: 1\n")
            fleet.served.process.send_signal(signal.SIGHUP)
            await fleet.until(lambda: "not reloaded, the old settings stay" in said.read_text())
            file.write_text(text.replace("name: i1", "name: new"))
            request = urllib.request.Request(fleet.served.admin + "/reload", method="POST")
            told = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read().decode())
            assert json.loads(told) == {"changes": ["added new", "removed i1", "changed keys"]}
            assert (await fleet.post(plain, key=BOB)).status == 200
            await fleet.until(lambda: set(fleet.served.fleet()) == {"i0", "new"})
            await fleet.until(lambda: all(row["up"] for row in fleet.served.fleet().values()))
            explained = [await fleet.post(plain, x_weighbridge_explain="1") for _ in range(4)]
            assert {json.loads(r.header(b"x-weighbridge-decision") or b"")["chosen"] for r in explained} == {
                "i0",
                "new",
            }

            running = [asyncio.create_task(fleet.post()) for _ in range(6)]
            await fleet.until(lambda: fleet.served.get("/fleet")["live_requests"] == 6)
            fleet.served.process.send_signal(signal.SIGTERM)

            def unready() -> bool:
                for admin in (True, False):
                    try:
                        fleet.served.get("/readyz", admin=admin)
                        return False
                    except urllib.error.HTTPError as error:
                        assert error.code == 503
                return True

            await fleet.until(unready, 0.4)
            assert (await fleet.post(plain)).status == 200, "announced, and still serving"
            go_on.set()
            assert [text_of(r.body) for r in await asyncio.gather(*running)] == ["abc"] * 6
            assert await asyncio.to_thread(fleet.served.process.wait, 20) == 0
            pids = [fleet.served.ready["router_pid"], *fleet.served.ready["relay_pids"]]
            assert not any(alive(pid) for pid in pids)

    asyncio.run(run())


@pytest.mark.engine
def test_embedded_engines_outlive_their_router(tmp_path: Path) -> None:
    async def run() -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text("engines: [{name: cpu-0, threads: 1, slots: 2, context_tokens: 512, probe: false}]\n")
        running = serve(tmp_path, "--config", str(file), "--relays", "1")
        served = await asyncio.to_thread(running.__enter__)
        try:
            fleet = Fleet(served)
            ask = {"model": "smollm2-135m-instruct", "prompt": "Once", "max_tokens": 40, "ignore_eos": True}
            client = HttpClient()
            url = served.url + "/v1/completions"
            killed = False
            async with client.stream("POST", url, body=json.dumps({**ask, "stream": True}).encode()) as stream:
                body = b""
                async for data in stream:
                    body += data
                    if not killed and body.count(b"data:") > 3:
                        os.kill(served.ready["router_pid"], signal.SIGKILL)
                        killed = True
            assert killed
            assert body.rstrip().endswith(b"[DONE]")
            assert body.count(b"data:") >= 40
            again = await client.request("POST", url, body=json.dumps(ask).encode(), timeout_s=30.0)
            assert (again.status, again.json()["usage"]["completion_tokens"]) == (200, 40)
            assert all(alive(i["pid"]) for i in served.instances)
            await fleet.assert_idle()
            await client.close()
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)

    asyncio.run(run())
