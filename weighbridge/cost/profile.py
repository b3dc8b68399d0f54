"""The profile file: the fitted cost model of one instance kind, with everything needed to judge whether it applies.

The file is JSON. Times are seconds. A profile of a newer schema, a corrupt file, or one whose numbers cannot be a
cost model is refused with the reason; nothing is guessed.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from weighbridge.core.errors import ProfileError
from weighbridge.core.instance import Limits, Rates, StepTerms
from weighbridge.cost.step import COEFFICIENTS

SCHEMA_VERSION = 1


class Quantiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Relative residuals (observed / forecast - 1) of one metric on held-out observations.

    `mape` is the mean of their absolute values, `median` the median of those.
    """

    p05: float = 0.0
    p25: float = 0.0
    p50: float = 0.0
    p75: float = 0.0
    p95: float = 0.0
    mape: float = 0.0
    median: float = 0.0
    count: int = 0


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the numbers come from. `device` is the one the engine really ran on, not the one asked for."""

    engine: str = ""
    engine_version: str = ""
    model: str = ""
    model_hash: str = ""
    quantisation: str = ""
    device: str = ""
    hardware: str = ""
    software: dict[str, str] = {}
    measured_at: str = ""
    method: str = ""


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cost model and its error.

    `rates` is always there (measured or derived); `step` where the step-time model was fitted. `unidentified` names
    the terms of it that the data could not tell apart: their sum is right in the probed `ranges`, each alone is not
    known. `overhead_s` is spent per request outside any step (HTTP, tokenisation). `source` says how the profile was
    obtained: `measured`, `prior` (from a table, replaced by the first measurements) or `online`. `scheduling` holds
    the settings of the engine's scheduler that `limits` does not.
    """

    schema_version: int = SCHEMA_VERSION
    rates: Rates
    step: StepTerms | None = None
    step_errors: StepTerms | None = None
    overhead_s: float = 0.0
    identifiable: bool = True
    unidentified: tuple[str, ...] = ()
    limits: Limits = Limits()
    scheduling: dict[str, Any] = {}
    residuals: dict[str, Quantiles] = {}
    ranges: dict[str, tuple[float, float]] = {}
    condition_number: float | None = None
    source: Literal["measured", "prior", "online"] = "measured"
    provenance: Provenance = Provenance()
    extra: dict[str, Any] = {}

    @property
    def error(self) -> float | None:
        """Relative error used as the forecast's error bar: the largest median absolute residual known."""
        known = [q.median for q in self.residuals.values() if q.count]
        return max(known) if known else None


def encode_profile(profile: Profile) -> bytes:
    """Indented JSON, newline at the end."""
    fields = {"schema_version": profile.schema_version} | msgspec.to_builtins(profile)
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


def decode_profile(data: bytes, name: str = "profile") -> Profile:
    """Parse and check a profile file's bytes.

    Raises:
        ProfileError: not JSON, a newer schema, or impossible numbers; the message names the field.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{name}: not a profile file ({error})") from None
    if version > SCHEMA_VERSION:
        raise ProfileError(
            f"{name}: schema version {version} is newer than this program's {SCHEMA_VERSION}; "
            "upgrade weighbridge or calibrate again"
        )
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{name}: {error}") from None
    _check(profile, name)
    return profile


class _Version(msgspec.Struct):
    schema_version: int


def _check(profile: Profile, name: str) -> None:
    for field in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        value = getattr(profile.rates, field)
        if not (math.isfinite(value) and value > 0):
            raise ProfileError(f"{name}: rates.{field} is {value}, expected a finite number > 0; calibrate again")
    if not (math.isfinite(profile.overhead_s) and profile.overhead_s >= 0):
        raise ProfileError(
            f"{name}: overhead_s is {profile.overhead_s}, expected a finite number >= 0; calibrate again"
        )
    if profile.step is not None:
        for field in COEFFICIENTS:
            value = getattr(profile.step, field)
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"{name}: step.{field} is {value}, expected a finite number >= 0; calibrate again")
        counts = [count for count, _ in profile.step.sequence_knots]
        seconds = [value for _, value in profile.step.sequence_knots]
        if counts != sorted(set(counts)) or any(not (math.isfinite(value) and value >= 0) for value in seconds):
            raise ProfileError(
                f"{name}: step.sequence_knots must rise in sequences and hold seconds >= 0; calibrate again"
            )
