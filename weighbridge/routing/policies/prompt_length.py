"""Join the shortest queue, weighted by prompt length: output is taken as unknown."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View, least


class PromptLength:
    """Fewest prompt tokens of all requests in flight, decoding ones included."""

    def choose(self, view: View) -> Choice:
        """Pick the option whose requests in flight have the fewest prompt tokens."""
        scores = [float(option.instance.prompt_tokens) for option in view.options]
        return Choice(least(scores, view.rng), scores)
