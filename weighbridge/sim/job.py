"""One request's stay on one simulated instance, and what an instance tells its driver."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

FIRST_TOKEN: Literal["first_token"] = "first_token"  # noqa: S105 (no password)
FINISHED: Literal["finished"] = "finished"


class Job:
    """A request on an instance: what it asks for, and (kept by the instance) how far it is.

    `ready_tokens` of the prompt have their KV already (transferred from a prefill instance). With `keeps_blocks` the
    instance holds the KV after the job has finished (`blocks` of it) until `end_lease`. `owner` is the driver's.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "cancelled",
        "computed",
        "end_step",
        "first_token_s",
        "generated",
        "hashes",
        "id",
        "keeps_blocks",
        "offset",
        "output_tokens",
        "owner",
        "preemptions",
        "priority",
        "prompt_tokens",
        "ready_tokens",
        "tenant",
        "total",
    )

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        output_tokens: int,
        owner: Any = None,
        *,
        ready_tokens: int = 0,
        keeps_blocks: bool = False,
        priority: int = 0,
        tenant: str = "",
        hashes: tuple[int, ...] = (),
    ) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.owner = owner
        self.ready_tokens = ready_tokens
        self.keeps_blocks = keeps_blocks
        self.priority = priority
        self.tenant = tenant
        self.hashes = hashes
        self.total = prompt_tokens  # prompt and output known so far, when not decoding
        self.computed = 0
        self.generated = 0
        self.blocks = 0
        self.offset = 0  # while decoding: computed tokens minus the instance's step count
        self.end_step = -1  # while decoding: the step count at which the last token is out; -1 otherwise
        self.cached_tokens = 0
        self.preemptions = 0
        self.first_token_s: float | None = None
        self.cancelled = False

    def __lt__(self, other: Job) -> bool:
        """Only so that heaps of (step, job) never fail; the order of equals does not matter there."""
        return self.id < other.id


class StepSpan(NamedTuple):
    """A stretch of equal steps as it ran, for pictures: times in seconds, steps, work of the first step."""

    start_s: float
    end_s: float
    steps: int
    decodes: int
    prefill_tokens: int
    kv_tokens: int
    waiting: int


Outcome = tuple[Literal["first_token", "finished"], Job]
