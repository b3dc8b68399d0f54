"""Separate long generations from short ones: a static split of the fleet by expected output length."""

from __future__ import annotations

from weighbridge.routing.policy import Choice, View, least


class LengthThreshold:
    """Expected output above `tokens` goes to the last `long_instances` of the options, the rest to the others; fewest
    requests in flight inside each part. With a single option there is no split."""

    def __init__(self, tokens: int = 300, long_instances: int = 2) -> None:
        if tokens < 0 or long_instances < 1:
            raise ValueError("tokens must be at least 0 and long_instances at least 1")
        self.tokens = tokens
        self.long_instances = long_instances

    def choose(self, view: View) -> Choice:
        """Pick the shortest queue in the request's part."""
        options = view.options
        if len(options) == 1:
            return Choice(0)
        split = len(options) - min(self.long_instances, len(options) - 1)
        expected = options[0].decode_tokens
        part = range(split, len(options)) if expected > self.tokens else range(split)
        place = least([float(len(options[i].instance.charges)) for i in part], view.rng)
        return Choice(part[place], note=f"{'long' if expected > self.tokens else 'short'} part: {expected} expected")
