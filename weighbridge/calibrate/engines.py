"""How each kind of engine fills its steps, as settings of the scheduler that replays use in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weighbridge.calibrate.endpoint import KINDS, Kind
from weighbridge.core.errors import InputError
from weighbridge.core.instance import Limits
from weighbridge.cost.profile import Profile
from weighbridge.scheduling.scheduler import SchedulerConfig

AMPLE_BLOCKS = 1_000_000
"""Stands for a KV capacity that the engine did not tell and that is taken to be no bound."""


def kind_of(name: str) -> Kind:
    """An engine kind by name; `openai`, of which nothing is known, for any other."""
    return next((kind for kind in KINDS if kind == name), "openai")


TOLD = ("mixing", "admission", "preemption", "prefill_rows", "busy_prefill_tokens", "token_budget", "prefill_limit")
"""What an engine may tell of its scheduler, and a profile keeps of it."""


def scheduling_of(kind: Kind, limits: Limits, told: Mapping[str, Any] | None = None) -> SchedulerConfig:
    """With vLLM's usual values for limits that the engine did not tell; what it `told` wins over its kind's habit.

    Raises:
        InputError: it told something that no scheduler here can do.
    """
    config = _habit(kind, limits)
    known = {name: value for name in TOLD if (value := (told or {}).get(name)) is not None}
    try:
        return replace(config, **known)
    except (TypeError, ValueError) as error:
        raise InputError(f"the engine's scheduler is told as {known}, which cannot be replayed: {error}") from None


def _habit(kind: Kind, limits: Limits) -> SchedulerConfig:
    common = SchedulerConfig(
        token_budget=limits.token_budget or 2048,
        max_sequences=limits.max_sequences or 256,
        block_tokens=limits.block_size,
        blocks=limits.kv_blocks or AMPLE_BLOCKS,
    )
    if kind == "embedded":
        return replace(common, mixing="split", prefill_rows=64, busy_prefill_tokens=64, preemption="swap")
    if kind in ("sglang", "tgi"):
        return replace(common, mixing="prefill_first")
    if kind == "llamacpp":
        return common
    # a prefix cache lets a preempted request find its own blocks again, as far as they were not taken meanwhile
    return replace(common, admission="prompt", prefix_caching=limits.prefix_caching and limits.kv_blocks is not None)


def config_of(profile: Profile) -> SchedulerConfig:
    """The scheduler that a profile was fitted with."""
    return scheduling_of(kind_of(profile.provenance.engine), profile.limits, profile.scheduling)


def kept_of(config: SchedulerConfig) -> dict[str, object]:
    """What a profile keeps of a scheduler, so that `config_of` finds it again."""
    return {name: value for name in TOLD if (value := getattr(config, name)) is not None}
