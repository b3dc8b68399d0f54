"""A Router and one relay in one process, with a real socket between them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.gateway import DONE, QUICK, ROLE, Front, chat, frame, instance
from tests.support.loop import until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.event_log import Entry, Header, LogReader
from weighbridge.gateway import Gateway, GatewaySettings, KeySettings
from weighbridge.gateway.log_writer import LogWriter
from weighbridge.gateway.relays.options import RelayOptions
from weighbridge.gateway.relays.relay import Relay
from weighbridge.http import HttpClient
from weighbridge.routing.router import RouterSettings

KEYS = (KeySettings(sha256=hashlib.sha256(b"k").hexdigest(), tenant="t", tokens_per_minute=60),)


class RunLog:
    """The event log of all Routers of a run, one after the other, in one file."""

    def __init__(self, folder: Path) -> None:
        self.writer = LogWriter(folder, Header(source="test"), max_bytes=1 << 40, max_files=1)

    def entries(self) -> list[Entry]:
        """What was written so far."""
        assert self.writer.sync()
        with self.writer.path.open("rb") as stream:
            return list(LogReader(stream))


class Pair:
    """One Router's process and its relays, in this process; `router` may be replaced."""

    def __init__(self, settings: GatewaySettings, folder: Path) -> None:
        self.settings = settings
        self.path = folder / "router.sock"
        self.start_s = time.monotonic()
        self.client = HttpClient()
        self.relays: list[Relay] = []
        self.router: Gateway | None = None

    async def open_router(self, log: RunLog | None = None) -> Gateway:
        self.router = router = Gateway(self.settings, {}, start_s=self.start_s)
        if log is not None:
            router.driver.writer = log.writer
        await router.start()
        assert await router.wait_ready(5.0, [i.name for i in self.settings.instances])
        assert router.hub is not None
        await router.hub.listen(self.path)
        return router

    async def open_relay(self) -> Relay:
        options = RelayOptions(
            number=len(self.relays) + 1, socket=str(self.path), host="127.0.0.1", port=0, start_s=self.start_s
        )
        relay = Relay(options, {})
        self.relays.append(relay)
        await relay.start()
        return relay

    async def post(self, body: bytes | None = None, relay: int = 0, **headers: str) -> Any:
        server = self.relays[relay].server
        assert server is not None
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        pairs = [("authorization", "Bearer k"), *((k.replace("_", "-"), v) for k, v in headers.items())]
        return await self.client.request("POST", url, body=body or chat(), headers=pairs, timeout_s=20.0)

    async def die(self) -> None:
        """The Router's process is gone from one moment to the next."""
        router = self.router
        assert router is not None
        router.driver.writer = None
        await router.stop()
        await until(lambda: not any(relay.desk.connected for relay in self.relays))

    def assert_idle(self) -> None:
        assert self.router is not None
        Front(self.router, self.client).assert_idle()
        for relay in self.relays:
            assert relay.desk.flights == {}
            assert relay.desk._cases == {}
            assert [e.running for e in relay.desk.endpoints.values() if e.running] == []


@contextlib.asynccontextmanager
async def pair(folder: Path, *upstreams: FakeUpstream, relays: int = 1, **fields: Any) -> AsyncIterator[Pair]:
    per = fields.pop("per", [{}] * len(upstreams))
    settings = GatewaySettings(
        relays=relays,
        admin_port=0,
        health=QUICK,
        router=fields.pop("router", RouterSettings(policy="least_requests")),
        instances=tuple(instance(u, f"i{n}", **per[n]) for n, u in enumerate(upstreams)),
        **fields,
    )
    made = Pair(settings, folder)
    try:
        await made.open_router()
        for _ in range(relays):
            await made.open_relay()
        yield made
    finally:
        await made.client.close()
        for relay in made.relays:
            await relay.stop()
        if made.router is not None:
            await made.router.stop()


class Gate:
    """An engine whose streams stop after one token until `open` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.sse_head()
        await call.chunk(ROLE)
        await call.chunk(frame("a"))
        await self.open.wait()
        for data in (frame("b"), frame("c"), frame(finish="stop"), DONE):
            await call.chunk(data)
        await call.last_chunk()
