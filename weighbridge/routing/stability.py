"""How much of what the fleet can sustain is being offered: above 1 no scheduler keeps the queue finite.

    token load = offered tokens (prompt and output) per second / sum over instances of budget / time of a full step
    KV load    = offered sum of (p*o + o*o/2) per second * decode step / sum over instances of KV capacity

with p prompt and o expected output tokens of each request: o steps hold p, p + 1, ... tokens. Prompt tokens that a
prefix cache holds are not offered work. Offered rates are averages over the last half minute. Head-room is 1 - load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weighbridge.core.request import Request
from weighbridge.routing.fleet import Instance
from weighbridge.routing.loads import Stability

MEMORY_S = 30.0


class Offer:
    """Decaying sums of what arrives."""

    __slots__ = ("_since_s", "_time_s", "_token_steps", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._token_steps = 0.0
        self._time_s = 0.0
        self._since_s: float | None = None

    def add(self, request: Request, fresh_tokens: int, output_tokens: int, now_s: float) -> None:
        """A request arrived: `fresh_tokens` of its prompt are in no cache, `output_tokens` are expected."""
        if self._since_s is None:
            self._since_s = self._time_s = now_s
        fade = math.exp((self._time_s - now_s) / MEMORY_S)
        prompt = request.prompt_tokens
        self._tokens = self._tokens * fade + fresh_tokens + output_tokens
        self._token_steps = self._token_steps * fade + output_tokens * (prompt + output_tokens / 2)
        self._time_s = now_s

    def stability(self, instances: Sequence[Instance], now_s: float) -> Stability:
        """The loads now, over the instances that are up. Meaningful once some seconds of traffic were seen."""
        seen = 0.0 if self._since_s is None else now_s - self._since_s
        # a young average has seen only part of its memory
        window = MEMORY_S * (1.0 - math.exp(-seen / MEMORY_S)) if seen > 0 else 0.0
        if window <= 0.0:
            return Stability(token_load=None, kv_load=None, offered_tokens_per_s=0.0)
        fade = math.exp((self._time_s - now_s) / MEMORY_S) / window
        tokens, token_steps = self._tokens * fade, self._token_steps * fade
        capacity = held = 0.0
        for instance in instances:
            cost, kv_tokens = instance.cost, instance.spec.limits.kv_tokens
            if cost is None:
                return Stability(token_load=None, kv_load=None, offered_tokens_per_s=tokens)
            decoding = instance.decoding
            # of one at least: with nobody decoding a step may cost nothing, which would be room without end
            step = cost.decode_step_s(max(decoding, 1), instance.decoding_kv_tokens)
            capacity += cost.budget / (step + cost.prefill_s * max(cost.budget - decoding, 0))
            held = math.nan if kv_tokens is None else held + kv_tokens / step
        return Stability(
            token_load=tokens / capacity if capacity else None,
            kv_load=None if math.isnan(held) or not held else token_steps / held,
            offered_tokens_per_s=tokens,
        )
