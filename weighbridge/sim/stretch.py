"""A stretch of steps whose seconds grow linearly, in closed form: when each ends, and which is running at a time."""

from __future__ import annotations

import math

from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import CostRunner

_SMOOTHING_S = 0.5


class Stretch:
    """`steps` steps from `start_s`; step j (from 0) takes `first_s + j * growth_s` seconds. 0 steps: nothing runs."""

    __slots__ = ("first_s", "growth_s", "start_s", "steps")

    def __init__(self) -> None:
        self.start_s = self.first_s = self.growth_s = 0.0
        self.steps = 0

    def end(self, steps: int) -> float:
        """When the first `steps` steps are done."""
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def boundary(self, now_s: float) -> int:
        """The first step boundary at or after `now_s`, at least 1 and at most the last."""
        if self.steps == 1:
            return 1
        half = self.growth_s / 2.0
        linear = self.first_s - half
        elapsed = now_s - self.start_s
        if half > 0.0:
            guess = (math.sqrt(linear * linear + 4.0 * half * elapsed) - linear) / (2.0 * half)
        else:
            guess = elapsed / linear
        steps = min(max(1, math.ceil(guess)), self.steps)
        # The square root may be a rounding error off; `end` decides.
        while steps > 1 and self.end(steps - 1) >= now_s:
            steps -= 1
        while steps < self.steps and self.end(steps) < now_s:
            steps += 1
        return steps

    def done(self, now_s: float) -> int:
        """Steps that have ended by `now_s`."""
        if not self.steps or now_s < self.start_s + self.first_s:
            return 0
        steps = self.boundary(now_s)
        return steps if self.end(steps) <= now_s else steps - 1

    def cut(self, now_s: float) -> bool:
        """Shorten to the next boundary at or after `now_s`; whether that changed anything."""
        if self.steps <= 1:
            return False
        steps = self.boundary(now_s)
        if steps >= self.steps:
            return False
        self.steps = steps
        return True


class Throughput:
    """Output tokens per second, smoothed over about half a second, as engines log it."""

    __slots__ = ("_at_s", "_rate", "_total")

    def __init__(self) -> None:
        self._at_s = self._rate = 0.0
        self._total = 0

    def update(self, total: int, now_s: float) -> float:
        """The rate at `now_s`, when `total` tokens have come out since the start."""
        elapsed = now_s - self._at_s
        if elapsed > 0.0:
            fresh = (total - self._total) / elapsed
            self._rate = fresh + (self._rate - fresh) * math.exp(-elapsed / _SMOOTHING_S)
            self._at_s, self._total = now_s, total
        return self._rate


def can_fast_forward(config: SchedulerConfig, runner: CostRunner) -> bool:
    """Whether `FastForwardInstance` models the configuration exactly."""
    return (
        runner.disturbance.none
        and config.mixing == "mixed"
        and config.discipline == "fcfs"
        and config.admission in ("optimistic", "prompt")
        and config.preemption == "recompute"
        and not config.preempt_priority
        and not config.prefix_caching
        and config.prefill_rows == 1
        and config.max_waiting is None
        and config.token_budget > config.max_sequences
    )
