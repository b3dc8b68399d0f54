"""One live request inside the router: from its arrival to its one end."""

from __future__ import annotations

import math
from typing import Literal

from weighbridge.core.request import Request, Tier
from weighbridge.routing.lengths import LengthTable

Stage = Literal["held", "running", "handing_off"]
HELD: Stage = "held"
RUNNING: Stage = "running"
HANDING_OFF: Stage = "handing_off"


class Live:
    """`deadline_s` is when the first token is due (infinity: no bound); `due_s` orders the queue, always finite.

    What the router asks often of the request and its tier stands here once more: compiled, a field of this class is
    read at once, and one of a struct is looked up.
    """

    __slots__ = (
        "arrival_s",
        "attempts",
        "bound_s",
        "cost_tokens",
        "deadline_s",
        "due_s",
        "expected_output_tokens",
        "failed_on",
        "full_s",
        "held_s",
        "id",
        "late",
        "length_scale",
        "lengths",
        "max_tokens",
        "model",
        "no_room_s",
        "prefill_tokens",
        "priority",
        "prompt_tokens",
        "request",
        "running_most",
        "sacrificed",
        "stage",
        "tenant",
        "tier",
        "tier_name",
        "tight",
    )

    def __init__(self, request: Request, tier: Tier, default_ttft_s: float) -> None:
        self.request = request
        self.id = request.id
        self.model = request.model
        self.tenant = request.tenant
        self.prompt_tokens = request.prompt_tokens
        self.arrival_s = request.arrival_s
        self.attempts = 0
        self.failed_on: frozenset[str] = frozenset()
        self.stage: Stage = RUNNING
        self.held_s = self.arrival_s
        self.full_s = 0.0
        """For how long there had been no room when it came to the queue (`HoldQueue.full_s`)."""
        self.no_room_s = 0.0
        """For how long of its wait there was none, when last offered to the policy."""
        self.expected_output_tokens = request.max_tokens
        self.lengths: LengthTable | None = None
        """What the output length is estimated from."""
        self.length_scale = 1.0
        self.prefill_tokens = self.prompt_tokens
        """Prompt tokens that the instance with the longest cached prefix would have to compute."""
        self.cost_tokens = self.prompt_tokens
        """Prompt and expected output tokens, as admission counts them."""
        self.max_tokens: int | None = None
        """A lower output budget, where the router clipped it."""
        self.tight = False
        """When last asked, the policy said that it would miss its first-token bound wherever it went."""
        self.late = False
        """Can no longer make its deadline; set by the queue."""
        self.sacrificed = False
        """Chosen to miss its deadline so that more others keep theirs; such a request is served after them."""
        self.defer(tier, default_ttft_s)

    def defer(self, tier: Tier, default_ttft_s: float) -> None:
        """Take the bounds of `tier`."""
        self.tier = tier
        self.tier_name = tier.name
        self.priority = tier.priority
        self.running_most = tier.max_running_tokens
        ttft_s = tier.ttft_s
        self.bound_s = default_ttft_s if ttft_s is None else ttft_s
        self.due_s = self.arrival_s + self.bound_s
        self.deadline_s = math.inf if ttft_s is None else self.due_s
