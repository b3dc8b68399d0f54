"""The `selection:` section of the configuration file."""

from __future__ import annotations

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.selection.cascade import CascadeSettings
from weighbridge.selection.decision import Mode
from weighbridge.selection.rules import Rule, check_rules
from weighbridge.selection.text import TextLimits


class Worth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one good answer and one second of waiting are worth, in USD."""

    success_usd: float
    second_usd: float


class StickySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session stays with its model unless another is better by more than `margin_usd`; 0 sessions turns it off."""

    sessions: int = 10_000
    margin_usd: float = 0.002


DEFAULT_WORTH = {
    "quality": Worth(success_usd=10.0, second_usd=0.001),
    "balanced": Worth(success_usd=0.3, second_usd=0.001),
    "cheap": Worth(success_usd=0.05, second_usd=0.0002),
}


class SelectionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `model: auto` is answered. Empty paths mean the pool and checkpoint that come with the package.

    `aliases` are the model names that clients send to be given a choice. `fallback` serves texts of unknown families
    (empty: the model with the best mean over families). `strong` and `weak` are the pair of `strong_share` (empty:
    best prior, cheapest). `feedback_rows` bounds what is remembered of feedback.
    """

    aliases: tuple[str, ...] = ("auto",)
    pool: str = ""
    checkpoint: str = ""
    mode: Mode = Mode.BALANCED
    worth: dict[str, Worth] = {}
    gate: bool = True
    fallback: str = ""
    strong: str = ""
    weak: str = ""
    strong_share: float = 0.5
    min_quality: float = 0.5
    rules: tuple[Rule, ...] = ()
    sticky: StickySettings = StickySettings()
    cascade: CascadeSettings | None = None
    feedback_rows: int = 2048
    feedback_log: str = ""
    text: TextLimits = TextLimits()

    def worth_of(self, mode: Mode) -> Worth:
        """The prices of a mode; modes without their own use those of `balanced`, `max_cost_usd` those of `quality`."""
        name = {Mode.MAX_COST_USD: "quality"}.get(mode, mode.value)
        return (
            self.worth.get(name) or DEFAULT_WORTH.get(name) or self.worth.get("balanced") or DEFAULT_WORTH["balanced"]
        )


def check_settings(settings: SelectionSettings, models: tuple[str, ...], source: str = "selection") -> None:
    """Refuse settings that name unknown models or modes, or numbers out of range."""
    for field in ("fallback", "strong", "weak"):
        name = getattr(settings, field)
        if name and name not in models:
            raise ConfigError(
                f"'{name}' is not a model of the pool ({', '.join(models)})", source=source, path=f"$.{field}"
            )
    for field in ("strong_share", "min_quality"):
        if not 0.0 <= getattr(settings, field) <= 1.0:
            raise ConfigError("must lie between 0 and 1", source=source, path=f"$.{field}")
    for name, worth in settings.worth.items():
        if name not in {mode.value for mode in Mode}:
            raise ConfigError(f"'{name}' is not a mode", source=source, path="$.worth")
        if worth.success_usd < 0 or worth.second_usd < 0:
            raise ConfigError("must not be negative", source=source, path=f"$.worth.{name}")
    if settings.feedback_rows < 1 or settings.sticky.sessions < 0:
        raise ConfigError("feedback_rows must be above 0 and sticky.sessions not negative", source=source)
    check_rules(settings.rules, models, source)
    if settings.cascade is not None:
        settings.cascade.check(models, source)
        if settings.cascade.alias in settings.aliases:
            raise ConfigError("is an alias of `auto` already", source=source, path="$.cascade.alias")
