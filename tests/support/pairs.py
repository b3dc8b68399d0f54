"""Scripted engines of a disaggregated pair behind a gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.gateway import Front, answer, front, instance
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


class Mooncake:
    """A prefill and a decode engine that meet by transfer id, as vLLM's Mooncake connector has them do."""

    def __init__(self, ranks: int = 1) -> None:
        self.engine_ids = {str(n): {"engine_id": f"engine-{n}", "worker_addr": {}} for n in range(ranks)}
        self.ready: dict[str, asyncio.Event] = {}
        self.bootstrap = FakeUpstream(self._bootstrap, health=0)

    async def _bootstrap(self, call: Call) -> None:
        assert call.request_line.startswith("GET /query ")
        await call.reply(200, json.dumps(self.engine_ids).encode())

    def _event(self, call: Call) -> asyncio.Event:
        params = json.loads(call.body)["kv_transfer_params"]
        return self.ready.setdefault(params["transfer_id"], asyncio.Event())

    async def prefill(self, call: Call) -> None:
        self._event(call).set()
        await call.reply(200, b'{"choices":[],"kv_transfer_params":null}')

    async def decode(self, call: Call) -> None:
        waiting = asyncio.create_task(self._event(call).wait())
        closed = asyncio.create_task(call.wait_closed(20.0))
        await asyncio.wait((waiting, closed), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            closed.cancel()
            await asyncio.gather(closed, return_exceptions=True)
            await answer(call)
        else:
            waiting.cancel()


@asynccontextmanager
async def mooncake(
    fake: Mooncake, prefill_script: Script | None = None, decode_script: Script | None = None, **fields: Any
) -> AsyncIterator[tuple[Front, FakeUpstream, FakeUpstream]]:
    async with (
        fake.bootstrap,
        FakeUpstream(prefill_script or fake.prefill) as p,
        FakeUpstream(decode_script or fake.decode) as d,
    ):
        kind = {"kind": "vllm", "transfer": "mooncake"}
        instances = (
            instance(p, "p0", role="prefill", bootstrap_port=fake.bootstrap.port, **kind),
            instance(d, "d0", role="decode", **kind),
        )
        settings = {"router": RouterSettings(policy="least_requests"), **fields}
        async with front(instances=instances, **settings) as f:
            yield f, p, d
