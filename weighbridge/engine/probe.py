"""Seconds-long measurement of a fresh instance, kept in a profile file for the next start."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from weighbridge.core.errors import ProfileError
from weighbridge.core.instance import Limits, Rates, StepTerms
from weighbridge.cost.profile import Profile, Provenance, decode_profile, encode_profile
from weighbridge.engine.runner import LlamaRunner, Rows

PREFILL_TOKENS = 256
SHORT_PREFILL_TOKENS = 64
DECODE_STEPS = 6
MOST_CURVE = 16
"""Numbers of sequences that are tried: all up to 8, then 12 and 16, and all slots together."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a fresh runner was measured to do. `decode_s` maps the sequences of a decode step to its seconds."""

    short_prefill_s: float
    prefill_tokens: int
    prefill_s: float
    decode_s: Mapping[int, float]

    @property
    def rates(self) -> Rates:
        """Tokens per second of one sequence alone."""
        return Rates(
            prefill_tokens_per_s=self.prefill_tokens / self.prefill_s, decode_tokens_per_s=1 / self.decode_s[1]
        )

    @property
    def together_tokens_per_s(self) -> float:
        """Decoded tokens per second with all slots."""
        most = max(self.decode_s)
        return most / self.decode_s[most]

    @property
    def step(self) -> StepTerms:
        """Step-time model: two lengths of a prompt give base and prefill, each number of sequences its own point.

        Attention and KV terms are not told apart in so short a look: the context of the probe is in the other terms.
        """
        alone = self.decode_s[1]
        more = self.prefill_tokens - SHORT_PREFILL_TOKENS
        slope = (self.prefill_s - self.short_prefill_s) / more if more > 0 else 0.0
        if not 0.0 < slope * self.prefill_tokens <= self.prefill_s:
            slope = self.prefill_s / self.prefill_tokens
        base = max(0.0, min(self.prefill_s - slope * self.prefill_tokens, 0.9 * alone, 0.9 * self.prefill_s))
        knots, least = [], 0.0
        for count in sorted(self.decode_s):
            least = max(least, self.decode_s[count] - base)  # more sequences never take less
            knots.append((float(count), least))
        return StepTerms(
            base_s=base,
            prefill_s=(self.prefill_s - base) / self.prefill_tokens,
            sequence_s=knots[-1][1] / knots[-1][0],
            sequence_knots=tuple(knots) if len(knots) > 1 else (),
        )


def probe(runner: LlamaRunner) -> Probed:
    """Measure a prefill of two lengths, and decode steps of one sequence up to all slots.

    Uses the runner's slots and empties them again; call it before anything runs.
    """
    tokens = [1000 + i % 1000 for i in range(min(PREFILL_TOKENS, runner.slot_tokens // 2))]
    shorts = []
    for _ in range(2):  # a first pass touches memory that later ones find warm
        shorts.append(_prefill_s(runner, tokens[:SHORT_PREFILL_TOKENS])[0])
        runner.trim(0, 0)
    took, token = _prefill_s(runner, tokens)
    slots = runner.options.slots
    for slot in range(1, slots):
        runner.copy(0, slot, len(tokens))
    counts = sorted({count for count in (*range(1, 9), 12, MOST_CURVE) if count < slots} | {slots})
    decode = {count: _decode_s(runner, list(range(count)), token, len(tokens)) for count in counts}
    runner.clear()
    return Probed(min(shorts), len(tokens), took, decode)


def _prefill_s(runner: LlamaRunner, tokens: list[int]) -> tuple[float, int]:
    """Seconds of one prompt in slot 0, and the token that follows it."""
    begun = time.perf_counter()
    logits = runner.prefill([Rows(0, tokens, 0, True)])
    return time.perf_counter() - begun, int(logits[0].argmax())


def _decode_s(runner: LlamaRunner, slots: list[int], token: int, start: int) -> float:
    """Median seconds of a few steps of the given slots, all at position `start`; cuts them back to it."""
    took = []
    for step in range(DECODE_STEPS):
        begun = time.perf_counter()
        runner.decode(slots, [token] * len(slots), [start + step] * len(slots))
        took.append(time.perf_counter() - begun)
    for slot in slots:
        runner.trim(slot, start)
    return statistics.median(took)


def probe_profile(runner: LlamaRunner, provenance: Provenance) -> Profile:
    """Measure and describe."""
    found = probe(runner)
    options = runner.options
    return Profile(
        rates=found.rates,
        step=found.step,
        identifiable=False,
        unidentified=("attend_s", "kv_s"),
        limits=Limits(
            token_budget=options.batch_rows,
            max_sequences=options.slots,
            kv_blocks=options.slots * runner.slot_tokens // 16,
            max_context=runner.slot_tokens,
        ),
        ranges={
            "prompt_tokens": (float(SHORT_PREFILL_TOKENS), float(found.prefill_tokens)),
            "sequences": (1.0, float(options.slots)),
        },
        provenance=provenance,
        extra={"decode_all_slots_tokens_per_s": found.together_tokens_per_s},
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
            f"probe of {SHORT_PREFILL_TOKENS} and {PREFILL_TOKENS} prompt tokens and {DECODE_STEPS} decode steps each; "
            f"slots {options.slots}, context {runner.slot_tokens}, threads {options.threads}, kv {options.kv_type}, "
            f"unified {options.unified}, throttle {throttle.prefill:g}/{throttle.decode:g}"
        ),
    )
