"""How each kind of engine fills its steps, as settings of the scheduler that replays use in its place."""

from __future__ import annotations

from dataclasses import replace

from weighbridge.calibrate.endpoint import KINDS, Kind
from weighbridge.core.instance import Limits
from weighbridge.cost.profile import Profile
from weighbridge.scheduling.scheduler import SchedulerConfig

AMPLE_BLOCKS = 1_000_000
"""Stands for a KV capacity that the engine did not tell and that is taken to be no bound."""


def kind_of(name: str) -> Kind:
    """An engine kind by name; `openai`, of which nothing is known, for any other."""
    return next((kind for kind in KINDS if kind == name), "openai")


def scheduling_of(kind: Kind, limits: Limits) -> SchedulerConfig:
    """With vLLM's usual values for limits that the engine did not tell."""
    common = SchedulerConfig(
        token_budget=limits.token_budget or 2048,
        max_sequences=limits.max_sequences or 256,
        block_tokens=limits.block_size,
        blocks=limits.kv_blocks or AMPLE_BLOCKS,
    )
    if kind == "embedded":
        return replace(common, mixing="split", prefill_rows=64, busy_prefill_tokens=128, preemption="swap")
    if kind in ("sglang", "tgi"):
        return replace(common, mixing="prefill_first")
    if kind == "llamacpp":
        return common
    # a prefix cache lets a preempted request find its own blocks again, as far as they were not taken meanwhile
    return replace(common, admission="prompt", prefix_caching=limits.prefix_caching and limits.kv_blocks is not None)


def config_of(profile: Profile) -> SchedulerConfig:
    """The scheduler that a profile was fitted with."""
    config = scheduling_of(kind_of(profile.provenance.engine), profile.limits)
    kept = profile.scheduling.get("idle_prefill_tokens")
    return replace(config, token_budget=kept) if isinstance(kept, int) else config
