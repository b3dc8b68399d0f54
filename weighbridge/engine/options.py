"""Settings of one engine, and what they mean for its scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weighbridge.engine.kv_events import KvEventSettings
from weighbridge.engine.runner import RunnerOptions
from weighbridge.scheduling.order import Discipline
from weighbridge.scheduling.scheduler import SchedulerConfig

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One instance. `busy_prefill_tokens` is the prefill of a step while anything decodes, `idle_prefill_tokens` else.

    `prefix_store_bytes` bounds the KV kept outside the slots for later requests. `max_step_s` lowers the prefill of a
    step on slow machines, so that a cancelled request's slot is free about that soon.
    """

    runner: RunnerOptions = field(default_factory=RunnerOptions)
    busy_prefill_tokens: int = 64
    idle_prefill_tokens: int = 512
    prefill_rows: int = 64
    max_step_s: float = 1.0
    prefix_caching: bool = True
    prefix_store_bytes: int = 256 << 20
    kv_events: KvEventSettings | None = None
    max_waiting: int = 512
    discipline: Discipline = "priority"
    ageing_s: float | None = 30.0
    preemption: Literal["recompute", "swap", "auto"] = "swap"
    preempt_priority: bool = True
    admission: Literal["optimistic", "reserve"] = "optimistic"


def describe_scheduler(options: EngineOptions) -> dict[str, str | int | float]:
    """How steps are filled, as `/v1/models` tells it: what a replay of this engine's schedule needs to know."""
    return {
        "mixing": "split",
        "token_budget": options.idle_prefill_tokens,
        "busy_prefill_tokens": options.busy_prefill_tokens,
        "prefill_rows": options.prefill_rows,
        "max_step_s": options.max_step_s,
        "admission": options.admission,
        "preemption": options.preemption,
    }


def scheduler_config(options: EngineOptions, slot_tokens: int) -> SchedulerConfig:
    """One block budget for all slots, each of `slot_tokens` cells."""
    return SchedulerConfig(
        mixing="split",
        token_budget=options.idle_prefill_tokens,
        busy_prefill_tokens=options.busy_prefill_tokens,
        prefill_rows=options.prefill_rows,
        max_sequences=options.runner.slots,
        block_tokens=BLOCK_TOKENS,
        blocks=options.runner.slots * slot_tokens // BLOCK_TOKENS,
        max_waiting=options.max_waiting,
        discipline=options.discipline,
        ageing_s=options.ageing_s,
        admission=options.admission,
        preemption=options.preemption,
        preempt_priority=options.preempt_priority,
    )
