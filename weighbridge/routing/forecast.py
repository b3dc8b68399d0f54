"""What a request would cost on an instance, in seconds, and how likely it and its neighbours meet their bounds.

From the ledger's sums alone, so O(1) per instance. For a request with n uncached prompt tokens and o expected output
tokens, on an instance with D decoding sequences that hold K KV tokens and Q prompt tokens sent and not computed:

    td      = base + sequence*D + kv*K                      a decode step now;  room = token budget - D
    wait    = td/2 [if busy] + prefill*Q' + ceil(Q'/room)*td + time until enough KV frees
              Q' = Q less what the head of the queue has progressed since it started
    prefill = prefill*n + ceil(n/room)*td                   TTFT = wait + prefill
    tpot    = (base + sequence*S + kv*Kb) / (1 - min(u, .7)),  u = share of the fleet's prefill capacity in use
              S, Kb: the batch that will run beside it on average, remaining lengths taken as exponential
    delay   = D*prefill*n + sum_j min(left_j, o)*(sequence + kv*(n + o/2)), and recompute if KV would overflow
    hit     = P(TTFT <= slack) * P(tpot <= bound), logistic with width error * bound
    loss    = over the tiers running there: count * (chance to meet TPOT now - chance with this request beside it)
"""

from __future__ import annotations

import math

from weighbridge.core.request import Tier
from weighbridge.routing.cost import Cost
from weighbridge.routing.fleet import Instance
from weighbridge.routing.policy import Option, View

SHARPNESS = 1.7
"""Logistic slope that stands for a normal error of one width."""
MOST_WAIT_S = 60.0
SURE = 12.0
"""Margins beyond this many logistic units are certain: both chances are 1."""
_exp = math.exp


def chance(margin: float, width: float) -> float:
    """Probability that a bound is met with `margin` seconds to spare and an error of `width` seconds."""
    z = SHARPNESS * margin / width
    if z > 30.0:
        return 1.0
    return 1.0 / (1.0 + _exp(-z)) if z > -30.0 else 0.0


class Forecast:
    """Seconds, chances and hits of one request on one instance."""

    __slots__ = ("delay_s", "hit", "kv_over_tokens", "loss", "prefill_s", "tpot_s", "wait_s")

    def __init__(self) -> None:
        self.wait_s = self.prefill_s = self.tpot_s = self.delay_s = 0.0
        self.hit = 1.0
        self.loss = 0.0
        self.kv_over_tokens = 0.0

    @property
    def ttft_s(self) -> float:
        """From now to the first token."""
        return self.wait_s + self.prefill_s


def forecast(option: Option, view: View, cost: Cost, error: float, interference: float) -> Forecast:
    """The forecast of `view.request` on `option`. O(1) plus O(tiers running there)."""
    made = Forecast()
    instance = option.instance
    prompt, output = option.prefill_tokens, option.decode_tokens or 1
    context = view.request.prompt_tokens
    decoding = instance.decoding
    td = cost.decode_step_s(decoding, instance.decoding_kv_tokens)
    room = max(cost.budget - decoding, 64)
    busy = len(instance.charges)
    per_token = cost.prefill_s
    wait = 0.5 * td if busy else 0.0
    if prompt:
        if instance.prefill_tokens:
            owed = _owed(instance, view.now_s, per_token + td / room)
            wait += per_token * owed + math.ceil(owed / room) * td
        prefill = per_token * prompt + math.ceil(prompt / room) * td
    else:
        prefill = td
    if busy:
        left = instance.decode_tokens / busy
        stay = _exp(-0.25 * output / left) if left > 0 else 0.0
        """Chance that one of those running is still there after a quarter of this request's life."""
        overlap = left * (1.0 - stay**4) / output
        """Average share of this request's life that one of the others is beside it."""
    else:
        left = stay = overlap = 0.0
    if cost.capacity is not None:
        held = instance.kv_tokens - instance.shared_kv.tokens
        fresh = context - option.cached_tokens
        over = held + fresh - cost.capacity
        if over > 0 and busy:
            # a share over/held of what runs must end first; lifetimes are taken as exponential
            wait += min(-math.log1p(-min(over / max(held, 1), 0.99)) * left * td, MOST_WAIT_S)
        made.kv_over_tokens = _peak(held, busy, stay, fresh, output) - cost.capacity
    made.wait_s, made.prefill_s = wait, prefill
    hit = 1.0
    if view.leg != "prefill":
        beside = instance.kv_tokens + 0.5 * instance.decode_tokens
        tpot = cost.decode_step_s(1.0 + busy * overlap, context + 0.5 * output + beside * overlap)
        if view.leg == "whole":
            tpot /= 1.0 - interference
        made.tpot_s = tpot
        bound = tpot_bound(view.tier, option.decode_tokens)
        if bound is not None:
            hit = chance(bound - tpot, error * bound)
        if busy:
            stall = per_token * prompt
            shared = overlap * output * (cost.sequence_s + cost.kv_s * (context + 0.5 * output))
            made.delay_s = decoding * stall + busy * shared
            made.loss = _loss(instance, view.now_s, tpot, stall, shared, error)
    if view.leg != "decode":
        slack = view.deadline_s - view.now_s
        if slack != math.inf:
            hit *= chance(slack - wait - prefill, error * (view.tier.ttft_s or 1.0))
    made.hit = hit
    return made


def tpot_bound(tier: Tier, output_tokens: float) -> float | None:
    """Seconds per output token that the tier allows: its own bound, or what is left of an E2E bound."""
    if tier.tpot_s is not None:
        return tier.tpot_s
    if tier.e2e_s is not None:
        return 0.8 * tier.e2e_s / max(output_tokens, 8)
    return None


def _owed(instance: Instance, now_s: float, seconds_per_token: float) -> float:
    """Prompt tokens ahead, less what the first of them has progressed since it began."""
    head = next(iter(instance.prefilling.values()))
    began = max(head.dispatched_s, instance.last_first_token_s)
    return instance.prefill_tokens - min(0.9 * head.prefill_left, (now_s - began) / seconds_per_token)


def _peak(held: int, count: int, stay: float, context: int, output: int) -> float:
    """Largest KV use while this request lives there: at a quarter, half and all of its life."""
    horizon = 0.25 * output
    peak = stay * (held + count * horizon) + context + horizon
    half = stay * stay
    peak = max(peak, half * (held + count * 2.0 * horizon) + context + 2.0 * horizon)
    return max(peak, half * half * (held + count * 4.0 * horizon) + context + 4.0 * horizon)


def _loss(instance: Instance, now_s: float, tpot_s: float, stall_s: float, shared_s: float, error: float) -> float:
    """Hits that those running there would lose, tier by tier at their mean."""
    loss = 0.0
    for group in instance.groups.values():
        count = group.count
        if not count:
            continue
        total = (group.generated + group.remaining) / count
        bound = group.tpot_s
        if bound is None:
            if group.e2e_s is None:
                continue
            bound = 0.8 * group.e2e_s / max(total, 8.0)
        if total < 2.0:
            continue
        elapsed = (group.decoding * now_s - group.first_us * 1e-6) / count
        before = (elapsed + group.remaining / count * tpot_s) / total
        unit = SHARPNESS / (error * bound)
        z = (bound - before - (shared_s + stall_s * group.decoding / count) / total) * unit
        if z < SURE:
            still = 1.0 / (1.0 + _exp(-z)) if z > -30.0 else 0.0
            loss += count * (chance(bound - before, error * bound) - still)
    return loss
