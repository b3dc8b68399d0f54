"""Blocks of work and memory, as Dynamo's KV router counts them.

    cost   = a * max(P + p - credit, 0) + D + d + b * n
    credit = c * decay * hit        decay = 1 / (1 + g * (P - least P) / p)

P, p: outstanding and own prompt blocks; D, d: KV blocks of what runs there, and own; n: requests there; hit: own
blocks in its cache. `product` is the variant P' * (D' + 1) with P' the uncached prompt blocks and D' the requests.
With `temperature` > 0 the choice is drawn by softmax over costs normalised to their range.
A block costs the same on a fast and a slow instance; that is the original's.
"""

from __future__ import annotations

import math

from weighbridge.routing.policy import Choice, View, least


class BlockCost:
    """Least blocks."""

    def __init__(
        self,
        prefill_weight: float = 1.0,
        request_weight: float = 0.0,
        hit_credit: float = 1.0,
        decay: float = 0.0,
        temperature: float = 0.0,
        product: bool = False,
        block_tokens: int = 16,
    ) -> None:
        if block_tokens < 1 or temperature < 0:
            raise ValueError("block_tokens must be at least 1 and temperature at least 0")
        self.prefill_weight = prefill_weight
        self.request_weight = request_weight
        self.hit_credit = hit_credit
        self.decay = decay
        self.temperature = temperature
        self.product = product
        self.block_tokens = block_tokens

    def choose(self, view: View) -> Choice:
        """Pick the option with the least cost, or draw one by it."""
        scores = self.costs(view)
        if self.temperature == 0.0:
            return Choice(least(scores, view.rng), scores)
        low, high = min(scores), max(scores)
        span = (high - low) or 1.0
        weights = [math.exp(-(score - low) / span / self.temperature) for score in scores]
        return Choice(view.rng.choices(range(len(scores)), weights)[0], scores, note="drawn by softmax")

    def costs(self, view: View) -> list[float]:
        """Cost of every option in blocks."""
        size = self.block_tokens
        own = view.request.prompt_tokens / size
        outstanding = [option.instance.prefill_tokens / size for option in view.options]
        least_outstanding = min(outstanding)
        costs = []
        for option, active in zip(view.options, outstanding, strict=True):
            instance = option.instance
            if self.product:
                costs.append((active + option.prefill_tokens / size) * (len(instance.charges) + 1))
                continue
            decay = 1.0 / (1.0 + self.decay * (active - least_outstanding) / own)
            credit = self.hit_credit * decay * option.cached_tokens / size
            prefill = max(active + own - credit, 0.0)
            memory = instance.kv_tokens / size + own
            costs.append(self.prefill_weight * prefill + memory + self.request_weight * len(instance.charges))
        return costs
