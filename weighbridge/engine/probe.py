"""Seconds-long measurement of a fresh instance's two rates, kept in a profile file for the next start."""

from __future__ import annotations

import platform
import time
from datetime import UTC, datetime
from pathlib import Path

from weighbridge.core.errors import ProfileError
from weighbridge.core.instance import Limits, Rates
from weighbridge.cost.profile import Profile, Provenance, decode_profile, encode_profile
from weighbridge.engine.runner import LlamaRunner, Rows

PREFILL_TOKENS = 256
DECODE_STEPS = 12


def probe_rates(runner: LlamaRunner) -> tuple[Rates, float]:
    """Rates of one sequence alone, and the decode rate of all slots together, in tokens per second.

    Uses the runner's slots and empties them again; call it before anything runs.
    """
    tokens = [1000 + i % 1000 for i in range(min(PREFILL_TOKENS, runner.slot_tokens // 2))]
    begun = time.perf_counter()
    logits = runner.prefill([Rows(0, tokens, 0, True)])
    prefill = len(tokens) / (time.perf_counter() - begun)
    token = int(logits[0].argmax())
    alone = _decode_rate(runner, [0], token, len(tokens))
    slots = list(range(runner.options.slots))
    for slot in slots[1:]:
        runner.copy(0, slot, len(tokens))
    together = _decode_rate(runner, slots, token, len(tokens)) if len(slots) > 1 else alone
    runner.clear()
    return Rates(prefill_tokens_per_s=prefill, decode_tokens_per_s=alone), together


def _decode_rate(runner: LlamaRunner, slots: list[int], token: int, start: int) -> float:
    """Tokens per second over a few steps of the given slots, all at position `start`; cuts them back to it."""
    begun = time.perf_counter()
    for step in range(DECODE_STEPS):
        runner.decode(slots, [token] * len(slots), [start + step] * len(slots))
    rate = DECODE_STEPS * len(slots) / (time.perf_counter() - begun)
    for slot in slots:
        runner.trim(slot, start)
    return rate


def probe_profile(runner: LlamaRunner, provenance: Provenance) -> Profile:
    """Measure and describe."""
    rates, together = probe_rates(runner)
    options = runner.options
    return Profile(
        rates=rates,
        limits=Limits(
            token_budget=options.batch_rows,
            max_sequences=options.slots,
            kv_blocks=options.slots * runner.slot_tokens // 16,
            max_context=runner.slot_tokens,
        ),
        provenance=provenance,
        extra={"decode_all_slots_tokens_per_s": together},
    )


def saved_profile(path: Path, provenance: Provenance) -> Profile | None:
    """A profile that was kept for exactly this engine, model, device and options; None where there is none."""
    try:
        profile = decode_profile(path.read_bytes(), str(path))
    except (OSError, ProfileError):
        return None
    kept = profile.provenance
    same = (kept.engine_version, kept.model_hash, kept.device, kept.hardware, kept.method)
    wanted = (
        provenance.engine_version,
        provenance.model_hash,
        provenance.device,
        provenance.hardware,
        provenance.method,
    )
    return profile if same == wanted else None


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(encode_profile(profile))
    part.replace(path)


def describe(runner: LlamaRunner, model_hash: str, device: str, version: str) -> Provenance:
    """Where a probe of this runner comes from; `method` holds every option that changes the rates."""
    options = runner.options
    throttle = options.throttle
    return Provenance(
        engine="weighbridge",
        engine_version=version,
        model=runner.model.describe(),
        model_hash=model_hash,
        device=device,
        hardware=f"{platform.machine()} {platform.node()}",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        method=(
            f"probe of {PREFILL_TOKENS} prompt tokens and {DECODE_STEPS} decode steps; slots {options.slots}, "
            f"context {runner.slot_tokens}, threads {options.threads}, kv {options.kv_type}, "
            f"unified {options.unified}, throttle {throttle.prefill:g}/{throttle.decode:g}"
        ),
    )
