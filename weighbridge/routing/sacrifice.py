"""Who misses its deadline so that most others keep theirs: the Moore-Hodgson rule over the forecast.

Walk the held requests by deadline and add up the fleet's time for their prompts; at the first one that would be late,
set aside the largest prompt so far. That leaves the fewest late (exactly so for one machine; the fleet is taken as one
of its total speed).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from weighbridge.routing.fleet import Instance
from weighbridge.routing.hold import HoldQueue
from weighbridge.routing.live import Live

FEW, SOME = 40, 200
SOME_S, MANY_S = 0.01, 0.05
"""With more than FEW held it is worked out at most every SOME_S seconds, with more than SOME every MANY_S."""


def sacrifice(queue: HoldQueue, instances: Sequence[Instance], now_s: float) -> None:
    """Mark those in each tier's window that are set aside, and unmark the rest. O(window log window), throttled."""
    held = len(queue)
    pause = MANY_S if held > SOME else SOME_S if held > FEW else 0.0
    if now_s < queue.judged_s + pause or held < 2:
        return
    queue.judged_s = now_s
    speed = step = owed = 0.0
    for instance in instances:
        cost = instance.cost
        if cost is None or cost.prefill_s <= 0.0 or not cost.seen:
            return
        speed += 1.0 / cost.prefill_s
        td = cost.decode_step_s(instance.decoding, instance.decoding_kv_tokens)
        step += td
        owed += 0.5 * instance.prefill_tokens * cost.prefill_s + td * instance.prefill_tokens / cost.budget
    count = len(instances)
    step /= count
    per_token = 1.0 / speed + step / (instances[0].cost.budget if instances[0].cost else 2_048) / count
    clock = now_s + owed / count + 0.5 * step
    for level in queue.levels():
        clock = _judge(level.window(), clock, per_token, 0.5 * count / speed)


def _judge(window: Sequence[tuple[float, int, Live]], clock: float, per_token: float, own_per_token: float) -> float:
    """One tier's window, earliest deadline first; the time when all its kept prompts are done."""
    kept: list[tuple[int, int, Live]] = []
    for _, number, live in window:
        live.sacrificed = False
        tokens = live.prefill_tokens
        heappush(kept, (-tokens, number, live))
        clock += tokens * per_token
        if clock + own_per_token * tokens > live.deadline_s:
            largest, _, victim = heappop(kept)
            victim.sacrificed = True
            clock += largest * per_token
    return clock
