"""A gateway in front of fake upstreams, and the frames they send."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.instance import Limits
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings
from weighbridge.gateway.settings import HealthSettings
from weighbridge.http import HttpClient, SseParser
from weighbridge.routing.router import RouterSettings

MODEL = "m"
QUICK = HealthSettings(interval_s=0.05, timeout_s=2.0)


def chat(stream: bool = True, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": stream}
    return json.dumps({**body, **fields}).encode()


def frame(content: str | None = None, finish: str | None = None, **extra: Any) -> bytes:
    delta: dict[str, Any] = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice], **extra}
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


ROLE = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def usage_frame(prompt: int = 9, output: int = 3, **extra: Any) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **extra}
    return b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n"


def whole(content: str = "abc", prompt: int = 9, output: int = 3) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


async def answer(call: Call) -> None:
    """A well-behaved engine: three tokens, usage where it was asked for."""
    body = json.loads(call.body)
    if not body.get("stream"):
        await call.reply(200, whole())
        return
    await call.sse_head()
    for data in (ROLE, frame("a"), frame("b"), frame("c"), frame(finish="stop")):
        await call.chunk(data)
    if (body.get("stream_options") or {}).get("include_usage"):
        await call.chunk(usage_frame())
    await call.chunk(DONE)
    await call.last_chunk()


class Front:
    """A running gateway and a client of it."""

    def __init__(self, gateway: Gateway, client: HttpClient, before_start: Any = None) -> None:
        self.gateway = gateway
        self.client = client
        self.before_start = before_start or (lambda gateway: None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def post(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Any:
        pairs = [(k.replace("_", "-"), v) for k, v in headers.items()]
        return await self.client.request("POST", self.url + path, body=body, headers=pairs, timeout_s=20.0)

    async def get(self, path: str, *, admin: bool = False) -> Any:
        port = self.gateway.admin_port if admin else self.gateway.port
        return await self.client.request("GET", f"http://127.0.0.1:{port}{path}", timeout_s=10.0)

    def assert_idle(self) -> None:
        """Every counter is back at zero."""
        driver = self.gateway.driver
        assert driver.flights == {}
        assert driver.router.live_requests == 0
        for endpoint in driver.endpoints.values():
            assert endpoint.running == 0, endpoint.name
        for instance in driver.router.fleet.instances.values():
            counters = (instance.in_flight, instance.prefill_tokens, instance.decode_tokens, instance.kv_tokens)
            assert counters == (0, 0, 0, 0), (instance.name, counters)


def instance(upstream: FakeUpstream, name: str, **fields: Any) -> InstanceSettings:
    fields = {"kind": "embedded", "models": (MODEL,), "limits": Limits(max_context=4096), **fields}
    return InstanceSettings(name=name, url=upstream.url, **fields)


@asynccontextmanager
async def front(
    *upstreams: FakeUpstream, instance_fields: Any = None, before_start: Any = None, **fields: Any
) -> AsyncIterator[Front]:
    """A gateway on free ports in front of `upstreams`, which are named i0, i1, ...; `before_start(gateway)` sees it."""
    instances = tuple(instance(u, f"i{n}", **(instance_fields or {})) for n, u in enumerate(upstreams))
    defaults = {
        "port": 0,
        "admin_port": 0,
        "health": QUICK,
        "instances": instances,
        "router": RouterSettings(policy="least_requests"),
    }
    gateway = Gateway(GatewaySettings(**{**defaults, **fields}))
    if before_start is not None:
        before_start(gateway)
    await gateway.start()
    client = HttpClient()
    found = Front(gateway, client, before_start)
    try:
        if gateway.settings.instances:
            assert await gateway.wait_ready(30.0)
            while not all(e.up for e in gateway.driver.endpoints.values()):
                gateway.health._changed.clear()
                await gateway.health._changed.wait()
        yield found
    finally:
        await client.close()
        await found.gateway.stop()  # a test may have put another in its place


def data_of(body: bytes) -> list[str]:
    """The data of every event in a stream."""
    return [e.data for e in SseParser().feed(body)]


def text_of(body: bytes) -> str:
    """The generated text in a stream."""
    text = ""
    for data in data_of(body):
        if data != "[DONE]":
            for choice in json.loads(data).get("choices", []):
                text += choice.get("delta", {}).get("content") or ""
    return text
