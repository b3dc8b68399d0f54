"""How many output tokens a request will give: learned online from what finished, conditional on what is already there.

Lengths are counted in logarithmic bins per key, from the most specific to the coarsest

    (model, tenant, endpoint, tier, prompt-length class) -> (model, endpoint, tier, class) -> (model, tier) -> all

and the first key with enough observations answers. Counts decay, so that traffic of an hour ago does not outvote that
of a minute ago. The answer given g tokens already generated is a quantile (or the mean) of the lengths above g.

A request may carry a forecast of its own length, made from its text (`expected_output_tokens`). It is taken instead,
for as long as the forecasts of its model have been closer, in the mean of |log(forecast / length)|, than the counts.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from typing import Literal

from weighbridge.core.request import Request

Estimate = Literal["median", "mean", "full_budget", "new_token_ratio", "given"]

PROMPT_CLASSES = (64, 256, 1_024, 2_560, 8_192)
"""Upper bounds of the prompt-length classes."""
ENOUGH = 24
"""Observations a key needs before it answers."""
MEMORY = 1_500.0
"""Weight at which a key's counts are halved."""
PRIOR_TOKENS = 256
"""Expected output before anything was observed, capped by the request's budget."""
MOST_KEYS = 4_096
FORECASTS_REMEMBERED = 200.0
"""About so many forecasts of a model are remembered when they are compared with the counts."""
RATIO_START, RATIO_FLOOR, RATIO_STEPS = 0.7, 0.098, 600

_WIDTH = 1.12
_EDGES = sorted({math.ceil(_WIDTH**power) for power in range(100)})
"""Bin b holds lengths in (_EDGES[b-1], _EDGES[b]]."""
_BIN_OF = [bisect_left(_EDGES, length) for length in range(4_097)]
_MIDDLE = [(low + 1 + high) / 2 for low, high in zip([0, *_EDGES], _EDGES, strict=False)]
_LAST = len(_EDGES) - 1


def length_bin(tokens: int) -> int:
    """The bin of a length."""
    return _BIN_OF[tokens] if tokens <= 4_096 else min(bisect_left(_EDGES, tokens), _LAST)


class LengthTable:
    """Decaying counts of one key and the answers derived from them, rebuilt when they have changed enough."""

    __slots__ = ("_above", "_built", "_counts", "_quantile", "_stale", "weight")

    def __init__(self, quantile: float | None) -> None:
        self._quantile = quantile
        """None: the mean."""
        self._counts = [0.0] * len(_EDGES)
        self.weight = 0.0
        self._above: list[float] = []
        self._built = 0.0
        self._stale = 0

    def observe(self, tokens: int) -> None:
        """One request gave `tokens`."""
        self._counts[length_bin(tokens)] += 1.0
        self.weight += 1.0
        self._stale += 1
        if self.weight > MEMORY:
            self._counts = [count / 2 for count in self._counts]
            self.weight = sum(self._counts)

    def expected(self, generated: int) -> float:
        """Expected final length of a request that has given `generated` tokens and is not finished."""
        if not self._above or self._stale * 10 > self.weight:
            self._rebuild()
        return self._above[length_bin(generated)]

    def _rebuild(self) -> None:
        """For every bin, the quantile or mean over this bin and all above it. O(bins)."""
        self._stale = 0
        counts, above = self._counts, [0.0] * len(_EDGES)
        weight = total = 0.0
        mean = self._quantile is None
        for b in range(_LAST, -1, -1):
            weight += counts[b]
            total += counts[b] * _MIDDLE[b]
            if weight <= 0.0:
                above[b] = 1.25 * _EDGES[b]
            elif mean:
                above[b] = total / weight
        if self._quantile is not None:
            self._fill_quantiles(above, weight)
        self._above = above

    def _fill_quantiles(self, above: list[float], weight: float) -> None:
        """Two pointers: the quantile's bin moves up as the lower bound does."""
        assert self._quantile is not None
        counts = self._counts
        below = 0.0
        """Weight under bin b."""
        upto, pointer = counts[0], 0
        """Weight up to and including bin `pointer`."""
        for b in range(len(_EDGES)):
            left = weight - below
            if left <= 1e-9:
                break
            wanted = below + self._quantile * left
            while pointer < _LAST and upto < wanted - 1e-12:
                pointer += 1
                upto += counts[pointer]
            low = _EDGES[pointer - 1] if pointer else 0
            inside = counts[pointer]
            share = 1.0 if inside <= 0 else 1.0 - (upto - wanted) / inside
            above[b] = max(low + share * (_EDGES[pointer] - low), low + 1.0)
            below += counts[b]


