"""The waiting queue of one engine and its disciplines.

Each discipline is a static key given when a sequence first queues, so that the queue is a heap; a preempted sequence
returns under its old key and therefore before all that came after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from weighbridge.scheduling.sequence import Sequence, Status

Discipline = Literal["fcfs", "priority", "spf", "sjf", "round_robin", "fair"]
DISCIPLINES: tuple[Discipline, ...] = ("fcfs", "priority", "spf", "sjf", "round_robin", "fair")

_TENANTS_KEPT = 1024


class WaitingQueue:
    """Sequences that hold no memory, in the order in which they should start.

    - `fcfs`: by arrival.
    - `priority`: by priority, then arrival. With `ageing_s`, waiting that long is worth one priority level: the order
      by `priority - waited / ageing_s` does not change with time, so the key is `arrival + priority * ageing_s`.
    - `spf`: shortest prompt first.
    - `sjf`: least estimated output first (`max_output_tokens` where there is no estimate).
    - `round_robin`: one sequence per tenant in turn.
    - `fair`: start-time fair queueing over tenants, a sequence weighing its prompt and estimated output tokens.
    """

    __slots__ = ("_ageing_s", "_clock", "_count", "_discipline", "_heap", "_live", "_tags")

    def __init__(self, discipline: Discipline = "fcfs", ageing_s: float | None = None) -> None:
        if discipline not in DISCIPLINES:
            raise ValueError(f"discipline must be one of {', '.join(DISCIPLINES)}, not {discipline!r}")
        if ageing_s is not None and ageing_s <= 0:
            raise ValueError("ageing_s must be above 0, or None for strict priorities")
        self._discipline = discipline
        self._ageing_s = ageing_s
        self._heap: list[tuple[tuple[float, float, int], Sequence]] = []
        self._live = 0
        self._count = 0
        self._clock = 0.0  # virtual time of round_robin and fair: the tag of the last sequence taken
        self._tags: dict[str, float] = {}

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no particular order."""
        return (seq for _, seq in self._heap if seq.status is Status.WAITING)

    def push(self, seq: Sequence) -> None:
        """Queue a sequence; its key is made on the first push only."""
        if not seq.order_key[2]:
            self._count += 1
            seq.order_key = (*self._key(seq), self._count)
        heapq.heappush(self._heap, (seq.order_key, seq))
        self._live += 1

    def head(self) -> Sequence | None:
        """The sequence to start next, left in the queue."""
        heap = self._heap
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """Take the head out; the queue must not be empty."""
        seq = self.head()
        assert seq is not None
        heapq.heappop(self._heap)
        self._live -= 1
        self._clock = max(self._clock, seq.order_key[0])
        return seq

    def forget(self, seq: Sequence) -> None:
        """Take one waiting sequence out, wherever it stands; marks it finished."""
        assert seq.status is Status.WAITING
        seq.status = Status.FINISHED
        self._live -= 1

    def _key(self, seq: Sequence) -> tuple[float, float]:
        if self._discipline == "fcfs":
            return 0.0, 0.0
        if self._discipline == "priority":
            if self._ageing_s is None:
                return float(seq.priority), seq.arrival_s
            return seq.arrival_s + seq.priority * self._ageing_s, seq.arrival_s
        if self._discipline == "spf":
            return float(seq.prompt_tokens), 0.0
        estimate = seq.estimated_output_tokens
        output = float(seq.max_output_tokens) if estimate is None else estimate
        if self._discipline == "sjf":
            return output, 0.0
        return self._tag(seq.tenant, 1.0 if self._discipline == "round_robin" else seq.prompt_tokens + output), 0.0

    def _tag(self, tenant: str, weight: float) -> float:
        """Start tag of a tenant's next sequence; its finish tag is where the tenant's following one may start."""
        start = max(self._clock, self._tags.get(tenant, 0.0))
        if len(self._tags) >= _TENANTS_KEPT and tenant not in self._tags:
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._clock}
        self._tags[tenant] = start + weight
        return start
