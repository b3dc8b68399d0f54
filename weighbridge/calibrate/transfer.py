"""Measure how long KV takes from one instance to another: the two legs of `kv_transfer_params`, sizes up and down.

Bytes and seconds come from the decode instance's own counters, read before and after each transfer, so neither prefill
nor decoding is in them. The first transfer opens connections and is left out of the fit.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weighbridge.calibrate.endpoint import Endpoint, read_counter, read_endpoint
from weighbridge.calibrate.probe import FIRST_TOKEN, LAST_TOKEN, error_text
from weighbridge.core.errors import UpstreamError
from weighbridge.cost.transfer import TransferTerms, fit_transfer
from weighbridge.http.client import HttpClient, Reply
from weighbridge.http.errors import ExchangeFailed

SIZES = (16, 64, 128, 256, 384)
ROUNDS = 3
BYTES = ("weighbridge_engine_transferred_bytes_total", "vllm:nixl_bytes_transferred_sum")
SECONDS = ("weighbridge_engine_transfer_seconds_total", "vllm:nixl_xfer_time_seconds_sum")
_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def measure_transfer(
    prefill_url: str,
    decode_url: str,
    *,
    model: str | None = None,
    key: str | None = None,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    seed: int | None = None,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> TransferTerms:
    """Move KV of prompts of `sizes` tokens from the first instance to the second; fit `latency + bytes / bandwidth`.

    Raises:
        UpstreamError: a leg failed, the KV was recomputed instead of moved, or the engine counts no transfers.
        InputError: the transfers do not tell latency from bandwidth.
    """
    client = HttpClient()
    rng = random.Random(time.time_ns() if seed is None else seed)
    try:
        source = await read_endpoint(client, prefill_url, model=model, key=key)
        target = await read_endpoint(client, decode_url, model=source.model, key=key)
        room = (source.limits.max_context or 2048) - 8
        wanted = [size for size in sizes if size < room] * rounds
        samples = []
        for done, size in enumerate([wanted[0], *wanted]):
            samples.append(await _one(client, source, target, size, rng))
            progress(done + 1, len(wanted) + 1)
        per_token = statistics.median(moved / size for (moved, _), size in zip(samples[1:], wanted, strict=True))
        return msgspec.structs.replace(fit_transfer(samples), bytes_per_token=per_token)
    finally:
        await client.close()


async def _one(
    client: HttpClient, source: Endpoint, target: Endpoint, size: int, rng: random.Random
) -> tuple[int, float]:
    """Bytes and seconds of one transfer."""
    body: dict[str, Any] = {
        "model": source.model,
        "prompt": [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(size)],
        "max_tokens": 1,
        "temperature": 0.0,
    }
    held = _json(await _post(client, source, body | {"kv_transfer_params": _ASK}), source)
    params = held.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise UpstreamError(f"{source.url}: its reply has no kv_transfer_params; it cannot hand KV over")
    before = await _counters(client, target)
    _json(await _post(client, target, body | {"max_tokens": 2, "kv_transfer_params": params}), target)
    after = await _counters(client, target)
    moved, seconds = after[0] - before[0], after[1] - before[1]
    if moved <= 0:
        raise UpstreamError(f"{target.url}: no KV came over for {size} tokens; it computed the prompt itself")
    return int(moved), seconds


async def _post(client: HttpClient, endpoint: Endpoint, body: dict[str, Any]) -> Reply:
    headers = [("content-type", "application/json"), *endpoint.headers]
    try:
        return await client.request(
            "POST", f"{endpoint.url}/v1/completions", body=msgspec.json.encode(body), headers=headers, timeout_s=120.0
        )
    except ExchangeFailed as error:
        raise UpstreamError(f"{endpoint.url}: {error}") from None


def _json(reply: Reply, endpoint: Endpoint) -> dict[str, Any]:
    if reply.status != 200:
        raise UpstreamError(f"{endpoint.url}: {error_text(reply.status, reply.body)}")
    value = reply.json()
    return value if isinstance(value, dict) else {}


async def _counters(client: HttpClient, endpoint: Endpoint) -> tuple[float, float]:
    moved = await read_counter(client, endpoint, BYTES)
    seconds = await read_counter(client, endpoint, SECONDS)
    if moved is None or seconds is None:
        raise UpstreamError(f"{endpoint.url}: its metrics count no KV transfers ({BYTES[0]} or {BYTES[1]})")
    return moved, seconds
