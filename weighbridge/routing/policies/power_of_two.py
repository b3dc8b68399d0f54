"""The better of two drawn at random: robust where the load seen is stale (Mitzenmacher 2001)."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View


class PowerOfTwo:
    """Two different options drawn at random; the one with fewer requests in flight, the first drawn on a tie."""

    def choose(self, view: View) -> Choice:
        """Draw two, take the shorter."""
        options = view.options
        if len(options) == 1:
            return Choice(0)
        first, second = view.rng.sample(range(len(options)), 2)
        shorter = len(options[second].instance.charges) < len(options[first].instance.charges)
        return Choice(second if shorter else first)
