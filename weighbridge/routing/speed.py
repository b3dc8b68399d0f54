"""Seconds per token of an instance, from whatever is known of it, for policies simpler than the full forecast."""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge.routing.fleet import Instance
from weighbridge.routing.policy import Option

REFERENCE_BATCH = 1


def prefill_seconds_per_token(instance: Instance) -> float | None:
    """Seconds to compute one prompt token; None without a profile."""
    spec = instance.spec
    if spec.step is not None:
        return spec.step.prefill_s
    return None if spec.rates is None else 1.0 / spec.rates.prefill_tokens_per_s


def step_seconds(instance: Instance) -> float | None:
    """Seconds of one decode step of a near-empty batch: what every request waits for each of its tokens."""
    spec = instance.spec
    if spec.step is not None:
        return spec.step.base_s + spec.step.sequence_s
    return None if spec.rates is None else 1.0 / spec.rates.decode_tokens_per_s


def decode_step_seconds(instance: Instance) -> float | None:
    """Seconds of one decode step with what decodes there now."""
    step = instance.spec.step
    if step is None:
        return step_seconds(instance)
    return step.base_s + step.sequence_s * instance.decoding + step.kv_s * instance.decoding_kv_tokens


def all_known(options: Sequence[Option]) -> bool:
    """Whether every option has a profile. Seconds and tokens are never compared with each other."""
    return all(o.instance.spec.step is not None or o.instance.spec.rates is not None for o in options)
