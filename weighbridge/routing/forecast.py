"""What a request would cost on an instance, in seconds, and how likely it and its neighbours meet their bounds.

From the ledger's sums alone, kept until they change (`standing.py`), so O(1) per instance. For a request of n uncached
prompt tokens and o expected output tokens, on an instance with D decoding sequences that hold K KV tokens and Q prompt
tokens sent and not computed:

    td      = base + sequence*D + kv*K                      a decode step now;  room = token budget - D
    wait    = td/2 [if busy] + prefill*Q' + ceil(Q'/room)*td + time until enough KV frees
              Q' = Q less what the head of the queue has progressed since it started
    prefill = prefill*n + ceil(n/room)*td                   TTFT = wait + prefill
    transfer = latency + seconds per token * prompt         on the decode leg, where it was measured
    tpot    = (base + sequence*S + kv*Kb) / (1 - min(u, .7)),  u = share of the fleet's prefill capacity in use
              S, Kb: the batch that will run beside it on average, remaining lengths taken as exponential
    delay   = D*prefill*n + sum_j min(left_j, o)*(sequence + kv*(n + o/2)), and recompute if KV would overflow
    hit     = P(TTFT <= slack) * P(tpot <= bound), logistic with width error * bound, the larger error of
              what the policy assumes and what the instance's profile knows of itself;
              of a tier with an E2E bound and none on TPOT P(TTFT + o * tpot <= what is left of it)
    loss    = over the tiers running there: count * (chance to meet TPOT now - chance with this request beside it)
"""

from __future__ import annotations

import math

from weighbridge.routing.cost import Cost
from weighbridge.routing.fleet import Charge, Instance
from weighbridge.routing.policy import Option, View
from weighbridge.routing.standing import Standing, TierSums

SHARPNESS = 1.7
"""Logistic slope that stands for a normal error of one width."""
MOST_WAIT_S = 60.0
SURE = 12.0
"""Margins beyond this many logistic units are certain: both chances are 1."""
_INFINITY = math.inf


def chance(margin: float, width: float) -> float:
    """Probability that a bound is met with `margin` seconds to spare and an error of `width` seconds."""
    z = SHARPNESS * margin / width
    if z > 30.0:
        return 1.0
    return 1.0 / (1.0 + math.exp(-z)) if z > -30.0 else 0.0


class Forecast:
    """Seconds, chances and hits of one request on one instance."""

    __slots__ = ("delay_s", "hit", "kv_over_tokens", "loss", "prefill_s", "tpot_s", "transfer_s", "wait_s")

    def __init__(
        self,
        wait_s: float,
        prefill_s: float,
        transfer_s: float,
        tpot_s: float,
        delay_s: float,
        hit: float,
        loss: float,
        kv_over: float,
    ) -> None:
        self.wait_s = wait_s
        self.prefill_s = prefill_s
        self.transfer_s = transfer_s
        self.tpot_s = tpot_s
        self.delay_s = delay_s
        self.hit = hit
        self.loss = loss
        self.kv_over_tokens = kv_over
        """By how much its KV would overflow; exact only above 0."""

    @property
    def ttft_s(self) -> float:
        """From now to the first token."""
        return self.wait_s + self.prefill_s + self.transfer_s


Terms = tuple[float, float, float, float, float, float, float, float]
"""A `Forecast` in the order of its arguments, for where thousands are made each second and one is kept."""


