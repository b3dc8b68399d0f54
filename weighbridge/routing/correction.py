"""What live traffic says about a profile: an instance's decode and prefill scale, learned from clean observations only.

Total TTFT under load is queueing, not rate; learning from it feeds back and makes overload worse. So only two kinds of
observation count:
- the time between two token counts of one running request: steps * decode step + prompts computed meanwhile, unless a
  long prompt was half computed at either end;
- the first token of a request that found no prompt ahead of it and none came after;

and neither where what was computed of a prompt is only a few tokens.

Both say how long a known amount of prefill and decode work took together. Which of the two scales is wrong shows over
observations that mix them differently: a Kalman filter over the logarithms of both scales,

    u         = forecast prefill seconds / forecast seconds          1 - u the decode part
    surprise  = log(observed / forecast)
    variance  = u' P u + noise;  gain = P u / variance;  scales *= exp(gain * surprise)

so the first observations of a wrong profile move it most of the way, and later ones hardly. An instance without a
profile starts from a guess and is trusted after enough observations.
"""

from __future__ import annotations

import math

from weighbridge.core.instance import StepTerms
from weighbridge.routing.cost import Cost
from weighbridge.routing.fleet import Charge, Instance

RANGE = 16.0
FEWEST_TOKENS = 4
FEWEST_PROMPT_TOKENS = 32
"""Of less than that the time is what every prompt costs (a call more, KV copied to its place), not its length: taken
for a rate, the last tokens of cached prompts make a long prompt look ten times as dear as it is."""
ENOUGH = 40
"""Observations after which a guess is used like a profile."""
GUESS = StepTerms(base_s=0.02, prefill_s=1e-4, sequence_s=1e-4, kv_s=1e-7)
DOUBT = 0.1
"""Variance of a scale's logarithm before anything was seen: a profile may be wrong by a third, seldom by more."""
DRIFT = 2e-5
"""What it grows by with each observation: engines change."""
NOISE = 0.01
"""Variance of one observation's logarithm where it is all prefill or all decode."""
BLURRED = 0.4
"""What u * (1 - u) adds to it: a prompt that is half done at either end is counted whole or not at all."""
MOST_UNKNOWN = 1.0
"""Times an interval's forecast: where prompts begun and not ended at its ends may take longer, it is no observation."""
SURPRISED = 3.0
"""Deviations beyond which a surprise is cut off: a pause is no rate."""
IN_A_ROW = 3
"""So many surprises on the same side are no pauses: the engine has changed. Of a new profile the first is enough."""
WRONG = 1.0
"""Variance of a scale's logarithm once the profile is known to be wrong: by a factor of e, more or less."""


class Scales:
    """The filter of one instance: the covariance of the logarithms of its prefill and decode scale."""

    __slots__ = ("_both", "_count", "_decode", "_prefill", "_run")

    def __init__(self) -> None:
        self._prefill = self._decode = DOUBT
        self._both = 0.0
        self._count = self._run = 0

    def observe(self, cost: Cost, prefill_s: float, decode_s: float, seconds: float, noise: float) -> None:
        """Work that was forecast at `prefill_s` and `decode_s` took `seconds`; rescale `cost`."""
        forecast = prefill_s + decode_s
        u = prefill_s / forecast
        noise += NOISE + BLURRED * u * (1.0 - u)
        surprise = math.log(seconds / forecast)
        most = SURPRISED * math.sqrt(self._spread(u) + noise)
        sure = True
        if abs(surprise) <= most:
            self._run = 0
        else:
            side = 1 if surprise > 0 else -1
            self._run = self._run + side if self._run * side > 0 else side
            if abs(self._run) >= (IN_A_ROW if self._count >= IN_A_ROW else 1):
                self._prefill = self._decode = WRONG
                self._both = 0.0
                self._run = 0
            else:
                surprise, sure = side * most, False
        self._count += 1
        v = 1.0 - u
        to_prefill = self._prefill * u + self._both * v
        to_decode = self._both * u + self._decode * v
        gain = 1.0 / (self._spread(u) + noise)
        cost.rescale(
            _within(cost.prefill_scale * math.exp(surprise * to_prefill * gain)),
            _within(cost.decode_scale * math.exp(surprise * to_decode * gain)),
        )
        cost.seen = True
        if sure:
            self._prefill = self._prefill - to_prefill * to_prefill * gain + DRIFT
            self._decode = self._decode - to_decode * to_decode * gain + DRIFT
            self._both -= to_prefill * to_decode * gain

    def _spread(self, u: float) -> float:
        """Variance of the forecast's logarithm."""
        v = 1.0 - u
        return self._prefill * u * u + 2.0 * self._both * u * v + self._decode * v * v


def _begun(instance: Instance) -> int:
    """Tokens of the prompt that may be half computed: the first in the queue."""
    for charge in instance.prefilling.values():
        return charge.prefill_left
    return 0


def _within(scale: float) -> float:
    return min(max(scale, 1.0 / RANGE), RANGE)


