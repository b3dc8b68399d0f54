"""A routing policy in forty lines: send each request where its first token should come soonest, or let it wait."""

from __future__ import annotations

from weighbridge.routing.fleet import Instance
from weighbridge.routing.policy import Choice, View, least


class ShortestWait:
    """Least seconds to the first token; holds a request while every instance would make it wait too long.

    `patience` is the share of the time to the deadline that may be spent in an engine's queue.
    """

    holds = True

    def __init__(self, patience: float = 0.5) -> None:
        if not 0.0 < patience <= 1.0:
            raise ValueError("patience must be above 0 and at most 1")
        self.patience = patience

    def choose(self, view: View) -> Choice:
        """Pick the instance that answers first, or none of them yet."""
        waits = [queue_s(option.instance) for option in view.options]
        scores = [
            wait + seconds_per_token(option.instance) * option.prefill_tokens
            for wait, option in zip(waits, view.options, strict=True)
        ]
        best = least(scores, view.rng)
        if view.may_hold and scores[best] > self.patience * (view.deadline_s - view.now_s):
            return Choice(None)
        terms = [{"queue_s": wait} for wait in waits] if view.explain else []
        return Choice(best, scores, terms)


def queue_s(instance: Instance) -> float:
    """Seconds of prompt that were sent there and are not computed yet."""
    return seconds_per_token(instance) * instance.prefill_tokens


def seconds_per_token(instance: Instance) -> float:
    """Prefill seconds per prompt token, by its profile; a guess without one."""
    return instance.cost.prefill_s if instance.cost is not None else 1e-4
