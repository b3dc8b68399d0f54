"""Calibrate a running engine end to end: ask, measure, fit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from weighbridge.calibrate.build import Calibration, build_profile
from weighbridge.calibrate.endpoint import Kind, read_endpoint
from weighbridge.calibrate.measure import Measurer
from weighbridge.calibrate.provenance import provenance_of
from weighbridge.core.instance import Limits
from weighbridge.http.client import HttpClient


async def calibrate_url(
    url: str,
    *,
    model: str | None = None,
    kind: Kind | None = None,
    key: str | None = None,
    limits: Limits | None = None,
    budget_s: float = 300.0,
    under_load: bool = False,
    seed: int | None = None,
    stop: asyncio.Event | None = None,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> Calibration:
    """Measure the engine at `url` for at most about `budget_s`. `limits` replace what the engine tells, field by field.

    `seed` fixes the probes; by default each calibration draws new prompts, so that no cache holds them.

    Raises:
        UpstreamError: the engine cannot be measured; InputError: too little was measured.
    """
    seed = time.time_ns() if seed is None else seed
    client = HttpClient()
    try:
        endpoint = await read_endpoint(client, url, model=model, kind=kind, key=key)
        if limits is not None:
            given = {f: getattr(limits, f) for f in ("token_budget", "max_sequences", "kv_blocks", "max_context")}
            changed = msgspec.structs.replace(endpoint.limits, **{f: v for f, v in given.items() if v is not None})
            endpoint = msgspec.structs.replace(endpoint, limits=changed)
        measurer = Measurer(
            client, endpoint, budget_s=budget_s, seed=seed, progress=progress, stop=stop, under_load=under_load
        )
        found = await measurer.run()
    finally:
        await client.close()
    method = f"{len(found.results)} probes over HTTP in {found.seconds:.0f} s"
    return await asyncio.to_thread(build_profile, found, provenance_of(endpoint, method=method), seed=seed % 2**32)
