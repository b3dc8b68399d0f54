"""Join the shortest queue, counted in tokens still to compute."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View, least


class LeastTokens:
    """Fewest outstanding prompt and expected output tokens after this request, its own uncached prompt included."""

    def choose(self, view: View) -> Choice:
        """Pick the option with the fewest outstanding tokens."""
        scores = [
            float(option.instance.prefill_tokens + option.instance.decode_tokens + option.prefill_tokens)
            for option in view.options
        ]
        return Choice(least(scores, view.rng), scores)
