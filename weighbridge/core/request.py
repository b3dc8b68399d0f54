"""What a client asks for, as far as routing needs to know it."""

from __future__ import annotations

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
MOST_PRIORITY = 900_000
"""Engines are sent priority and deadline in one 64-bit integer: more would not fit."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request as the router sees it; no prompt text, only its size and the hashes of its leading blocks.

    `prompt_tokens` may be an estimate; `max_tokens` is the output budget (> 0). `prefix_hashes` are chained
    hashes of the prompt's leading blocks of `prefix_block_tokens` tokens each: equal hash i means that the
    first i + 1 blocks are equal. The tenant is part of the chain, so tenants never match each other.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    model: str = ""
    tenant: str = ""
    tier: str = "standard"
    endpoint: str = "chat"
    session: str = ""
    stream: bool = True
    prefix_hashes: tuple[int, ...] = ()
    prefix_block_tokens: int = 16
    expected_output_tokens: int | None = None
    """An outside estimate of the output length: a client's hint, a predictor's answer, or the simulator's oracle."""
    allow: tuple[str, ...] = ()
    """What the client lets the router do under overload: `clip` (lower max_tokens), `defer` (treat as batch)."""


class Tier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An SLO class. Lower `priority` is served first (vLLM's meaning). A bound of None is not checked.

    `max_wait_s`: a request held for longer is served before more urgent tiers, one in four, so that no tier starves.
    `max_held_tokens`, `max_running_tokens`: bounds on the prompt and expected output tokens of the tier that wait in
    the router, and that run.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    priority: Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2e_s: Seconds | None = None
    may_preempt: bool = False
    sheddable: bool = True
    max_wait_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_held_tokens: Tokens | None = None
    max_running_tokens: Tokens | None = None


DEFAULT_TIERS: tuple[Tier, ...] = (
    Tier(name="interactive", priority=0, ttft_s=0.5, may_preempt=True, sheddable=False),
    Tier(name="standard", priority=10, e2e_s=10.0),
    Tier(name="batch", priority=20),
)
