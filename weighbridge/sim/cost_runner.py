"""Predicts the seconds of a batch: the simulated counterpart of the engine's runner."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from weighbridge.core.instance import StepTerms
from weighbridge.cost.step import step_seconds
from weighbridge.scheduling.batch import Batch


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How real step times depart from the linear model that a router believes in.

    `noise` is the sigma of a lognormal factor of mean 1 drawn per step; `bend` makes a step of t seconds last
    t * (1 + bend * tokens / token_budget).
    """

    noise: float = 0.0
    bend: float = 0.0

    @property
    def none(self) -> bool:
        """Whether steps follow the linear model exactly, so that stretches of them have a closed form."""
        return self.noise == 0.0 and self.bend == 0.0


class CostRunner:
    """Seconds of one step on one instance: the step-cost model, times `slowdown`, times its disturbance."""

    __slots__ = ("_rng", "_token_budget", "disturbance", "slowdown", "terms")

    def __init__(
        self,
        terms: StepTerms,
        *,
        disturbance: Disturbance | None = None,
        token_budget: int = 2048,
        rng: random.Random | None = None,
    ) -> None:
        self.terms = terms
        self.slowdown = 1.0
        self.disturbance = disturbance or Disturbance()
        self._token_budget = token_budget
        self._rng = rng or random.Random(0)

    def seconds(self, batch: Batch) -> float:
        """How long the batch takes."""
        tokens = batch.tokens
        seconds = self.slowdown * step_seconds(
            self.terms,
            prefill_tokens=batch.prefill_tokens,
            attended_tokens=batch.attended_tokens,
            sequences=batch.decode_sequences,
            kv_tokens=batch.kv_tokens,
            used_cells=batch.context_tokens,
        )
        if self.disturbance.bend:
            seconds *= 1.0 + self.disturbance.bend * tokens / self._token_budget
        sigma = self.disturbance.noise
        if sigma:
            seconds *= math.exp(self._rng.gauss(-sigma * sigma / 2.0, sigma))
        return seconds