class Asked:
    """What a forecast needs of the request, the same for every instance it is made on."""

    __slots__ = (
        "context",
        "e2e_s",
        "error",
        "left_s",
        "leg",
        "now_s",
        "output",
        "sharp",
        "slack_s",
        "stretch",
        "tpot_s",
        "ttft_s",
    )

    def __init__(self, view: View, output_tokens: int, error: float, interference: float) -> None:
        self.context = view.request.prompt_tokens
        self.output = output_tokens or 1
        self.now_s = view.now_s
        self.leg = view.leg
        self.error = error
        self.sharp = SHARPNESS / error
        """Logistic units of a margin as large as its bound."""
        self.slack_s = view.deadline_s - view.now_s
        self.ttft_s = error * (view.tier.ttft_s or 1.0)
        """Width of the first-token chance."""
        tier = view.tier
        self.tpot_s = tier.tpot_s
        self.e2e_s = tier.e2e_s if tier.tpot_s is None else None
        """Looked at where there is no TPOT bound."""
        self.left_s = 0.0 if tier.e2e_s is None else tier.e2e_s - (view.now_s - view.request.arrival_s)
        """What is left of the E2E bound."""
        self.stretch = 1.0 / (1.0 - interference) if view.leg == "whole" else 1.0
        """By how much prefill beside it stretches TPOT."""

    def width(self, cost: Cost) -> float:
        """How many times wider an instance's forecasts are than `error`: a profile may know itself to be worse."""
        return cost.error / self.error if cost.error > self.error else 1.0

    def misses(self, made: Forecast) -> bool:
        """Whether an E2E bound, where that is what counts, is out of reach."""
        return self.e2e_s is not None and self.left_s < made.ttft_s + self.output * made.tpot_s


def forecast(option: Option, view: View, cost: Cost, error: float, interference: float) -> Forecast:
    """The forecast of `view.request` on `option`. O(1) plus O(tiers running there)."""
    return Forecast(*forecast_terms(option, cost, Asked(view, option.decode_tokens, error, interference)))


def _stand(instance: Instance, cost: Cost) -> Standing:
    """Work out where the instance stands now, and keep it there until something changes."""
    made = instance.standing = Standing(
        cost,
        instance.changes + cost.changes,
        busy=len(instance.charges),
        decoding=instance.decoding,
        decoding_kv_tokens=instance.decoding_kv_tokens,
        decode_tokens=instance.decode_tokens,
        kv_tokens=instance.kv_tokens,
        shared_tokens=instance.shared_kv.tokens,
        groups=instance.groups.values(),
    )
    return made


def forecast_terms(option: Option, cost: Cost, asked: Asked) -> Terms:
    """The forecast on `option` of what is asked; for many options of one request."""
    instance = option.instance
    prompt, output, context = option.prefill_tokens, asked.output, asked.context
    stands = instance.standing
    if stands is None or stands.changes != instance.changes + cost.changes or stands.cost is not cost:
        stands = _stand(instance, cost)
    busy, td, room = stands.busy, stands.step_s, stands.room
    per_token = cost.prefill_s
    wait, transfer = stands.wait_s, 0.0
    if prompt:
        if instance.prefill_tokens:
            owed = _owed(instance, asked.now_s, per_token + td / room)
            wait += per_token * owed + math.ceil(owed / room) * td
        prefill = per_token * prompt + (td if prompt <= room else math.ceil(prompt / room) * td)
    else:
        prefill = td
        transfer = cost.transfer_latency_s + cost.transfer_token_s * context
    left, stay, overlap = stands.left, 0.0, 0.0
    if left > 0:
        # chance that one of those running is still there after a quarter of this request's life
        stay = math.exp(-0.25 * output / left)
        # average share of this request's life that one of the others is beside it
        half = stay * stay
        overlap = left * (1.0 - half * half) / output
    kv_over = 0.0
    if cost.capacity is not None:
        held = stands.held
        fresh = context - option.cached_tokens
        if busy and held + fresh > cost.capacity:
            # a share over/held of what runs must end first; lifetimes are taken as exponential
            share = min((held + fresh - cost.capacity) / max(held, 1), 0.99)
            wait += min(-math.log1p(-share) * left * td, MOST_WAIT_S)
        kv_over = float(fresh + held + (busy + 1) * output - cost.capacity)
        if kv_over > 0.0:  # else not even if nobody ends
            kv_over = _peak(held, busy, stay, fresh, output) - cost.capacity
    tpot = delay = loss = 0.0
    if asked.leg != "prefill":
        own = context + 0.5 * output
        tpot = cost.decode_step_s(1.0 + busy * overlap, own + stands.kv * overlap) * asked.stretch
        if busy:
            stall = per_token * prompt
            shared = overlap * output * (cost.sequence_s + cost.kv_s * own)
            delay = stands.decoding * stall + busy * shared
            loss = _loss(stands.tiers, asked, tpot, stall, shared)
    hit = _hit(asked, asked.width(cost), wait + prefill + transfer, tpot, transfer)
    return wait, prefill, transfer, tpot, delay, hit, loss, kv_over


