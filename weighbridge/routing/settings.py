"""Everything a router's behaviour depends on besides its events; the event log's header keeps it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.core.request import DEFAULT_TIERS, Seconds, Tier, Tokens

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class TenantLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one tenant may use. Tokens are prompt and expected output tokens; None is unlimited.

    `weight` is its share when tenants compete for the queue.
    """

    tokens_per_s: Positive | None = None
    burst_tokens: Tokens | None = None
    max_requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    weight: Positive = 1.0


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one router.

    `dispatch`: `hold` keeps requests in the router's queue until an instance has room, `immediate` places each on
    arrival, `auto` does what the policy asks for. `binding`: when the decode instance of a disaggregated request is
    chosen: `late` (at hand-off), `early` (together with the prefill instance), `auto` (early only where the prefill
    engine needs the pair at once). `length_estimate`: which estimate of output length is charged and shown to
    policies; `auto` is the policy's own wish, else `median`.
    """

    policy: str = "least_tokens"
    policy_options: dict[str, Any] = {}
    seed: int = 0
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 3
    record_decisions: bool = True
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    dispatch: Literal["auto", "hold", "immediate"] = "auto"
    binding: Literal["auto", "late", "early"] = "auto"
    length_estimate: Literal["auto", "median", "mean", "full_budget", "new_token_ratio", "given"] = "auto"
    length_noise: NotNegative = 0.0
    """Injected error of the length estimate, for experiments: 1.5 is wrong by a factor of 2.5 at one sigma."""
    correct: bool = True
    """Correct profiles by what running requests show of step and prefill times."""
    room_kv: Share = 0.8
    """Share of an instance's KV that held requests may fill, their prompts and a margin included."""
    shadow: tuple[str, ...] = ()
    """Policies that are asked about every placement and recorded in its decision, never obeyed."""
    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    """Share of room that tiers leave to more urgent ones which may preempt, on engines that cannot preempt."""
    decode_kv: Share = 0.95
    """The same for a decode instance at hand-off."""
    reject_hopeless: bool = True
    """Answer 429 to a held request of a sheddable tier that can no longer make its first-token deadline."""
    release_after: Positive = 10.0
    """A held request passes the gate after this many times its first-token bound, whatever the forecast says."""
    max_held_s: Seconds | None = 600.0
    """A request that is held for longer is answered 429, of whatever tier; None: it may wait for ever."""
    tenants: dict[str, TenantLimit] = {}
    """Limits by tenant; `*` is for every tenant without its own."""
    fair_tokens: Annotated[int, msgspec.Meta(ge=0)] = 16_384
    """Tokens that one tenant may be served more than the least served one before it goes behind."""
    max_held_tokens: Tokens | None = None
    """Prompt and expected output tokens of all held requests; beyond it the least urgent are shed."""
    overload_enter_s: Seconds = 10.0
    """Seconds of held work at which the router turns to overload: clips and defers where clients allow it."""
    overload_leave_s: NotNegative = 3.0
    """Seconds of held work at which it turns back."""
    default_ttft_s: Seconds = 2.0
    """First-token bound used for ordering where a tier has no bound of its own to derive one from."""


def check_bounds(settings: RouterSettings) -> None:
    """Settings that were made in code are held to the bounds that a file is held to.

    Raises:
        ConfigError: with the path of the setting, such as `$.router.tenants.team.weight`.
    """
    for index, tier in enumerate(settings.tiers):
        _check_fields(tier, f"$.router.tiers[{index}]")
    for name, limit in settings.tenants.items():
        _check_fields(limit, f"$.router.tenants.{name}")
    _check_fields(settings, "$.router")
    problem = contradiction(settings)
    if problem is not None:
        raise ConfigError(problem[1], path=problem[0])


def _check_fields(settings: msgspec.Struct, place: str) -> None:
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    try:
        msgspec.convert(fields, type(settings))
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise ConfigError(message, path=path.rstrip("`").replace("$", place, 1)) from None


def contradiction(settings: RouterSettings) -> tuple[str, str] | None:
    """Where single values are in bounds and do not go together: the path of one of them, and why."""
    names: set[str] = set()
    for index, tier in enumerate(settings.tiers):
        if tier.name in names:
            return f"$.router.tiers[{index}].name", f"two tiers are named {tier.name!r}; rename or remove one"
        names.add(tier.name)
    enter, leave = settings.overload_enter_s, settings.overload_leave_s
    if leave > enter:
        why = f"{leave:g} is above overload_enter_s, {enter:g}: overload would end before it begins; set it below"
        return "$.router.overload_leave_s", why
    return None
