"""Length distributions in tokens; every draw is a whole number of at least 1."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weighbridge.workload.spec import number, split_spec, unknown_kind


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: random.Random) -> int: ...

    @property
    def mean(self) -> float:
        """Expected tokens before any clipping."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def draw(self, rng: random.Random) -> int:
        return self.tokens

    @property
    def mean(self) -> float:
        return float(self.tokens)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Geometric on 1, 2, ...: the exponential distribution of whole tokens, with exactly the mean given."""

    mean: float

    def draw(self, rng: random.Random) -> int:
        if self.mean <= 1.0:
            return 1
        return 1 + int(rng.expovariate(-math.log1p(-1.0 / self.mean)))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal with mean `mean` and shape `sigma` (standard deviation of the logarithm), clipped to [low, high]."""

    mean: float
    sigma: float
    low: int = 1
    high: int = 1_000_000

    def draw(self, rng: random.Random) -> int:
        value = math.exp(rng.gauss(math.log(self.mean) - self.sigma * self.sigma / 2.0, self.sigma))
        return min(self.high, max(self.low, round(value)))


def lognormal_cv(mean: float, cv: float) -> Lognormal:
    """A lognormal from mean and coefficient of variation: sigma^2 = ln(1 + cv^2)."""
    return Lognormal(mean, math.sqrt(math.log1p(cv * cv)))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2.0


@dataclass(frozen=True, slots=True)
class Empirical:
    """Recorded lengths with their cumulative counts; each is drawn in proportion to how often it was seen."""

    values: tuple[int, ...]
    cumulative: tuple[int, ...]

    def draw(self, rng: random.Random) -> int:
        return self.values[bisect.bisect_right(self.cumulative, rng.randrange(self.cumulative[-1]))]

    @property
    def mean(self) -> float:
        previous, total = 0, 0
        for value, upto in zip(self.values, self.cumulative, strict=True):
            total += value * (upto - previous)
            previous = upto
        return total / previous


def empirical(samples: Sequence[int]) -> Empirical:
    """The distribution of the samples themselves; samples below 1 token are refused."""
    if not samples:
        raise ValueError("an empirical length distribution needs samples")
    counts: dict[int, int] = {}
    for sample in samples:
        if sample < 1:
            raise ValueError(f"a length must be at least 1 token, not {sample}")
        counts[sample] = counts.get(sample, 0) + 1
    values = tuple(sorted(counts))
    cumulative, total = [], 0
    for value in values:
        total += counts[value]
        cumulative.append(total)
    return Empirical(values, tuple(cumulative))


FORMS = "fixed:N, exp:MEAN, lognormal:MEAN:CV, uniform:LOW:HIGH"


def parse_lengths(text: str, field: str = "lengths") -> Lengths:
    """A distribution from `fixed:128`, `exp:500`, `lognormal:300:1.2`, `uniform:10:50`, or a bare number (fixed).

    Raises `ConfigError` that names `field` and the part which is wrong.
    """
    kind, arguments = split_spec(text)
    if not arguments and kind.isdigit():
        kind, arguments = "fixed", [kind]
    values = [number(field, text, argument) for argument in arguments]
    if kind == "fixed" and len(values) == 1 and values[0] >= 1:
        return Fixed(round(values[0]))
    if kind in ("exp", "exponential") and len(values) == 1 and values[0] >= 1:
        return Exponential(values[0])
    if kind == "lognormal" and len(values) == 2 and values[0] >= 1:
        return lognormal_cv(values[0], values[1])
    if kind == "uniform" and len(values) == 2 and 1 <= values[0] <= values[1]:
        return Uniform(round(values[0]), round(values[1]))
    raise unknown_kind(field, text, FORMS + " (lengths of at least 1 token)")
