"""Stay where the prefix is unless waiting there is far worse, then least token load; llm-d's default.

    sticky = options with cached / prompt >= match
    TTFT   = outstanding uncached prompt tokens / rate
    leave the sticky set when its best TTFT exceeds the others' best by more than `patience_s`
    inside the set kept: highest 1 - min(1, tokens in flight / full)

The rate is the original's constant for one model on one machine; give the fleet's own with `tokens_per_s`.

Nothing else bounds how many requests of one prefix go to one instance, in the original as here. Its only way out is the
wait, counted in *uncached* tokens: 18 seconds are 287,000 of them ahead of the others. Requests whose prompt is cached
add next to none, so one hot prefix stays on the instances that hold it however many requests run there; those are
equally loaded among themselves, the others idle. (The original's fleet may refuse or queue in front of all instances
once they are saturated on average, which one hot instance among many does not cause.) It is a baseline; `calibrated`
prices affinity against the wait, `prefix_affinity` drops it once the loads differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge.routing.policy import Choice, Option, View, least


class AffinityGate:
    """Filter by prefix, then by token load."""

    def __init__(
        self,
        match: float = 0.8,
        patience_s: float = 18.0,
        tokens_per_s: float = 15_928.0,
        full_tokens: int = 4_194_304,
    ) -> None:
        if tokens_per_s <= 0 or full_tokens <= 0:
            raise ValueError("tokens_per_s and full_tokens must be above 0")
        self.match = match
        self.patience_s = patience_s
        self.tokens_per_s = tokens_per_s
        self.full_tokens = full_tokens

    def choose(self, view: View) -> Choice:
        """Pick inside the sticky set, or among all once it is too busy."""
        options = view.options
        wanted = self.match * view.request.prompt_tokens
        kept = [i for i, option in enumerate(options) if option.cached_tokens >= wanted > 0]
        others = [i for i in range(len(options)) if i not in kept]
        note = "prefix kept" if kept else "no prefix"
        if kept and others and self._ttft_s(options, kept) - self._ttft_s(options, others) > self.patience_s:
            kept, note = list(range(len(options))), "prefix left: too busy"
        kept = kept or others
        loads = [
            min(1.0, (options[i].instance.prefill_tokens + options[i].instance.decoding_kv_tokens) / self.full_tokens)
            for i in kept
        ]
        return Choice(kept[least(loads, view.rng)], note=note)

    def _ttft_s(self, options: Sequence[Option], which: list[int]) -> float:
        return min(options[i].instance.prefill_tokens for i in which) / self.tokens_per_s
