"""A request's life inside one engine: how much of it is computed, what it holds, and how it ended.

A `Sequence` is mutable state, changed only by the scheduler that it was added to, except for `tokens` and
`finish_reason`, which the engine's runner sets before it calls `Scheduler.complete`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import IntEnum


class Status(IntEnum):
    """Where a sequence is. Waiting covers new, preempted and swapped-out sequences."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """One request in one engine; counts are in tokens, times in seconds on the driver's clock.

    `tokens` holds real token ids (prompt, then output) in the embedded engine and is None in the simulator.
    `block_hashes` names the content of each full block for engines with a block-hash prefix cache; it may reach
    beyond the prompt when the output is known (a trace of turns), and None means that nothing is shared.
    `max_output_tokens` ends the sequence with reason `length`. `priority` follows vLLM: lower is earlier.
    """

    __slots__ = (
        "admitted_s",
        "arrival_s",
        "block_hashes",
        "blocks",
        "cached_tokens",
        "computed_tokens",
        "estimated_output_tokens",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "held_hashes",
        "id",
        "max_output_tokens",
        "namespace",
        "order_key",
        "output_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "slot",
        "status",
        "steps",
        "swapped_tokens",
        "tenant",
        "together",
        "tokens",
        "total_tokens",
    )

    def __init__(
        self,
        id: str | int,
        prompt_tokens: int,
        max_output_tokens: int,
        arrival_s: float = 0.0,
        *,
        priority: int = 0,
        tenant: str = "",
        namespace: str = "",
        tokens: list[int] | None = None,
        block_hashes: Seq[int] | None = None,
        estimated_output_tokens: float | None = None,
    ) -> None:
        if prompt_tokens < 1:
            raise ValueError("prompt_tokens must be at least 1: an empty prompt has nothing to compute")
        if max_output_tokens < 1:
            raise ValueError("max_output_tokens must be at least 1")
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.arrival_s = arrival_s
        self.priority = priority
        self.tenant = tenant
        self.namespace = namespace
        self.tokens = tokens
        self.block_hashes = block_hashes
        self.estimated_output_tokens = estimated_output_tokens
        self.status = Status.WAITING
        self.slot = -1
        self.computed_tokens = 0
        self.output_tokens = 0
        self.total_tokens = prompt_tokens  # prompt and output so far
        self.blocks = 0
        self.held_hashes: list[int] = []
        self.cached_tokens = 0  # prompt tokens that a prefix cache saved at the first admission
        self.swapped_tokens = 0  # KV tokens kept in host memory while preempted by swap
        self.preemptions = 0
        self.together = 0  # prompts that were being computed when this one started, itself included
        self.steps = 0  # forward passes that it took part in
        self.order_key: tuple[float, float, int] = (0.0, 0.0, 0)
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.finish_reason: str | None = None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are known but not computed yet; 1 while decoding."""
        return self.total_tokens - self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether the next piece is a single generated token."""
        return self.computed_tokens >= self.prompt_tokens and self.total_tokens - self.computed_tokens == 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id!r}, {self.status.name.lower()}, computed {self.computed_tokens} of "
            f"{self.prompt_tokens}+{self.output_tokens}, slot {self.slot})"
        )
