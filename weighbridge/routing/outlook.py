"""What a model's pool would cost a request in time, before it is sent anywhere: for choosing the model.

Reads the ledger and changes nothing, so asking leaves every later decision as it was.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice

from weighbridge.core.request import Request, Tier
from weighbridge.routing.candidates import Pool
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.forecast import forecast
from weighbridge.routing.hold import HoldQueue
from weighbridge.routing.policy import Option, View

EXPECTED_OUTPUT = 256
MOST_INTERFERENCE = 0.7
SAMPLED_HELD = 64


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds on the pool's best instance, None where no instance has a profile; `healthy` instances can start it."""

    ttft_s: float | None
    tpot_s: float | None
    healthy: int


def outlook(pool: Pool, fleet: Fleet, queue: HoldQueue | None, request: Request, tier: Tier, now_s: float) -> Outlook:
    """The outlook of `request` in `pool`; `queue` is what the router holds for that model."""
    timed = [(seconds, i) for i in pool.entry if (seconds := _seconds(i, fleet, request, tier, now_s)) is not None]
    if not timed:
        return Outlook(None, None, len(pool.entry))
    (ttft_s, tpot_s), best = min(timed, key=lambda pair: pair[0][0])
    if best.spec.role == "prefill":
        steps = [i.cost.decode_step_s(i.decoding, i.decoding_kv_tokens) for i in pool.decode if i.cost is not None]
        tpot_s = min(steps, default=tpot_s)
    return Outlook(ttft_s + _held_s(queue, best) / len(timed), tpot_s, len(pool.entry))


def _seconds(
    instance: Instance, fleet: Fleet, request: Request, tier: Tier, now_s: float
) -> tuple[float, float] | None:
    """TTFT and TPOT on one instance, if it has a profile of any kind."""
    if instance.cost is None:
        return None
    output = min(request.max_tokens, request.expected_output_tokens or EXPECTED_OUTPUT)
    option = Option(instance, cached_tokens=0, prefill_tokens=request.prompt_tokens, decode_tokens=output)
    view = View(request, [option], fleet, now_s, random.Random(0), False, tier=tier)
    interference = min(fleet.offered.share(now_s), MOST_INTERFERENCE)
    made = forecast(option, view, instance.cost, instance.cost.error, interference)
    return made.ttft_s, made.tpot_s


def _held_s(queue: HoldQueue | None, best: Instance) -> float:
    """Prefill seconds of everything the router holds for this model, from the mean of the first few."""
    if not queue:
        return 0.0
    sample = [live.request.prompt_tokens for live in islice(queue, SAMPLED_HELD)]
    per_token = best.cost.prefill_s if best.cost is not None else 0.0
    return per_token * len(queue) * sum(sample) / len(sample)
