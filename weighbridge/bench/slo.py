"""SLO bounds on the command line: `ttft=0.5,tpot=0.05`, per tier `interactive:ttft=0.2`, or vLLM's `ttft:500`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.core.request import DEFAULT_TIERS, Tier
from weighbridge.workload.mixes import MIXES, classes

_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}


def tiers_of(bounds: Iterable[str], mix: str = "", goodput: Iterable[str] = ()) -> dict[str, Tier]:
    """Tiers by name. A bound without a tier holds for all; the default tiers' own bounds apply where nothing is given.

    Seconds (`ttft=0.5`; `ms` as suffix is understood), except vLLM's `--goodput ttft:500`, which is in milliseconds.
    Classes of a named mix bring their own bounds. Raises `ConfigError`.
    """
    tiers = {tier.name: tier for tier in DEFAULT_TIERS}
    for name in MIXES if mix else ():
        for c in classes(name):
            tiers[c.tier] = Tier(name=c.tier, priority=10, ttft_s=c.ttft_slo_s, tpot_s=c.tpot_slo_s)
    everywhere: dict[str, float] = {}
    own: dict[str, dict[str, float]] = {}
    for text in bounds:
        tier, _, rest = text.rpartition(":") if ":" in text else ("", "", text)
        (own.setdefault(tier, {}) if tier else everywhere).update(_bounds(rest, text))
    for text in goodput:
        name, _, value = text.partition(":")
        everywhere[_field(name, text)] = _seconds(value, text) / 1e3
    if everywhere:
        tiers = {
            name: msgspec.structs.replace(Tier(name=name, priority=tier.priority), **everywhere)
            for name, tier in tiers.items()
        }
    for name, values in own.items():
        known = tiers.get(name, Tier(name=name, priority=10))
        tiers[name] = msgspec.structs.replace(known, **everywhere | values)
    return tiers


def _bounds(rest: str, text: str) -> dict[str, float]:
    out = {}
    for part in rest.split(","):
        name, sign, value = part.partition("=")
        if not sign:
            raise ConfigError(f"cannot read '{text}'; write for example ttft=0.5,tpot=0.05", source="--slo")
        out[_field(name, text)] = _seconds(value, text)
    return out


def _field(name: str, text: str) -> str:
    field = _NAMES.get(name.strip().lower())
    if field is None:
        raise ConfigError(f"unknown metric '{name}' in '{text}'; use ttft, tpot or e2e", source="--slo")
    return field


def _seconds(value: str, text: str) -> float:
    value = value.strip().lower()
    scale = 1.0
    if value.endswith("ms"):
        value, scale = value[:-2], 1e-3
    elif value.endswith("s"):
        value = value[:-1]
    try:
        seconds = float(value) * scale
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"'{value}' in '{text}' is not a time above 0", source="--slo")
    return seconds
