"""Cache-aware routing with an imbalance switch, as SGLang's and vLLM's routers do it.

    imbalanced = max - min > absolute  and  max > relative * min          (requests in flight)
    imbalanced:                     fewest requests
    best match / prompt > ratio:    the instance with the longest match
    otherwise:                      the smallest index (`on_miss: tree`), or fewest requests (`on_miss: load`)

Affinity here is a switch; the calibrated policy makes it a price instead.
"""

from __future__ import annotations

from typing import Literal

from weighbridge.routing.policy import Choice, View, least


class PrefixAffinity:
    """Longest prefix match while the fleet is balanced."""

    def __init__(
        self,
        absolute: int = 32,
        relative: float = 1.1,
        ratio: float = 0.5,
        on_miss: Literal["tree", "load"] = "tree",
    ) -> None:
        if on_miss not in ("tree", "load"):
            raise ValueError("on_miss must be 'tree' or 'load'")
        self.absolute = absolute
        self.relative = relative
        self.ratio = ratio
        self.on_miss = on_miss

    def choose(self, view: View) -> Choice:
        """Pick by match, or by load where loads differ too much or nothing matches."""
        options = view.options
        loads = [float(len(option.instance.charges)) for option in options]
        low, high = min(loads), max(loads)
        if high - low > self.absolute and high > self.relative * low:
            return Choice(least(loads, view.rng), loads, note="imbalanced: fewest requests")
        missed = [-float(option.cached_tokens) for option in options]
        if -min(missed) > self.ratio * view.request.prompt_tokens:
            best = min(missed)
            ties = [i for i, score in enumerate(missed) if score == best]
            return Choice(ties[least([loads[i] for i in ties], view.rng)], missed, note="prefix match")
        if self.on_miss == "load":
            return Choice(least(loads, view.rng), loads, note="no match: fewest requests")
        sizes = [float(len(option.instance.prefix)) for option in options]
        return Choice(least(sizes, view.rng), sizes, note="no match: smallest index")
