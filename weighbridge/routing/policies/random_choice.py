"""Uniformly at random: the baseline that knows nothing and never herds."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View


class Random:
    """Any option with equal chance."""

    def choose(self, view: View) -> Choice:
        """Draw one."""
        return Choice(view.rng.randrange(len(view.options)))
