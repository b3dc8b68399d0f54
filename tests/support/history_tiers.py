"""What a history draws about urgency: tiers, keys that fix them, how little its engines run at once, and the order."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.core.instance import Limits
from weighbridge.core.request import DEFAULT_TIERS, Tier
from weighbridge.gateway.settings import KeySettings
from weighbridge.routing.router import RouterSettings

PROFILES = Path(__file__).resolve().parents[1] / "data" / "profiles"
NAMES = ("interactive", "standard", "batch")
TENANTS = ("red", "blue")
OTHER = "m-other"
"""A second name of the one model: its requests wait in a queue of their own, for the same engines."""


@dataclass(frozen=True)
class Caller:
    """How one client says who it is."""

    tier: str
    model: str
    headers: tuple[tuple[str, str], ...]


class Urgency:
    """All of a seed's draws; none of them touches the history's other draws."""

    def __init__(self, seed: int, model: str) -> None:
        self.rng = rng = random.Random(f"tiers-{seed}")
        self._model = model
        self.narrow = rng.random() < 0.7
        """Whether engines run so little at once that requests must wait in the Router."""
        self.keyed = rng.random() < 0.4
        self.other = rng.random() < 0.4
        self.tiers = self._tiers()
        self._slots = rng.choice((1, 1, 2, 3))
        self._profiles = rng.choice(((), (), ("quick",), ("quick", "slow")))

    def _tiers(self) -> tuple[Tier, ...]:
        rng = self.rng
        if rng.random() < 0.5:
            return DEFAULT_TIERS
        wait_s = rng.choice((0.005, 0.02, 0.05))
        interactive = Tier(name="interactive", priority=0, ttft_s=rng.choice((0.02, 0.5)), sheddable=rng.random() < 0.5)
        standard = Tier(name="standard", priority=10, ttft_s=0.05) if rng.random() < 0.5 else DEFAULT_TIERS[1]
        return (interactive, standard, Tier(name="batch", priority=20, max_wait_s=wait_s))

    def router(self, drawn: RouterSettings) -> RouterSettings:
        """The history's settings, with these tiers; where little runs at once mostly with a policy that holds."""
        rng = self.rng
        changes: dict[str, Any] = {"tiers": self.tiers, "reject_hopeless": rng.random() < 0.7}
        if self.narrow:
            policy = rng.choice(("least_tokens", "calibrated", "calibrated", drawn.policy))
            changes |= {"policy": policy, "dispatch": rng.choice(("hold", "hold", "hold", drawn.dispatch))}
            changes["max_held_tokens"] = rng.choice((None, None, 60))
        return msgspec.structs.replace(drawn, **changes)

    def instance_fields(self, number: int) -> dict[str, Any]:
        """What engine `number` is configured with besides its name and address."""
        slots = self._slots if self.narrow else None
        fields: dict[str, Any] = {"limits": Limits(max_context=4096, max_sequences=slots)}
        if self._profiles:
            fields["profile"] = str(PROFILES / f"{self._profiles[number % len(self._profiles)]}.json")
        if self.other:
            fields["aliases"] = {OTHER: self._model}
        return fields

    def keys(self) -> tuple[KeySettings, ...]:
        """A key for each tenant and tier, or none at all."""
        if not self.keyed:
            return ()
        return tuple(
            KeySettings(sha256=hashlib.sha256(_key(tenant, tier)).hexdigest(), tenant=tenant, tier=tier)
            for tenant in TENANTS
            for tier in NAMES
        )

    def caller(self, word: str) -> Caller:
        """Who asks for `word`; the request has its word for an id."""
        rng = self.rng
        tier = rng.choice(NAMES)
        headers = [("x-request-id", word)]
        if self.keyed:
            headers.append(("authorization", f"Bearer {_key(rng.choice(TENANTS), tier).decode()}"))
            headers.append(("x-weighbridge-tier", rng.choice(NAMES)))  # a key's tier is not for its client to change
        else:
            headers.append(("x-weighbridge-tier", tier))
        model = OTHER if self.other and rng.random() < 0.5 else self._model
        return Caller(tier, model, tuple(headers))


def _key(tenant: str, tier: str) -> bytes:
    return f"key-of-{tenant}-{tier}".encode()
