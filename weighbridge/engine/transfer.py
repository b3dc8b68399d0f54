"""The two-step `kv_transfer_params` protocol of vLLM's NIXL connector, with KV bytes pulled over HTTP.

The prefill leg asks `do_remote_decode`; its reply carries parameters that name where the KV lies. The decode leg hands
them in verbatim; the KV is pulled from there and the lease ended. Hosts to pull from come from the operator only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from weighbridge.core.errors import RequestError
from weighbridge.engine.fields import Body
from weighbridge.http import ExchangeFailed, HttpClient, StreamReply

KV_PATH = "/kv/"
MODEL_HEADER = "x-weighbridge-kv-model"
PULL_TIMEOUT_S = 10.0
MAX_KV_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a prefill instance keeps the KV of a request."""

    host: str
    port: int
    request_id: str
    tokens: int

    @property
    def url(self) -> str:
        """Address of the lease."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{KV_PATH}{quote(self.request_id, safe='')}"


@dataclass(frozen=True, slots=True)
class Pulled:
    """KV that arrived: bytes, the tokens that it covers, and what it took."""

    data: memoryview
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferAsked:
    """What a request's `kv_transfer_params` ask for: to hold the KV, to take it from elsewhere, or neither."""

    hold: bool = False
    remote: Remote | None = None


def read_transfer(body: Body, allowed_hosts: frozenset[str]) -> TransferAsked:
    """Read `kv_transfer_params`; unknown keys are ignored, as they come from the other instance verbatim.

    Raises:
        RequestError: bad types, or a host that is not allowed.
    """
    params = body.get("kv_transfer_params")
    if params is None:
        return TransferAsked()
    if not isinstance(params, dict):
        raise RequestError("kv_transfer_params must be an object", param="kv_transfer_params")
    if params.get("do_remote_decode"):
        return TransferAsked(hold=True)
    if not params.get("do_remote_prefill"):
        return TransferAsked()
    host, port, key = params.get("remote_host"), params.get("remote_port"), params.get("remote_request_id")
    tokens = params.get("remote_num_tokens")
    if not (isinstance(host, str) and isinstance(port, int) and isinstance(key, str) and isinstance(tokens, int)):
        message = "kv_transfer_params needs remote_host, remote_port, remote_request_id and remote_num_tokens"
        raise RequestError(message, param="kv_transfer_params")
    if host not in allowed_hosts:
        message = f"kv_transfer_params: KV may not be pulled from {host!r}; the operator names the hosts"
        raise RequestError(message, param="kv_transfer_params")
    return TransferAsked(remote=Remote(host, port, key, tokens))


def reply_params(
    *, key: str, engine_id: str, host: str, port: int, tokens: int, block_tokens: int, expires_s: float
) -> dict[str, Any]:
    """What the prefill leg's reply carries, in the shape of vLLM's, to be passed on verbatim."""
    blocks = -(-tokens // block_tokens)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(blocks))],
        "remote_engine_id": engine_id,
        "remote_request_id": key,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": expires_s,
        "transfer_mode": "http",
    }


async def pull(client: HttpClient, remote: Remote, model_tag: str) -> Pulled | str:
    """Fetch the KV and end the lease; a sentence where that failed, and then nothing is held on this side."""
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(PULL_TIMEOUT_S), client.stream("GET", remote.url) as stream:
            if stream.status != 200:
                return f"the prefill instance answered {stream.status}"
            tag = stream.header(MODEL_HEADER.encode())
            if tag is None or tag.decode("latin-1") != model_tag:
                return "the prefill instance serves another model or KV format"
            data = await _whole(stream)
        if data is None:
            return "the prefill instance sent no KV, or too much of it"
        took = time.perf_counter() - begun
    except MemoryError:
        return "there is no memory for the KV"
    except TimeoutError:
        return f"the KV could not be pulled within {PULL_TIMEOUT_S:g} s"
    except ExchangeFailed as error:
        return f"the KV could not be pulled: {error}"
    with contextlib.suppress(ExchangeFailed):  # what was pulled is good; a lease that cannot be ended ends by itself
        await client.request("DELETE", remote.url, timeout_s=PULL_TIMEOUT_S)
    return Pulled(data, remote.tokens, took)


async def _whole(stream: StreamReply) -> memoryview | None:
    """The body in one buffer of the announced length; None where that is no length that KV has."""
    length = int(stream.header(b"content-length") or 0)
    if not 0 < length <= MAX_KV_BYTES:
        return None
    buffer, at = np.empty(length, np.uint8), 0
    async for piece in stream:
        buffer[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return buffer.data
