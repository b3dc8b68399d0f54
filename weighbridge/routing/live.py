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
    """`deadline_s` is when the first token is due (infinity: no bound); `due_s` orders the queue, always finite."""

    __slots__ = (
        "attempts",
        "bound_s",
        "cost_tokens",
        "deadline_s",
        "due_s",
        "expected_output_tokens",
        "failed_on",
        "full_s",
        "held_s",
        "late",
        "length_scale",
        "lengths",
        "max_tokens",
        "no_room_s",
        "prefill_tokens",
        "request",
        "sacrificed",
        "stage",
        "tier",
        "tight",
    )

    def __init__(self, request: Request, tier: Tier, default_ttft_s: float) -> None:
        self.request = request
        self.attempts = 0
        self.failed_on: frozenset[str] = frozenset()
        self.stage: Stage = RUNNING
        self.held_s = request.arrival_s
        self.full_s = 0.0
        """For how long there had been no room when it came to the queue (`HoldQueue.full_s`)."""
        self.no_room_s = 0.0
        """For how long of its wait there was none, when last offered to the policy."""
        self.expected_output_tokens = request.max_tokens
        self.lengths: LengthTable | None = None
        """What the output length is estimated from."""
        self.length_scale = 1.0
        self.prefill_tokens = request.prompt_tokens
        """Prompt tokens that the instance with the longest cached prefix would have to compute."""
        self.cost_tokens = request.prompt_tokens
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
        self.bound_s = default_ttft_s if tier.ttft_s is None else tier.ttft_s
        self.due_s = self.request.arrival_s + self.bound_s
        self.deadline_s = math.inf if tier.ttft_s is None else self.due_s
