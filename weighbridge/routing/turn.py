"""One pass over one model's queue, beside those of other models that may share its engines."""

from __future__ import annotations

from weighbridge.routing.candidates import Pool
from weighbridge.routing.hold import HoldQueue
from weighbridge.routing.live import Live


class Turn:
    """How far a pass over one model's queue has come."""

    __slots__ = ("declined", "full", "live", "pace", "pool", "queue", "spent", "tries")

    def __init__(self, pool: Pool, queue: HoldQueue) -> None:
        self.pool = pool
        self.queue = queue
        self.live: Live | None = None
        """The next one, where somebody has looked already."""
        self.pace = (0.0, 0.0)
        """Prefill seconds per token and base of a step, by which deadlines are judged."""
        self.declined: set[str] = set()
        self.tries = 0
        self.full = False
        """Whether it ended for want of room: the next event may bring some, so nobody is told to wait."""
        self.spent = False
        """Whether so many were declined that it ended with everyone waiting."""

    def first(self, now_s: float) -> Live | None:
        """The next one to try."""
        live, self.live = self.live, None
        if live is None or live.id not in self.queue:  # looked up before, and shed since
            live = self.queue.first(now_s, self.pace[0], self.pace[1], self.declined)
        return live


def undisturbed(turns: list[Turn], quiet: frozenset[int]) -> list[Turn]:
    """Those that share no engine, not even by way of one another, with a queue that was told to wait a moment: like
    one queue, they are looked at together, or less urgent ones of one model would pass those of the other meanwhile.

    `quiet`: indexes of the instances of queues that wait.
    """
    while quiet:
        left = [turn for turn in turns if quiet.isdisjoint(turn.pool.indexes)]
        if len(left) == len(turns):
            break
        quiet = quiet.union(*(turn.pool.indexes for turn in turns if turn not in left))
        turns = left
    return turns
