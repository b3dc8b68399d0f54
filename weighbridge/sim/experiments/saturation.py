"""Measured saturation: the rate at which a policy attains a given share of its SLOs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from weighbridge.sim.experiments.base import Options
from weighbridge.sim.runs import Run

Place = TypeVar("Place")

TARGET = 0.835  # what round robin attained in the paper


def saturating(
    make: Callable[[Place, float, float, str, int], Run], place: Place, duration_s: float
) -> Callable[[float, int], Run]:
    """`make(place, rate, duration, policy, seed)` with round robin at one place, by rate and seed."""

    def at(rate: float, seed: int) -> Run:
        return make(place, rate, duration_s, "round_robin", seed)

    return at


def saturated_rate(
    make: Callable[[float, int], Run], seeds: Sequence[int], options: Options, *, start: float, target: float = TARGET
) -> float:
    """The rate at which `make(rate, seed)` attains `target` on average over the seeds, to about 2 %
    (10 % at quick size).

    Brackets from `start` in steps of 1.4, then bisects on a logarithmic scale.
    """

    def attained(rate: float) -> float:
        results = options.run([make(rate, seed) for seed in seeds])
        return sum(r.summary.attainment for r in results) / len(results)

    low = high = start
    if attained(start) >= target:
        while attained(high) >= target:
            low, high = high, high * 1.4
    else:
        while attained(low) < target:
            low, high = low / 1.4, low
    while high / low > (1.1 if options.quick else 1.02):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if attained(middle) >= target else (low, middle)
    return math.sqrt(low * high)
