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
from collections.abc import Mapping

from weighbridge.core.instance import StepTerms
from weighbridge.core.request import Tier
from weighbridge.routing.fleet import Instance
from weighbridge.routing.policy import Option, View

DEFAULT_BUDGET = 2_048
SHARPNESS = 1.7
"""Logistic slope that stands for a normal error of one width."""
MOST_WAIT_S = 60.0
MOST_INTERFERENCE = 0.7


def chance(margin: float, width: float) -> float:
    """Probability that a bound is met with `margin` seconds to spare and an error of `width` seconds."""
    z = SHARPNESS * margin / width
    if z > 30.0:
        return 1.0
    return 1.0 / (1.0 + math.exp(-z)) if z > -30.0 else 0.0


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


def forecast(
    option: Option, view: View, step: StepTerms, tiers: Mapping[str, Tier], error: float, interference: float
) -> Forecast:
    """The forecast of `view.request` on `option`. O(1) plus O(tiers running there)."""
    made = Forecast()
    instance, leg = option.instance, view.leg
    spec = instance.spec
    decoding, kv = instance.decoding, instance.decoding_kv_tokens
    prompt, output = option.prefill_tokens, max(option.decode_tokens, 1)
    context = view.request.prompt_tokens
    td = step.base_s + step.sequence_s * decoding + step.kv_s * kv
    room = max((spec.limits.token_budget or DEFAULT_BUDGET) - decoding, 64)
    busy = len(instance.charges)
    if busy:
        made.wait_s = 0.5 * td
    if prompt:
        owed = _owed(instance, view.now_s, step.prefill_s + td / room)
        if owed > 0:
            made.wait_s += step.prefill_s * owed + math.ceil(owed / room) * td
        made.prefill_s = step.prefill_s * prompt + math.ceil(prompt / room) * td
    else:
        made.prefill_s = td
    left = instance.decode_tokens / busy if busy else 0.0
    capacity = spec.limits.kv_tokens
    if capacity is not None:
        over = instance.kv_tokens + context - capacity
        if over > 0 and busy:
            # a share over/held of what runs must finish; exponential lifetimes
            share = min(over / max(instance.kv_tokens, 1), 0.99)
            made.wait_s += min(-math.log1p(-share) * left * td, MOST_WAIT_S)
        made.kv_over_tokens = _peak(instance, left, context, output) - capacity
    bound = tpot_bound(view.tier, option.decode_tokens)
    if leg != "prefill":
        overlap = left * (1.0 - math.exp(-output / left)) / output if left > 0 else 0.0
        """Average share of this request's life that one of the others is beside it."""
        shared = step.base_s + step.sequence_s * (1.0 + busy * overlap)
        shared += step.kv_s * (context + output / 2 + (instance.kv_tokens + instance.decode_tokens / 2) * overlap)
        made.tpot_s = shared / (1.0 - (interference if leg == "whole" else 0.0))
        each = step.sequence_s + step.kv_s * (context + output / 2)
        stall = step.prefill_s * prompt
        made.delay_s = decoding * stall + busy * overlap * output * each
        if busy:
            made.loss = _loss(instance, view.now_s, made.tpot_s, stall, overlap * output * each, tiers, error)
        if bound is not None:
            made.hit = chance(bound - made.tpot_s, error * bound)
    if view.deadline_s != math.inf and leg != "decode":
        ttft_bound = view.tier.ttft_s or 1.0
        made.hit *= chance(view.deadline_s - view.now_s - made.wait_s - made.prefill_s, error * ttft_bound)
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
    owed = float(instance.prefill_tokens)
    if owed:
        head = next(iter(instance.prefilling.values()))
        began = max(head.dispatched_s, instance.last_first_token_s)
        owed -= min(0.9 * head.prefill_left, (now_s - began) / seconds_per_token)
    return owed


def _peak(instance: Instance, left: float, context: int, output: int) -> float:
    """Largest KV use while this request lives there; the others leave at random with mean remaining `left`."""
    peak = 0.0
    held, count = instance.kv_tokens, len(instance.charges)
    for horizon in (output / 4, output / 2, output):
        stay = math.exp(-horizon / left) if left > 0 else 0.0
        peak = max(peak, stay * (held + count * horizon) + context + horizon)
    return peak


def _loss(
    instance: Instance,
    now_s: float,
    tpot_s: float,
    stall_s: float,
    shared_s: float,
    tiers: Mapping[str, Tier],
    error: float,
) -> float:
    """Hits that those running there would lose, tier by tier at their mean."""
    loss = 0.0
    for name, group in instance.groups.items():
        count = group.count
        if not count:
            continue
        tier = tiers.get(name)
        total = (group.generated + group.remaining) / count
        bound = None if tier is None else tpot_bound(tier, total)
        if bound is None or total < 2:
            continue
        elapsed = max(group.decoding * now_s - group.first_us * 1e-6, 0.0) / count
        before = (elapsed + group.remaining / count * tpot_s) / total
        after = before + (shared_s + stall_s * group.decoding / count) / total
        width = error * bound
        loss += count * (chance(bound - before, width) - chance(bound - after, width))
    return loss