class Probe:
    """The running request whose token counts are timed; one per instance is enough."""

    __slots__ = ("begun_tokens", "charge", "prefilled_tokens", "step_s", "time_s", "tokens")

    def __init__(self, charge: Charge, cost: Cost, now_s: float) -> None:
        self.charge = charge
        self.start(charge, cost, now_s)

    def start(self, charge: Charge, cost: Cost, now_s: float) -> None:
        """Begin an interval now."""
        instance = charge.instance
        self.charge = charge
        self.tokens = charge.output_tokens
        self.time_s = now_s
        self.prefilled_tokens = instance.prefilled_tokens
        self.begun_tokens = _begun(instance)
        self.step_s = cost.decode_step_s(instance.decoding, instance.decoding_kv_tokens) / cost.decode_scale
        """By the profile, not scaled: the scale may move meanwhile."""


class Correction:
    """Learns scales of all instances. Pure state; the router calls it."""

    def __init__(self) -> None:
        self._probes: dict[str, Probe] = {}
        self._guesses: dict[str, tuple[int, Cost]] = {}
        self._counts: dict[str, int] = {}
        self._scales: dict[str, Scales] = {}
        self._unseen: dict[str, Instance] = {}

    def progressed(self, charge: Charge, now_s: float) -> None:
        """A running request has a new token count: its first token, some more, or all of them."""
        instance = charge.instance
        probe = self._probes.get(instance.name)
        if probe is None:
            cost = self._cost(instance)
            self._probes[instance.name] = Probe(charge, cost, now_s)
            return
        old = probe.charge
        if old is not charge:
            if old.request.id not in instance.charges or old.generation != instance.generation:
                probe.start(charge, self._cost(instance), now_s)
            return
        cost = self._cost(instance)
        tokens, seconds = charge.output_tokens - probe.tokens, now_s - probe.time_s
        if tokens < FEWEST_TOKENS or seconds <= 0.0:
            return
        step = 0.5 * (
            probe.step_s * cost.decode_scale + cost.decode_step_s(instance.decoding, instance.decoding_kv_tokens)
        )
        prefilled = instance.prefilled_tokens - probe.prefilled_tokens
        prefill = prefilled * cost.prefill_s
        # of a prompt that was being computed at either end nobody knows how much of it these seconds held
        unknown = cost.prefill_s * (probe.begun_tokens + _begun(instance))
        telling = not 0 < prefilled < FEWEST_PROMPT_TOKENS
        if telling and unknown <= MOST_UNKNOWN * (prefill + tokens * step):
            # a report may come just before or just after a step: half a token at either end
            self._observe(instance, cost, prefill, tokens * step, seconds, 0.25 / (tokens * tokens))
        probe.start(charge, cost, now_s)

    def first_token(self, charge: Charge, prefilled: int, now_s: float) -> None:
        """The prompt of `prefilled` uncached tokens is computed; to be called before the ledger releases it."""
        instance = charge.instance
        if not charge.found_no_queue or instance.dispatches != charge.number or prefilled < FEWEST_PROMPT_TOKENS:
            return
        cost = self._cost(instance)
        td = cost.decode_step_s(instance.decoding, instance.decoding_kv_tokens)
        prefill = cost.prefill_s * prefilled
        started = 0.5 * td if instance.decoding else 0.0
        decode = started + math.ceil(prefilled / cost.budget) * td
        seconds = now_s - charge.dispatched_s
        if seconds > 0.0:
            self._observe(instance, cost, prefill, decode, seconds, (started / (prefill + decode)) ** 2)

    def forget(self, instance: Instance) -> None:
        """The instance restarted or has a new profile, which nothing has confirmed yet."""
        name = instance.name
        if instance.cost is not None:
            instance.cost.seen = False
            self._unseen[name] = instance
        self._probes.pop(name, None)
        self._guesses.pop(name, None)
        self._counts.pop(name, None)
        self._scales.pop(name, None)

    def gone(self, instance: Instance) -> None:
        """The instance was taken out of the fleet."""
        self.forget(instance)
        self._unseen.pop(instance.name, None)

    def _cost(self, instance: Instance) -> Cost:
        if instance.cost is not None:
            return instance.cost
        guess = self._guesses.get(instance.name)
        if guess is None:
            guess = self._guesses[instance.name] = (0, Cost(instance.spec, GUESS))
        return guess[1]

    def _observe(
        self, instance: Instance, cost: Cost, prefill_s: float, decode_s: float, seconds: float, noise: float
    ) -> None:
        scales = self._scales.get(instance.name)
        if scales is None:
            scales = self._scales[instance.name] = Scales()
        scales.observe(cost, prefill_s, decode_s, seconds, noise)
        if self._unseen:
            # until they show their own, the others are taken to be as far off: else the first one seen would look
            # faster or slower than all of them, and get everything or nothing
            self._unseen.pop(instance.name, None)
            for other in self._unseen.values():
                if other.cost is not None:
                    other.cost.rescale(cost.prefill_scale, cost.decode_scale)
        if instance.cost is None:
            count = self._counts[instance.name] = self._counts.get(instance.name, 0) + 1
            if count >= ENOUGH:
                instance.cost = cost
