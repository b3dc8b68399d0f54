"""When everything is done: the completion of what an instance runs, and of a queue that faster ones work off.

Sums of work at the instance's own step costs, so O(1) per instance: every prompt token once, every output token once,
the base of a step once per step. With D requests of which each has `left` tokens to come and a request of o tokens,

    done      = prefill*(owed + n) + steps * decode_step(tokens / steps),  tokens = D*left + o,  steps = max(o, left)
    all done  = (held + sum_i backlog_i * rate_i) / sum_i rate_i,  each instance i at its full batch

where `backlog` is what runs there already and `rate` how many requests like this one it ends per second.
"""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge.routing.cost import Cost
from weighbridge.routing.policy import Option


def done_s(option: Option, cost: Cost, output: int, context: int) -> float:
    """Seconds until an instance has ended all that it runs and a request of `output` tokens that comes now."""
    instance = option.instance
    busy = len(instance.charges)
    steps = max(output, instance.decode_tokens // busy if busy else 0, 1)
    together = (instance.decode_tokens + output) / steps
    kv = (instance.kv_tokens + context) / (busy + 1) * together
    return cost.prefill_s * (instance.prefill_tokens + option.prefill_tokens) + steps * cost.decode_step_s(together, kv)


def alone_s(option: Option, cost: Cost, output: int, context: int) -> float:
    """Seconds that an instance with nothing else to do takes for the request."""
    return cost.prefill_s * option.prefill_tokens + output * cost.decode_step_s(1, context)


class Faster:
    """Full instances that a request could wait for: their rate for requests like it, and what they have begun."""

    __slots__ = ("begun", "rate", "steps")

    def __init__(self, full: Sequence[Option], output: int) -> None:
        """Every one of `full` must have a cost."""
        self.rate = self.begun = 0.0
        """Requests per second; requests' worth of work that runs there already."""
        self.steps: list[tuple[float, int]] = []
        """Seconds of a decode step now and the place in `full`."""
        for n, option in enumerate(full):
            instance, cost = option.instance, option.instance.cost
            assert cost is not None
            running = max(len(instance.charges), 1)
            step = cost.decode_step_s(running, instance.kv_tokens)
            # like requests one after another: a share of the batch's decoding each
            rate = 1.0 / (output * step / running + cost.prefill_s * option.prefill_tokens)
            self.rate += rate
            self.begun += rate * (instance.decode_tokens * step / running + cost.prefill_s * instance.prefill_tokens)
            self.steps.append((step, n))

    def all_done_s(self, held: int) -> float:
        """Seconds until they have ended what they run and `held` more."""
        return (held + self.begun) / self.rate
