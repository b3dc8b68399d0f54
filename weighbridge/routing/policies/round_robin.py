"""Round robin: each instance in turn, whatever it has to do."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View


class RoundRobin:
    """Next instance in fleet order after the last one chosen, so that an instance's absence does not shift the turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, view: View) -> Choice:
        """Pick the first option whose fleet index follows the last one chosen."""
        options = view.options
        position = next((i for i, option in enumerate(options) if option.instance.index > self._last), 0)
        self._last = options[position].instance.index
        return Choice(position)
