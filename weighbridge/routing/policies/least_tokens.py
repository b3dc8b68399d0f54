"""Join the shortest queue, counted in tokens in flight."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View, least


class LeastTokens:
    """Fewest tokens of all requests in flight: prompts and what they have generated, and the uncached part of this
    prompt. Expected output is left out: progress tells more than a prediction."""

    def choose(self, view: View) -> Choice:
        """Pick the option with the fewest outstanding tokens."""
        scores = [float(option.instance.kv_tokens + option.prefill_tokens) for option in view.options]
        return Choice(least(scores, view.rng), scores, lasting=True)
