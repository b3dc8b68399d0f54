"""The listener over real sockets: pages, streams, bounds, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from tests.support.loop import run, until
from weighbridge.core.errors import UpstreamError
from weighbridge.dashboard import app as app_module
from weighbridge.dashboard.app import Dashboard
from weighbridge.dashboard.demo import DemoSource
from weighbridge.dashboard.guard import CSP, Guard
from weighbridge.dashboard.hub import Hub
from weighbridge.dashboard.snapshot import Snapshot
from weighbridge.http import HttpClient, SseParser

TOKEN = "a-token-of-some-length"


@contextlib.asynccontextmanager
async def running(token: str = "", interval_s: float = 0.05) -> AsyncIterator[tuple[Dashboard, HttpClient, str]]:
    dash = Dashboard(Hub(DemoSource(7), interval_s), Guard("127.0.0.1", token))
    await dash.start("127.0.0.1", 0)
    client = HttpClient()
    try:
        yield dash, client, f"http://127.0.0.1:{dash.server.port}"
    finally:
        await client.close()
        await dash.stop()


async def events(client: HttpClient, url: str, number: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    parser = SseParser()
    async with client.stream("GET", url) as stream:
        assert stream.status == 200
        async for data in stream:
            found += [json.loads(event.data) for event in parser.feed(data)]
            if len(found) >= number:
                break
    return found


def live_url(body: bytes) -> str:
    text = body.decode().partition('data-live="')[2].partition('"')[0]
    return text.replace("&amp;", "&")


def test_every_page_answers_with_the_policy_and_within_the_budget() -> None:
    async def work() -> None:
        async with running() as (dash, client, url):
            for path in dash.pages:
                reply = await client.request("GET", url + path)
                assert reply.status == 200
                assert reply.header(b"content-security-policy") == CSP.encode()
                assert reply.header(b"cache-control") == b"no-store"
                assert reply.body.startswith(b"<!doctype html><html")
            first = await client.request("GET", url + "/")
            sizes = [len(first.body)]
            for name in ("app.css", "app.js", "icon.svg"):
                reply = await client.request("GET", f"{url}/static/{name}")
                assert b"immutable" in (reply.header(b"cache-control") or b"")
                sizes.append(len(reply.body))
            assert sum(sizes) <= 100_000

    run(work())


def test_pages_and_files_are_packed_when_the_browser_can_unpack() -> None:
    async def work() -> None:
        async with running() as (_, client, url):
            headers = (("accept-encoding", "gzip"),)
            for path in ("/", "/static/app.css"):
                packed = await client.request("GET", url + path, headers=headers)
                assert packed.header(b"content-encoding") == b"gzip"
                assert len(gzip.decompress(packed.body)) > 2 * len(packed.body)

    run(work())


def test_the_stream_carries_only_what_changed_since_the_page() -> None:
    async def work() -> None:
        async with running() as (_, client, url):
            page = await client.request("GET", url + "/")
            got = await events(client, url + live_url(page.body), 3)
            assert all("main" not in changes for changes in got)
            merged = {k for changes in got for k in changes}
            assert "i-h100-0" in merged
            assert "<thead>" not in "".join(
                text for changes in got for name, text in changes.items() if name != "latest"
            )

    run(work())


def test_a_viewer_that_comes_back_late_gets_the_whole_page() -> None:
    async def work() -> None:
        async with running() as (_, client, url):
            got = await events(client, url + "/live?_p=/&_t=1", 2)
            assert set(got[0]) == {"main"}
            assert "main" not in got[1]

    run(work())


def test_viewers_of_one_view_share_one_render() -> None:
    async def work() -> None:
        async with running(interval_s=0.2) as (dash, client, url):
            calls = 0
            page = dash.pages["/tiers"]

            def counted(*args: object) -> object:
                nonlocal calls
                calls += 1
                return page(*args)  # type: ignore[arg-type]

            dash.pages["/tiers"] = counted  # type: ignore[assignment]
            tick = dash.hub.tick
            await asyncio.gather(*(events(client, url + "/live?_p=/tiers", 3) for _ in range(8)))
            assert calls <= dash.hub.tick - tick + 1

    run(work())


def test_viewers_are_bounded_and_counted_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MAX_VIEWERS", 2)

    async def work() -> None:
        async with running() as (dash, client, url):
            held = [asyncio.create_task(events(client, url + "/live?_p=/", 10_000)) for _ in range(2)]
            await until(lambda: dash.hub.viewers == 2)
            reply = await client.request("GET", url + "/live?_p=/")
            assert reply.status == 503
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            await until(lambda: dash.hub.viewers == 0)

    run(work())


def test_a_viewer_that_does_not_read_is_cut_off_and_nobody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SLOW_TICKS", 5)

    async def work() -> None:
        async with running(interval_s=0.01) as (dash, client, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", dash.server.port, limit=1024)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /live?_p=/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await until(lambda: dash.hub.viewers == 1)
            assert len(await events(client, url + "/live?_p=/tiers", 5)) >= 5
            await until(lambda: dash.hub.viewers == 0, 20.0)
            writer.close()

    run(work())


def test_another_host_name_is_not_answered() -> None:
    async def work() -> None:
        async with running() as (dash, _, _url):
            for path in ("/", "/live?_p=/", "/decisions.json?id=r1", "/login"):
                reader, writer = await asyncio.open_connection("127.0.0.1", dash.server.port)
                writer.write(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode())
                reply = await reader.read()
                assert b" 421 " in reply.partition(b"\r\n")[0]
                assert b"h100" not in reply
                writer.close()

    run(work())


def test_with_a_token_everything_but_the_sign_in_page_is_closed() -> None:
    async def work() -> None:
        async with running(TOKEN) as (dash, client, url):
            for path in (*dash.pages, "/live?_p=/", "/decisions.json?id=r1"):
                reply = await client.request("GET", url + path)
                assert reply.status == 303
                assert reply.header(b"location") == b"/login"
            wrong = await client.request("POST", url + "/login", body=b"token=nope", headers=(("origin", url),))
            assert wrong.status == 403
            foreign = (("origin", "http://evil.example"),)
            refused = await client.request("POST", url + "/login", body=f"token={TOKEN}".encode(), headers=foreign)
            assert refused.status == 403
            assert refused.header(b"set-cookie") is None
            right = await client.request(
                "POST", url + "/login", body=f"token={TOKEN}".encode(), headers=(("origin", url),)
            )
            cookie = (right.header(b"set-cookie") or b"").partition(b";")[0].decode()
            page = await client.request("GET", url + "/", headers=(("cookie", cookie),))
            assert page.status == 200
            assert TOKEN.encode() not in page.body

    run(work())


def test_a_decision_as_json() -> None:
    async def work() -> None:
        async with running() as (dash, client, url):
            wanted = dash.hub.snapshot.decisions[5]
            reply = await client.request("GET", f"{url}/decisions.json?id={wanted.id}")
            assert reply.json()["chosen"] == wanted.chosen
            missing = await client.request("GET", f"{url}/decisions.json?id=zzz")
            assert missing.status == 404

    run(work())


def test_a_source_that_fails_is_shown_with_the_age_of_what_is_left() -> None:
    class Breaking(DemoSource):
        broken = False

        async def poll(self) -> Snapshot:
            if self.broken:
                raise UpstreamError("connection refused by 127.0.0.1:8081")
            return await super().poll()

    async def work() -> None:
        source = Breaking(7)
        hub = Hub(source)
        await hub.poll()
        source.broken = True
        await hub.poll()
        assert hub.snapshot.error == "connection refused by 127.0.0.1:8081"
        assert len(hub.snapshot.instances) == 16

    run(work())


def test_bad_addresses_are_told_so() -> None:
    async def work() -> None:
        async with running() as (_, client, url):
            assert (await client.request("GET", url + "/nothing")).status == 404
            assert (await client.request("POST", url + "/", body=b"x=1")).status == 405
            assert (await client.request("GET", url + "/live?_p=/nothing")).status == 404
            many = "&".join(f"a{k}=1" for k in range(100))
            assert (await client.request("GET", f"{url}/?{many}")).status == 400

    run(work())
