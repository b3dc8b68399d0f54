"""Arrival processes: exact and untruncated, each an endless increasing stream of times in seconds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from weighbridge.workload.spec import number, split_spec, unknown_kind


class Arrivals(Protocol):
    """A point process; `times` starts it afresh, driven by the generator given."""

    def times(self, rng: random.Random) -> Iterator[float]: ...

    @property
    def rate(self) -> float:
        """Long-run mean, requests per second."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent exponential gaps."""

    rate: float

    def times(self, rng: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += rng.expovariate(self.rate)
            yield now


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps with a given coefficient of variation; `cv` 1 is Poisson, more is burstier.

    vLLM's bench calls 1 / cv^2 the burstiness.
    """

    rate: float
    cv: float

    def times(self, rng: random.Random) -> Iterator[float]:
        shape = 1.0 / (self.cv * self.cv)
        scale = 1.0 / (self.rate * shape)
        now = 0.0
        while True:
            now += rng.gammavariate(shape, scale)
            yield now


@dataclass(frozen=True, slots=True)
class Constant:
    """Equal gaps; the first request comes at time 0."""

    rate: float

    def times(self, rng: random.Random) -> Iterator[float]:
        gap = 1.0 / self.rate
        return (k * gap for k in itertools.count())


@dataclass(frozen=True, slots=True)
class Bursts:
    """Two-state Markov-modulated Poisson process with exponential sojourns and mean rate `rate`.

    While a burst lasts (mean `on_s`) the rate is `factor` times the quiet one (mean `off_s`).
    """

    rate: float
    factor: float = 3.0
    on_s: float = 5.0
    off_s: float = 15.0

    def times(self, rng: random.Random) -> Iterator[float]:
        quiet = self.rate * (self.on_s + self.off_s) / (self.off_s + self.factor * self.on_s)
        # Stationary from the start: time 0 falls into a burst as often as any other moment.
        start, bursting = 0.0, rng.random() < self.on_s / (self.on_s + self.off_s)
        while True:
            end = start + rng.expovariate(1.0 / (self.on_s if bursting else self.off_s))
            rate = quiet * (self.factor if bursting else 1.0)
            # Memoryless: a gap that crosses the switch is thrown away and drawn again at the new rate.
            now = start + rng.expovariate(rate)
            while now < end:
                yield now
                now += rng.expovariate(rate)
            start, bursting = end, not bursting


@dataclass(frozen=True, slots=True)
class Replayed:
    """Recorded arrival times, stretched to a rate, repeated without a seam where more are asked for."""

    recorded_s: tuple[float, ...]
    rate: float

    def times(self, rng: random.Random) -> Iterator[float]:
        first = self.recorded_s[0]
        count = len(self.recorded_s)
        span = self.recorded_s[-1] - first
        # The lap is one mean gap longer than the record, so that the rate over many laps is exact.
        lap = span * count / (count - 1) if count > 1 and span > 0 else count / self.rate
        factor = count / self.rate / lap
        for k in itertools.count():
            for at in self.recorded_s:
                yield ((at - first) + k * lap) * factor


def replayed(times_s: Sequence[float], rate: float) -> Replayed:
    """A `Replayed` process from recorded times in any order; at least one time."""
    if not times_s:
        raise ValueError("replayed arrivals need at least one recorded time")
    return Replayed(tuple(sorted(times_s)), rate)


def parse_arrivals(text: str, rate: float) -> Arrivals:
    """An arrival process of mean rate `rate` from a short form: `poisson`, `gamma:2`, `mmpp:3:5:15`, `constant`."""
    kind, arguments = split_spec(text)
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the arrival rate must be above 0 requests per second, not {rate}")
    values = [number("arrivals", text, argument, positive=True) for argument in arguments]
    if kind == "poisson" and not values:
        return Poisson(rate)
    if kind == "gamma" and len(values) == 1:
        return Gamma(rate, values[0])
    if kind in ("mmpp", "bursts") and len(values) in (0, 3):
        return Bursts(rate, *values)
    if kind == "constant" and not values:
        return Constant(rate)
    raise unknown_kind("arrivals", text, "poisson, gamma:CV, mmpp, mmpp:FACTOR:ON_S:OFF_S, constant")
