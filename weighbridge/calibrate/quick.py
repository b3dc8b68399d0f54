"""A profile in a few seconds: the two rates, and base against sequence where a second look is cheap.

For an instance that nobody has calibrated: rough, marked as such, and far better than nothing (its order of magnitude
is what the router needs first).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence

from weighbridge.calibrate.endpoint import Endpoint, Kind, read_endpoint
from weighbridge.calibrate.probe import Probe, Prober, ProbeResult
from weighbridge.calibrate.provenance import provenance_of
from weighbridge.core.errors import UpstreamError
from weighbridge.core.instance import Rates, StepTerms
from weighbridge.cost.profile import Profile
from weighbridge.http.client import HttpClient

QUICK_ERROR = 0.3
"""Relative error that a quick profile claims until live traffic has corrected it."""


async def quick_profile(
    url: str,
    model: str | None = None,
    *,
    kind: Kind | None = None,
    key: str | None = None,
    budget_s: float = 5.0,
    seed: int | None = None,
    client: HttpClient | None = None,
) -> Profile:
    """Measure the rates of the engine at `url` with a handful of requests; stops adding to them after `budget_s`.

    Raises:
        UpstreamError: no connection, a refused key, a model that it does not serve, or no usable stream.
    """
    own = client or HttpClient()
    try:
        endpoint = await read_endpoint(own, url, model=model, kind=kind, key=key)
        prober = Prober(own, endpoint, random.Random(time.time_ns() if seed is None else seed), timeout_s=60.0)
        return await _measure(endpoint, prober, budget_s)
    finally:
        if client is None:
            await own.close()


async def _measure(endpoint: Endpoint, prober: Prober, budget_s: float) -> Profile:
    begun = time.monotonic()
    await prober.send("warm-up", Probe(16, 4))
    room = (endpoint.limits.max_context or 2048) - 32
    decode = await prober.send("decode-1", Probe(16, 16))
    step = decode.tpot_s
    if step is None:
        raise UpstreamError(f"{endpoint.url}: answered with a single token, so no decode rate can be measured")
    prompts: list[ProbeResult] = []
    tokens = min(64, room)
    # longer prompts tell the rate better; go on while the next may be expected to fit into half of the budget
    while True:
        prompts.append(await prober.send("alone", Probe(tokens, 1)))
        spent = time.monotonic() - begun
        if 4 * tokens > room or spent + 4 * prompts[-1].ttft_s > 0.5 * budget_s:
            break
        tokens *= 4
    longest = prompts[-1]
    prefill = max(1e-7, (longest.ttft_s - decode.ttft_s) / max(1, longest.prompt_tokens - decode.prompt_tokens))
    if longest.prompt_tokens <= decode.prompt_tokens or longest.ttft_s <= decode.ttft_s:
        prefill = longest.ttft_s / longest.prompt_tokens
    width = min(4, endpoint.limits.max_sequences or 4)
    together: list[ProbeResult] = []
    if width > 1 and time.monotonic() - begun + 16 * step * width < budget_s:
        together = await asyncio.gather(*(prober.send(f"decode-{width}", Probe(16, 16)) for _ in range(width)))
    base, sequence = _split(step, together)
    return Profile(
        rates=Rates(prefill_tokens_per_s=1.0 / prefill, decode_tokens_per_s=1.0 / step),
        step=StepTerms(base_s=base, prefill_s=prefill, sequence_s=sequence),
        identifiable=False,
        unidentified=("attend_s", "kv_s") if together else ("attend_s", "base_s", "kv_s", "sequence_s"),
        limits=endpoint.limits,
        ranges={
            "prompt_tokens": (float(decode.prompt_tokens), float(longest.prompt_tokens)),
            "sequences": (1.0, float(max(1, len(together)))),
        },
        provenance=provenance_of(endpoint, method=f"quick probe of {time.monotonic() - begun:.1f} s"),
        extra={"quick": True, "assumed_error": QUICK_ERROR},
    )


def _split(step: float, together: Sequence[ProbeResult]) -> tuple[float, float]:
    """Base and seconds per sequence, from one alone and several together; all base where there is no second."""
    tpots = [r.tpot_s for r in together if r.tpot_s is not None]
    if not tpots:
        return step, 0.0
    slope = max(0.0, (statistics.median(tpots) - step) / (len(together) - 1))
    sequence = min(slope, 0.9 * step)
    return step - sequence, sequence
