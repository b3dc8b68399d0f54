"""Join the shortest queue, counted in requests."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View, least


class LeastRequests:
    """Fewest requests in flight by our own ledger."""

    def choose(self, view: View) -> Choice:
        """Pick the option with the fewest requests in flight."""
        scores = [float(len(option.instance.charges)) for option in view.options]
        return Choice(least(scores, view.rng), scores)
