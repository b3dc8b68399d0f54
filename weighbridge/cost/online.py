"""Keep one instance's cost model true to live traffic, and notice when it no longer is.

Two factors scale the profile: one for prefill terms, one for the others. Each follows the logarithm of observed over
forecast seconds by a scalar Kalman filter, which is recursive least squares with forgetting. Observations must be
clean: a lone request's prefill, or decode steps of an unchanging batch. What a request waited in a queue tells nothing
of a rate, and learning from it feeds back.

While the profile is trusted its factors stay within its own error. A two-sided cumulative sum of clipped residuals
(Page 1954) notices a lasting change; then the profile's bound is lifted, the factors restart from the latest
observations, and the instance counts as forecast by online estimate until it is calibrated again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from weighbridge.core.instance import Rates, StepTerms
from weighbridge.cost.nnls import nnls
from weighbridge.cost.step import attended_tokens, rates_of, step_seconds

Level = Literal["profile", "online"]
Group = Literal["prefill", "decode"]

LEAST_ERROR = 0.05
"""No forecast is claimed to be better than this."""
BOUND_ERRORS = 2.0
"""A trusted profile's factors stay within this many of its errors."""
FREE_BOUND = math.log(50.0)
FORGET = 0.02
"""Relative growth of a factor's variance per observation, in squared errors: about the last 12 observations count."""
CLIP = 2.5
SLACK = 0.75
ALARM = 6.0
"""In errors (of the profile, or of single observations where they scatter more). A change of two errors is noticed
after five observations; one outlier never suffices."""
RESTART = 5
HISTORY = 15
"""Observations of a group after which a departure is a change of the instance and no fault of its profile."""
MOVED = 0.02
"""A factor's relative move from which a new model is worth telling."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A request alone on its instance: `seconds` from dispatch to first token for `tokens` uncached prompt tokens."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """`steps` decode steps of one unchanging batch, `kv_tokens` in the middle of them."""

    steps: int
    sequences: int
    kv_tokens: int
    seconds: float


@dataclass(slots=True)
class Factor:
    """One scale: the logarithm of it, its variance, and its alarm."""

    log: float = 0.0
    variance: float = 0.0
    high: float = 0.0
    low: float = 0.0
    count: int = 0
    noise: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RESTART))

    def follow(self, observed_log: float, error: float, bound: float) -> None:
        """One observation of log(observed / profile forecast), whose noise has the relative size `error`."""
        self.count += 1
        if self.recent:
            # differences of neighbours know the noise and, unlike residuals, hardly notice a change of level
            step = min(abs(observed_log - self.recent[-1]), CLIP * max(error, self.noise))
            self.noise += (0.886 * step - self.noise) / min(self.count, 20)
        self.recent.append(observed_log)
        noise = error * error
        self.variance += FORGET * noise
        gain = self.variance / (self.variance + noise)
        innovation = max(-CLIP * error, min(CLIP * error, observed_log - self.log))
        self.log = max(-bound, min(bound, self.log + gain * innovation))
        self.variance *= 1.0 - gain

    def alarmed(self, residual: float, error: float) -> bool:
        """Whether residuals against what is believed have summed up to a lasting change."""
        z = max(-CLIP, min(CLIP, residual / max(error, self.noise)))
        self.high = max(0.0, self.high + z - SLACK)
        self.low = max(0.0, self.low - z - SLACK)
        return self.high > ALARM or self.low > ALARM

    def restart(self, error: float) -> None:
        """Believe the latest observations."""
        self.log = statistics.median(self.recent)
        self.variance = error * error / len(self.recent)
        self.high = self.low = 0.0


def first_estimate(prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]) -> StepTerms | None:
    """A model of an instance of which nothing was known; None while there are too few observations of either kind.

    Base and sequence terms come from decode steps (all base while only one batch width was seen), prefill from what
    lone requests took beyond one step. There is no KV or attention term: that is what calibration is for.
    """
    if len(prefills) < RESTART or len(decodes) < RESTART:
        return None
    seconds = np.asarray([d.seconds / d.steps for d in decodes])
    width = np.asarray([float(d.sequences) for d in decodes])
    base, sequence = float(np.median(seconds)), 0.0
    if len({d.sequences for d in decodes}) > 1:
        matrix = np.stack([1.0 / seconds, width / seconds], axis=1)
        scale = np.linalg.norm(matrix, axis=0)
        base, sequence = (float(v) for v in nnls(matrix / scale, np.ones(len(seconds))) / scale)
    each = [max(p.seconds - base - sequence, 0.1 * p.seconds) / p.tokens for p in prefills if p.tokens > 0]
    return StepTerms(base_s=base, prefill_s=statistics.median(each), sequence_s=sequence)


class OnlineCost:
    """The cost model of one instance, refined by what it does. Deterministic: no clock, no random numbers."""

    def __init__(
        self,
        step: StepTerms | None,
        rates: Rates | None,
        error: float | None,
        *,
        token_budget: int | None = None,
        level: Level = "profile",
    ) -> None:
        """Needs `step` or `rates`; without `step` a token costs what the rates say, whatever runs beside it."""
        if step is None and rates is None:
            raise ValueError("needs a step-time model or rates")
        self.profile = step if step is not None else _from_rates(rates)
        self.has_step = step is not None
        self.profile_error = max(LEAST_ERROR, error if error is not None else 0.3)
        self.level = level
        self.drifts = 0
        self.excluded = 0
        self.factors: dict[Group, Factor] = {"prefill": Factor(), "decode": Factor()}
        for factor in self.factors.values():
            factor.variance = self.profile_error**2
        self._budget = token_budget or 2048
        self._told: tuple[float, float] = (0.0, 0.0)
        self._changed_level = level == "online"

    @property
    def step(self) -> StepTerms:
        """The model as it is believed now."""
        prefill, decode = (math.exp(self.factors[group].log) for group in ("prefill", "decode"))
        p = self.profile
        return StepTerms(
            base_s=p.base_s * decode,
            prefill_s=p.prefill_s * prefill,
            attend_s=p.attend_s * prefill,
            sequence_s=p.sequence_s * decode,
            kv_s=p.kv_s * decode,
            scan_s=p.scan_s * decode,
            sequence_knots=tuple((count, seconds * decode) for count, seconds in p.sequence_knots),
        )

    @property
    def rates(self) -> Rates:
        """The two-rate view of `step`."""
        return rates_of(self.step, token_budget=min(self._budget, 512))

    @property
    def error(self) -> float:
        """Relative error of a forecast: the profile's; after a drift twice that, or that of what came since."""
        if self.level == "profile":
            return self.profile_error
        worst = max(math.sqrt(f.variance) for f in self.factors.values())
        return min(0.5, max(2.0 * self.profile_error, worst))

    def observe_prefill(self, sample: PrefillSample) -> None:
        """A sample in which the step's base outweighs the prompt says little of prefill and is left out."""
        chunks = math.ceil(sample.tokens / self._budget)
        base = chunks * self.profile.base_s
        tokens = step_seconds(
            self.profile, prefill_tokens=sample.tokens, attended_tokens=attended_tokens(0, sample.tokens)
        )
        forecast = tokens - self.profile.base_s
        if sample.seconds <= 0 or forecast < base:
            self.excluded += 1
            return
        spent = sample.seconds - base * math.exp(self.factors["decode"].log)
        self._observe("prefill", spent, forecast)

    def observe_decode(self, sample: DecodeSample) -> None:
        """Steps of an unchanging batch."""
        if sample.seconds <= 0 or sample.steps < 1:
            self.excluded += 1
            return
        each = step_seconds(self.profile, sequences=sample.sequences, kv_tokens=sample.kv_tokens)
        self._observe("decode", sample.seconds, sample.steps * each)

    def exclude(self) -> None:
        """Count an observation that is not clean (preempted, cancelled, cold)."""
        self.excluded += 1

    def news(self) -> bool:
        """Whether the model has changed enough since this last said so, and takes note that it was told."""
        now = (self.factors["prefill"].log, self.factors["decode"].log)
        moved = max(abs(a - b) for a, b in zip(now, self._told, strict=True)) > MOVED
        if not moved and not self._changed_level:
            return False
        self._told, self._changed_level = now, False
        return True

    def _observe(self, group: Group, seconds: float, forecast: float) -> None:
        if seconds <= 0.0 or forecast <= 0.0:
            self.excluded += 1
            return
        factor = self.factors[group]
        observed = math.log(seconds / forecast)
        error = self.profile_error
        bound = BOUND_ERRORS * error if self.level == "profile" else FREE_BOUND
        alarmed = factor.alarmed(observed - factor.log, error)
        factor.follow(observed, error, bound)
        if alarmed and len(factor.recent) >= RESTART:
            self._drift(group)

    def _drift(self, group: Group) -> None:
        """Believe the latest observations of the group.

        After a history that the profile explained, something has slowed (or freed) the instance, which is assumed to
        touch the other group too until that is observed. Without such a history the profile was wrong in this group.
        """
        factor = self.factors[group]
        before = factor.log
        factor.restart(self.profile_error)
        first = self.level == "profile"
        self.level = "online"
        self.drifts += 1
        self._changed_level = True
        other = self.factors["decode" if group == "prefill" else "prefill"]
        if first and factor.count > HISTORY:
            other.log += factor.log - before
            other.variance = max(other.variance, (factor.log - before) ** 2)
            other.high = other.low = 0.0


def _from_rates(rates: Rates | None) -> StepTerms:
    assert rates is not None
    return StepTerms(base_s=1.0 / rates.decode_tokens_per_s, prefill_s=1.0 / rates.prefill_tokens_per_s)
