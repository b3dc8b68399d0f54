"""Asking a gateway, or an engine beside it, and reading the text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.real.launch import MODEL, Server
from tests.support.gateway import Front, text_of
from weighbridge.gateway.settings import HealthSettings
from weighbridge.http import HttpClient

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PATIENCE_S = 90.0
CALM: dict[str, Any] = {"health": HealthSettings(interval_s=0.5, timeout_s=10.0), "max_loop_lag_s": 10.0}
"""Looking at vLLM's /metrics twenty times a second, as other tests do at fakes, would take a fifth of a core; and where
engines fill every core, a gateway that shares them is late, which is not what is tested."""
HOUSE = "You answer briefly. These are the rules of the house, and they are many and long: be kind, be short. " * 4


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 12, **fields}).encode()


async def via(f: Front, **fields: Any) -> Any:
    """A reply through the gateway, which must be a success."""
    headers = fields.pop("headers", {})
    path = fields.pop("path", "/v1/chat/completions")
    reply = await post(f, body(**fields), path, **headers)
    assert reply.status == 200, reply.body
    return reply


async def post(f: Front, data: bytes, path: str = "/v1/chat/completions", **headers: str) -> Any:
    """A reply through the gateway; other people's engines may take long over their first ones."""
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return await f.client.request("POST", f.url + path, body=data, headers=pairs, timeout_s=PATIENCE_S)


async def direct(server: Server, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    """A reply of the engine itself."""
    client = HttpClient()
    try:
        headers = [("content-type", "application/json")]  # vLLM refuses a body without it
        reply = await client.request(
            "POST", server.url + path, body=body(**fields), headers=headers, timeout_s=PATIENCE_S
        )
        assert reply.status == 200, reply.body
        return reply
    finally:
        await client.close()


async def get(server: Server, path: str) -> Any:
    client = HttpClient()
    try:
        return await client.request("GET", server.url + path, timeout_s=PATIENCE_S)
    finally:
        await client.close()


def text(reply: Any) -> str:
    """The generated text, streamed or whole, chat or completion."""
    if reply.body.startswith(b"data:"):
        return text_of(reply.body)
    (choice,) = reply.json()["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def chosen(f: Front) -> str:
    """The instance of the last decision."""
    return f.gateway.driver.decisions[-1].decision.chosen


async def gone(task: asyncio.Task[Any]) -> None:
    """A client that leaves."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
