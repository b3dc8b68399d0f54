"""Everything a router's behaviour depends on besides its events; the event log's header keeps it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weighbridge.core.request import DEFAULT_TIERS, Tier


class TenantLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one tenant may use. Tokens are prompt and expected output tokens; None is unlimited.

    `weight` is its share when tenants compete for the queue.
    """

    tokens_per_s: float | None = None
    burst_tokens: int | None = None
    max_requests: int | None = None
    weight: float = 1.0


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
    max_attempts: int = 3
    record_decisions: bool = True
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    dispatch: Literal["auto", "hold", "immediate"] = "auto"
    binding: Literal["auto", "late", "early"] = "auto"
    length_estimate: Literal["auto", "median", "mean", "full_budget", "new_token_ratio", "given"] = "auto"
    length_noise: float = 0.0
    """Injected error of the length estimate, for experiments: 1.5 is wrong by a factor of 2.5 at one sigma."""
    correct: bool = True
    """Correct profiles by what running requests show of step and prefill times."""
    room_kv: float = 0.8
    """Share of an instance's KV that held requests may fill, their prompts and a margin included."""
    shadow: tuple[str, ...] = ()
    """Policies that are asked about every placement and recorded in its decision, never obeyed."""
    headroom: float = 0.1
    """Share of room that tiers leave to more urgent ones which may preempt, on engines that cannot preempt."""
    decode_kv: float = 0.95
    """The same for a decode instance at hand-off."""
    reject_hopeless: bool = True
    """Answer 429 to a held request of a sheddable tier that can no longer make its first-token deadline."""
    release_after: float = 10.0
    """A held request passes the gate after this many times its first-token bound, whatever the forecast says."""
    max_held_s: float | None = 600.0
    """A request that is held for longer is answered 429, of whatever tier; None: it may wait for ever."""
    tenants: dict[str, TenantLimit] = {}
    """Limits by tenant; `*` is for every tenant without its own."""
    fair_tokens: int = 16_384
    """Tokens that one tenant may be served more than the least served one before it goes behind."""
    max_held_tokens: int | None = None
    """Prompt and expected output tokens of all held requests; beyond it the least urgent are shed."""
    overload_enter_s: float = 10.0
    """Seconds of held work at which the router turns to overload: clips and defers where clients allow it."""
    overload_leave_s: float = 3.0
    """Seconds of held work at which it turns back."""
    default_ttft_s: float = 2.0
    """First-token bound used for ordering where a tier has no bound of its own to derive one from."""
