"""Turns for large request bodies, so that everybody else waits for at most one slice, or one whole body, of another's.

Reading a megabyte, checking it, hashing it and passing it on takes the event loop some milliseconds, and when hundreds
come at once hundreds are ready in one pass of the loop. So a connection that is in the middle of a large body stops
reading after each read and waits here, and so does a large body that is complete: one of them goes on per pass.

Whose turn it is keeps it while its bytes come, so that bodies are finished one after another instead of being held half
read; one whose bytes are still on their way loses it, and comes back at the end of the line with its next read. The
time that a connection waits here is not taken from its client's deadline.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weighbridge.http.connection import ServerConnection

LARGE_BYTES = 64 * 1024
"""A body above this size, or what has come of it, takes turns."""


class Turns:
    """The line of one listener. Use it within its event loop."""

    def __init__(self) -> None:
        self._line: deque[ServerConnection] = deque()
        self._since: dict[ServerConnection, float] = {}
        self._current: ServerConnection | None = None
        self._going = False

    def __contains__(self, connection: object) -> bool:
        """Whether a connection waits."""
        return connection in self._since

    def wait(self, connection: "ServerConnection") -> None:
        """Has the connection's `take_turn` called once, in a later pass of the loop. It may wait already."""
        if connection in self._since:
            return
        loop = asyncio.get_running_loop()
        self._since[connection] = loop.time()
        if connection is self._current:
            self._line.appendleft(connection)
        else:
            self._line.append(connection)
        if not self._going:
            self._going = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        self._going = False
        while self._line and not self._going:
            connection = self._current = self._line.popleft()
            self._going = True  # whoever waits during the turn needs no further call
            self._going = connection.take_turn(loop.time() - self._since.pop(connection))
        if self._going:
            loop.call_soon(self._next)
        else:
            self._current = None