class Lengths:
    """The estimator. `name` says which estimate it gives."""

    def __init__(self, name: Estimate, *, noise: float = 0.0, seed: int = 0) -> None:
        self.name = name
        self._tables: dict[tuple[object, ...], LengthTable] = {}
        self._complete: dict[tuple[object, ...], list[LengthTable]] = {}
        """By the most specific key the tables of all its keys, once there are all."""
        self._quantile = None if name == "mean" else 0.5
        self._noise = noise
        self._rng = random.Random(seed ^ 0x5EED)
        self._ratio = RATIO_START
        self._ahead: dict[str, float] = {}
        """Per model: by how much the forecasts' log error is below the counts', a decaying sum."""

    def table(self, request: Request) -> LengthTable | None:
        """The most specific table with enough observations; None where the estimate needs none, or nothing is known."""
        if self.name in ("full_budget", "new_token_ratio"):
            return None
        key = _key(request)
        known = self._complete.get(key)
        if known is None:
            known = [self._tables[each] for each in (key, *_coarser(request, key)) if each in self._tables]
        for table in known:
            if table.weight >= ENOUGH:
                return table
        return None

    def expected(self, request: Request, table: LengthTable | None, generated: int = 0, scale: float = 1.0) -> int:
        """Expected output tokens in all of a request that has given `generated` so far; more than that, at most its
        budget."""
        budget = request.max_tokens
        if self.name == "full_budget":
            return budget
        given = request.expected_output_tokens
        if self.name == "new_token_ratio":
            # SGLang's reservation: a share of the budget that is left, of at most 4,096 tokens
            estimate = generated + min(max(budget - generated, 0), 4_096) * self._ratio
        elif given is not None and (self.name == "given" or self._ahead.get(request.model, 0.0) >= 0.0):
            estimate = given * scale if given * scale > generated else generated + 1 + given / 4
        elif table is not None:
            estimate = table.expected(generated)
            if scale != 1.0:
                estimate = max(estimate * scale, generated + 1)
        else:
            estimate = PRIOR_TOKENS if generated < PRIOR_TOKENS else 1.25 * generated
        return max(min(round(estimate), budget), generated + 1)

    def draw_scale(self) -> float:
        """The injected error of one request: lognormal, `noise` 1.5 means wrong by a factor of 2.5 at one sigma."""
        return math.exp(self._rng.gauss(0.0, math.log1p(self._noise))) if self._noise else 1.0

    def observe(self, request: Request, output_tokens: int) -> None:
        """A request ended well with `output_tokens`."""
        self._ratio = max(self._ratio - (RATIO_START - RATIO_FLOOR) / RATIO_STEPS, RATIO_FLOOR)
        if output_tokens < 1:
            return
        if request.expected_output_tokens is not None:
            self._compare(request, request.expected_output_tokens, output_tokens)
        key = _key(request)
        known = self._complete.get(key)
        if known is None:
            known = [self._make(each) for each in (key, *_coarser(request, key))]
            self._complete[key] = known
        for table in known:
            table.observe(output_tokens)

    def _make(self, key: tuple[object, ...]) -> LengthTable:
        """The table of a key, a new one if there is none."""
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MOST_KEYS:
                # tenants are unbounded: drop the oldest specific key, it will be learned again if it matters
                self._tables.pop(next(k for k in self._tables if len(k) > 1))
                self._complete.clear()
            table = self._tables[key] = LengthTable(self._quantile)
        return table

    def _compare(self, request: Request, forecast: int, output_tokens: int) -> None:
        """Who was closer to this length, the request's own forecast or the counts."""
        table = self.table(request)
        if table is None:
            return
        gain = abs(math.log(table.expected(0) / output_tokens)) - abs(math.log(max(forecast, 1) / output_tokens))
        if request.model not in self._ahead and len(self._ahead) >= MOST_KEYS:
            self._ahead.pop(next(iter(self._ahead)))
        self._ahead[request.model] = self._ahead.get(request.model, 0.0) * (1.0 - 1.0 / FORECASTS_REMEMBERED) + gain


def _key(request: Request) -> tuple[object, ...]:
    """The most specific key."""
    size = bisect_left(PROMPT_CLASSES, request.prompt_tokens)
    return (request.model, request.tenant, request.endpoint, request.tier, size)


def _coarser(request: Request, key: tuple[object, ...]) -> tuple[tuple[object, ...], ...]:
    """The other keys of a request, ever coarser."""
    return ((request.model, request.endpoint, request.tier, key[4]), (request.model, request.tier), ("",))
