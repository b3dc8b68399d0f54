"""Most free KV cache."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View, least


class KvFree:
    """Least KV use after admission: tokens held by the ledger, plus this prompt and its expected output, over capacity.

    Where any capacity is unknown, all are compared by tokens held.
    """

    def choose(self, view: View) -> Choice:
        """Pick the option with the most KV left."""
        capacities = [option.instance.spec.limits.kv_tokens for option in view.options]
        known = all(capacities)
        scores = [
            (option.instance.kv_tokens + view.request.prompt_tokens + option.decode_tokens)
            / (capacity or 1 if known else 1)
            for option, capacity in zip(view.options, capacities, strict=True)
        ]
        return Choice(least(scores, view.rng), scores, note="" if known else "KV capacity unknown: compared by tokens")
