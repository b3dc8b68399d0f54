"""Both sides of KV transfer on one instance: leases that others collect, and pulling from others."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weighbridge.engine.answer import Answer
from weighbridge.engine.engine import Engine
from weighbridge.engine.leases import Kv, Leases
from weighbridge.engine.transfer import KV_PATH, MODEL_HEADER, Remote, pull, reply_params
from weighbridge.http import ClientLimits, HttpClient, Request, Responder

PIECE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """`hosts` are those that KV may be pulled from; `advertise` is the host that others are told (None: where this
    instance listens). What happens when KV cannot be pulled: compute the prompt here, or fail the request."""

    hosts: frozenset[str] = frozenset({"127.0.0.1", "::1", "localhost"})
    advertise: str | None = None
    lease_s: float = 30.0
    max_lease_bytes: int = 1 << 30
    on_failure: Literal["recompute", "fail"] = "recompute"


class KvService(Collector):
    """KV of one instance for others, and of others for it. Lives on the event loop."""

    def __init__(self, engine: Engine, name: str, settings: TransferSettings) -> None:
        self.settings = settings
        self.leases = Leases(settings.lease_s, settings.max_lease_bytes)
        self.failures = 0
        self._engine = engine
        self._engine_id = f"{name}-{secrets.token_hex(4)}"
        self._host, self._port = "127.0.0.1", 0
        self._client: HttpClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        runner, file = engine.runner.options, engine.model.file
        adapters = ",".join(f"{Path(path).name}*{scale:g}" for path, scale in runner.adapters)
        self._tag = f"{file.architecture}/{file.size_bytes}/{runner.kv_type}/{runner.flash_attention}/{adapters}"

    def listening(self, host: str, port: int) -> None:
        """Where the instance listens, which is what replies say."""
        self._host, self._port = self.settings.advertise or host, port

    async def close(self) -> None:
        """End all leases and pulls."""
        self.leases.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def lease(self, kv: Kv, tokens: int) -> dict[str, Any] | None:
        """Keep KV for another instance; returns the reply's `kv_transfer_params`."""
        key = secrets.token_hex(16)
        if self.leases.put(key, kv, tokens) is None:
            return None
        return reply_params(
            key=key,
            engine_id=self._engine_id,
            host=self._host,
            port=self._port,
            tokens=tokens,
            block_tokens=self._engine.scheduler.memory.block_tokens,
            expires_s=time.time() + self.settings.lease_s,
        )

    def begin_with(self, remote: Remote, answer: Answer, responder: Responder, call_id: str, arrival_s: float) -> None:
        """Pull KV, then begin the answer with it; a client that leaves meanwhile ends both."""
        task = asyncio.get_running_loop().create_task(self._pull(remote, answer, responder, call_id, arrival_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()
            answer.leave()

        responder.on_disconnect = leave

    async def _pull(self, remote: Remote, answer: Answer, responder: Responder, call_id: str, arrival_s: float) -> None:
        if self._client is None:
            self._client = HttpClient(ClientLimits())
        pulled = await pull(self._client, remote, self._tag)
        if not isinstance(pulled, str):
            answer.begin(call_id, arrival_s, pulled)
            return
        self.failures += 1
        if self.settings.on_failure == "recompute":
            answer.begin(call_id, arrival_s)
        else:
            answer.leave()
            responder.send_error(503, pulled, kind="server_error", code="kv_load_failed")

    def get(self, request: Request, responder: Responder) -> None:
        """The KV of a lease."""
        lease = self.leases.get(request.path.removeprefix(KV_PATH))
        if lease is None:
            responder.send_error(404, "There is no such KV, or its lease has ended.", code="kv_not_found")
        else:
            responder.run(self._send(lease.data, responder))

    async def _send(self, data: Kv, responder: Responder) -> None:
        """Write KV piece by piece, as fast as it is read: a whole copy of it would be fresh memory, which is slow."""
        headers = ((MODEL_HEADER, self._tag),)
        responder.start(200, content_type="application/octet-stream", headers=headers, length=len(data))
        for start in range(0, len(data), PIECE_BYTES):
            responder.write(data[start : start + PIECE_BYTES].tobytes())
            await responder.drain()
        responder.end()

    def delete(self, request: Request, responder: Responder) -> None:
        """End a lease."""
        if self.leases.free(request.path.removeprefix(KV_PATH)):
            responder.send(204)
        else:
            responder.send_error(404, "There is no such KV, or its lease has ended.", code="kv_not_found")

    def collect(self) -> Iterable[Metric]:
        """Leases and failed pulls as metrics."""
        for name, text, value in (
            ("weighbridge_engine_kv_leases", "KV leases that wait to be collected.", float(len(self.leases))),
            ("weighbridge_engine_kv_leased_bytes", "Bytes of KV under lease.", float(self.leases.bytes)),
        ):
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric((), value)
            yield gauge
        for name, text, value in (
            ("weighbridge_engine_kv_leases_expired", "KV leases that nobody collected.", float(self.leases.expired)),
            ("weighbridge_engine_kv_leases_refused", "KV not kept for lack of room.", float(self.leases.refused)),
            ("weighbridge_engine_kv_pull_failures", "KV that could not be pulled.", float(self.failures)),
        ):
            counter = CounterMetricFamily(name, text)
            counter.add_metric((), value)
            yield counter
