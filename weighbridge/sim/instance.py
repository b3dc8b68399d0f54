"""What the driver needs of a simulated instance, and the choice of the fastest exact one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from weighbridge.core.instance import LoadReport
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import CostRunner
from weighbridge.sim.fast_forward import FastForwardInstance
from weighbridge.sim.job import Job, Outcome
from weighbridge.sim.stepwise import StepwiseInstance
from weighbridge.sim.stretch import can_fast_forward

Stepping = Literal["auto", "stepwise"]


class SimInstance(Protocol):
    """One simulated engine; see `StepwiseInstance` and `FastForwardInstance` for the contract of each member."""

    name: str
    config: SchedulerConfig
    runner: CostRunner
    wake_s: float
    version: int
    preemptions: int
    steps_run: int
    on_step: Callable[[Any, Any], None] | None

    def add(self, job: Job, now_s: float) -> bool: ...

    def advance(self, now_s: float) -> list[Outcome]: ...

    def cancel(self, job: Job, now_s: float) -> None: ...

    def slow_down(self, factor: float, now_s: float) -> None: ...

    def crash(self) -> list[Job]: ...

    def end_lease(self, blocks: int, now_s: float) -> None: ...

    def progress(self, now_s: float) -> list[tuple[str, int]]: ...

    def report(self, now_s: float) -> LoadReport: ...

    def generated(self, now_s: float) -> int: ...

    @property
    def idle(self) -> bool: ...

    @property
    def used_blocks(self) -> int: ...


def make_instance(
    name: str, config: SchedulerConfig, runner: CostRunner, stepping: Stepping = "auto", *, preemptible: bool = False
) -> FastForwardInstance | StepwiseInstance:
    """The fastest instance that models the configuration exactly; `stepwise` asks for the oracle itself.

    `preemptible`: the router may ask it to preempt single requests.
    """
    if stepping == "stepwise":
        return StepwiseInstance(name, config, runner)
    if can_fast_forward(config, runner) and not preemptible:
        return FastForwardInstance(name, config, runner)
    return StepwiseInstance(name, config, runner, jump=True)