def _hit(asked: Asked, width: float, ttft_s: float, tpot_s: float, transfer_s: float) -> float:
    """Chance to meet the bounds that this leg has a part in; forecasts are `width` times as wide as asked for."""
    hit = 1.0
    leg = asked.leg
    if leg != "prefill":
        bound = asked.tpot_s
        if bound is not None:
            z = SHARPNESS * (bound - tpot_s) / (width * asked.error * bound)
            hit = 1.0 / (1.0 + math.exp(-z)) if z > -30.0 else 0.0
        elif asked.e2e_s is not None:
            hit = chance(asked.left_s - ttft_s - asked.output * tpot_s, width * asked.error * asked.e2e_s)
    if (leg != "decode" or transfer_s) and asked.slack_s != _INFINITY:
        z = SHARPNESS * (asked.slack_s - ttft_s) / (width * asked.ttft_s)
        if z < 30.0:
            hit *= 1.0 / (1.0 + math.exp(-z)) if z > -30.0 else 0.0
    return hit


def _owed(instance: Instance, now_s: float, seconds_per_token: float) -> float:
    """Prompt tokens ahead, less what the first of them has progressed since it began."""
    head: Charge | None = None
    for head in instance.prefilling.values():  # noqa: B007 - the first; an iterator asked for one costs more
        break
    assert head is not None
    began = max(head.dispatched_s, instance.last_first_token_s)
    return instance.prefill_tokens - min(0.9 * head.prefill_left, (now_s - began) / seconds_per_token)


def _peak(held: int, count: int, stay: float, context: int, output: int) -> float:
    """Largest KV use while this request lives there: at a quarter, half and all of its life."""
    horizon = 0.25 * output
    grown = count * horizon
    peak = stay * (held + grown) + horizon
    half = stay * stay
    later = half * (held + 2.0 * grown) + 2.0 * horizon
    if later > peak:
        peak = later
    later = half * half * (held + 4.0 * grown) + output
    return context + (later if later > peak else peak)


def _loss(tiers: list[TierSums], asked: Asked, tpot_s: float, stall_s: float, shared_s: float) -> float:
    """Hits that those running there would lose, tier by tier at their mean."""
    loss = 0.0
    now_s, sharp = asked.now_s, asked.sharp
    for tier in tiers:
        # logistic units of margin to the bound: their mean TPOT so far and to come, without and with this request
        before = sharp * (1.0 + tier.first - tier.decoding * now_s - tier.remaining * tpot_s)
        after = before - sharp * (tier.each * shared_s + tier.decoding * stall_s)
        if after < SURE and before > -SURE:
            still = 1.0 / (1.0 + math.exp(-after)) if after > -SURE else 0.0
            loss += tier.count * (1.0 / (1.0 + math.exp(-before)) - still)
    return loss


def fullest(option: Option, cost: Cost, asked: Asked, made: Forecast) -> float:
    """The share of their bounds on decoding that those running there would use up with this request among them, in the
    tier that has least left, at its mean; 0 where nobody has such a bound."""
    instance = option.instance
    stands = instance.standing
    if stands is None or stands.changes != instance.changes + cost.changes or stands.cost is not cost:
        stands = _stand(instance, cost)
    stall = cost.prefill_s * option.prefill_tokens
    together = 0.0
    if stands.left > 0:
        together = stands.left * (1.0 - math.exp(-asked.output / stands.left))
    shared = together * (cost.sequence_s + cost.kv_s * (asked.context + 0.5 * asked.output))
    most = 0.0
    for tier in stands.tiers:
        used = tier.decoding * (asked.now_s + stall) - tier.first + tier.remaining * made.tpot_s + tier.each * shared
        most = max(most, used)
    return most
