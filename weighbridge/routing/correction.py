"""What live traffic says about a profile: an instance's decode and prefill scale, learned from clean observations only.

Total TTFT under load is queueing, not rate; learning from it feeds back and makes overload worse. So only two kinds of
observation count:
- the time between two token counts of one running request: steps * decode step + prompts computed meanwhile;
- the first token of a request that found no prompt ahead of it and none came after.
Each moves the scale by a small power of observed / forecast. An instance without a profile starts from a guess and is
trusted after enough observations.
"""

from __future__ import annotations

import math

from weighbridge.core.instance import StepTerms
from weighbridge.routing.cost import Cost
from weighbridge.routing.fleet import Charge, Instance

GAIN = 0.05
MOST_STEP = 1.5
"""One observation changes a scale by no more than this factor to the power of the gain's own result."""
RANGE = 16.0
FEWEST_TOKENS = 4
ENOUGH = 40
"""Observations after which a guess is used like a profile."""
GUESS = StepTerms(base_s=0.02, prefill_s=1e-4, sequence_s=1e-4, kv_s=1e-7)
FAR = 1.5
"""Beyond this factor an observation moves the scale three times as fast."""
MOSTLY = 0.5
HARDLY = 0.2


class Probe:
    """The running request whose token counts are timed; one per instance is enough."""

    __slots__ = ("charge", "prefilled_tokens", "step_s", "time_s", "tokens")

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
        self.step_s = cost.decode_step_s(instance.decoding, instance.decoding_kv_tokens)


class Correction:
    """Learns scales of all instances. Pure state; the router calls it."""

    def __init__(self) -> None:
        self._probes: dict[str, Probe] = {}
        self._guesses: dict[str, tuple[int, Cost]] = {}
        self._counts: dict[str, int] = {}

    def progressed(self, charge: Charge, now_s: float) -> None:
        """A running request has a new token count."""
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
        step = 0.5 * (probe.step_s + cost.decode_step_s(instance.decoding, instance.decoding_kv_tokens))
        decode = tokens * step
        prefill = (instance.prefilled_tokens - probe.prefilled_tokens) * cost.prefill_s
        if prefill < HARDLY * seconds:
            self._scale(instance, cost, 1.0, (seconds - prefill) / decode)
        elif prefill > MOSTLY * (prefill + decode) and seconds > decode:
            self._scale(instance, cost, (seconds - decode) / prefill, 1.0)
        elif not 1.0 / FAR < seconds / (prefill + decode) < FAR:
            # which of the two is wrong cannot be told, but together they are, by far
            both = seconds / (prefill + decode)
            self._scale(instance, cost, both, both)
        probe.start(charge, cost, now_s)

    def first_token(self, charge: Charge, prefilled: int, now_s: float) -> None:
        """The prompt of `prefilled` uncached tokens is computed; to be called before the ledger releases it."""
        instance = charge.instance
        if not charge.found_no_queue or instance.dispatches != charge.number:
            return
        cost = self._cost(instance)
        td = cost.decode_step_s(instance.decoding, instance.decoding_kv_tokens)
        prefill = cost.prefill_s * prefilled
        other = (0.5 + math.ceil(prefilled / cost.budget)) * td
        observed = now_s - charge.dispatched_s - other
        if prefill > MOSTLY * (prefill + other) and observed > 0.0:
            self._scale(instance, cost, observed / prefill, 1.0)

    def forget(self, name: str) -> None:
        """The instance restarted or has a new profile."""
        self._probes.pop(name, None)
        self._guesses.pop(name, None)
        self._counts.pop(name, None)

    def _cost(self, instance: Instance) -> Cost:
        if instance.cost is not None:
            return instance.cost
        guess = self._guesses.get(instance.name)
        if guess is None:
            guess = self._guesses[instance.name] = (0, Cost(instance.spec, GUESS))
        return guess[1]

    def _scale(self, instance: Instance, cost: Cost, prefill: float, decode: float) -> None:
        cost.rescale(_moved(cost.prefill_scale, prefill), _moved(cost.decode_scale, decode))
        if instance.cost is None:
            count = self._counts[instance.name] = self._counts.get(instance.name, 0) + 1
            if count >= ENOUGH:
                instance.cost = cost


def _moved(scale: float, ratio: float) -> float:
    if ratio <= 0.0:
        return scale
    gain = GAIN if 1.0 / FAR < ratio < FAR else 3.0 * GAIN
    factor = min(max(math.exp(gain * math.log(ratio)), 1.0 / MOST_STEP), MOST_STEP)
    return min(max(scale * factor, 1.0 / RANGE), RANGE)
