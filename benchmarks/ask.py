"""One streamed completion of an exact length through a gateway, timed by its client."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from weighbridge.http.client import HttpClient

MODEL = "smollm2-135m-instruct"


class Asked(NamedTuple):
    """How it went. `refused` is the status of one that the gateway would not serve."""

    sent_s: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    instance: str
    tier: str
    refused: int = 0


async def ask(client: HttpClient, url: str, prompt: str, tokens: int, tier: str, *, may_refuse: bool = False) -> Asked:
    """Raises SystemExit if it does not end well with exactly `tokens` tokens (429 is allowed with `may_refuse`)."""
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = (("content-type", "application/json"), ("x-weighbridge-tier", tier), ("x-weighbridge-explain", "1"))
    sent, first, seen = time.perf_counter(), 0.0, b""
    async with client.stream("POST", url + "/v1/completions", body=json.dumps(body).encode(), headers=headers) as reply:
        async for data in reply:
            if not first and b"data: {" in data:
                first = time.perf_counter()
            seen += data
    end = time.perf_counter()
    if reply.status == 429 and may_refuse:
        return Asked(sent, 0.0, 0.0, 0, 0, "", tier, refused=429)
    usage: dict[str, Any] = {}
    for line in seen.splitlines():
        if line.startswith(b"data: {"):
            usage = json.loads(line[6:]).get("usage") or usage
    if reply.status != 200 or usage.get("completion_tokens") != tokens:
        raise SystemExit(f"status {reply.status}, asked for {tokens} tokens, got {usage}: {seen[:300]!r}")
    decision = reply.header(b"x-weighbridge-decision")
    instance = json.loads(decision)["chosen"] if decision else (reply.header(b"x-weighbridge-instance") or b"").decode()
    return Asked(sent, first - sent, end - sent, usage["prompt_tokens"], tokens, instance, tier)
