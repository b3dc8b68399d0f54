"""Requests in flight, weighted by how slow the instance is: cheap, and strong on mixed hardware.

score = (in flight + 1) * seconds of one decode step
"""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View, least
from weighbridge.routing.speed import all_known, step_seconds


class SpeedRequests:
    """Least (in-flight + 1) x step time; without profiles for all, fewest requests."""

    def choose(self, view: View) -> Choice:
        """Pick the least speed-weighted queue."""
        known = all_known(view.options)
        scores = [
            (len(option.instance.charges) + 1) * ((step_seconds(option.instance) or 1.0) if known else 1.0)
            for option in view.options
        ]
        return Choice(least(scores, view.rng), scores, note="" if known else "no profile: compared by requests")
