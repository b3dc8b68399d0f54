"""Work that waits for the end of a pass of the event loop: what is ready is read first, all of it, then worked on, then
written.

Requests that come together so go through one stage after the other: each stage finds its code in the processor's cache,
and so do the system's calls. A peer that serves many connections is woken once instead of for each of them.
"""

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

log = logging.getLogger("weighbridge.http")
MOST_BYTES = 256 * 1024
"""With more than this nobody waits for the end: whoever writes without a pause must meet a full socket."""


class LoopPass:
    """Of one event loop; see `pass_of`. Data for one transport keeps its order. `number` grows with each flush: what
    was written under an older one has left."""

    __slots__ = ("_bytes", "_due", "_works", "_writes", "number")

    def __init__(self) -> None:
        self.number = 1
        self._due = False
        self._bytes = 0
        self._works: list[Callable[[], None]] = []
        self._writes: list[tuple[asyncio.Transport, bytes]] = []

    def later(self, work: Callable[[], None]) -> None:
        """Does `work` when this pass has read everything, before anything is written. What it raises is logged."""
        self._works.append(work)
        self._schedule()

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Writes `data` at the end, unless the transport closes until then."""
        self._writes.append((transport, data))
        self._bytes += len(data)
        if self._bytes > MOST_BYTES:
            self.flush()
        else:
            self._schedule()

    def flush(self) -> None:
        """Writes now what waits."""
        writes = self._writes
        self._writes, self._bytes = [], 0
        self.number += 1
        for transport, data in writes:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:
                    log.exception("a write at the end of a pass failed")

    def end(self) -> None:
        """What the loop calls: does what waits, and writes."""
        try:
            while self._works:
                works = self._works
                self._works = []
                for work in works:
                    try:
                        work()
                    except Exception:
                        log.exception("work at the end of a pass failed")
        finally:  # whatever comes: without this no pass would ever end again
            self._due = False
            self.flush()

    def _schedule(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.end)


_PASSES: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopPass] = WeakKeyDictionary()


def pass_of(loop: asyncio.AbstractEventLoop) -> LoopPass:
    """The loop's only one."""
    current = _PASSES.get(loop)
    if current is None:
        current = _PASSES[loop] = LoopPass()
    return current
