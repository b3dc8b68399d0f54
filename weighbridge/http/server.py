"""A listener: accepts connections, sweeps their deadlines, drains and stops."""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

from weighbridge.http.connection import ServerConnection
from weighbridge.http.limits import ServerLimits
from weighbridge.http.loop_pass import LoopPass, pass_of
from weighbridge.http.request import Request
from weighbridge.http.responder import Responder
from weighbridge.http.turns import Turns

Handler = Callable[[Request, Responder], Coroutine[Any, Any, None] | None]
Admit = Callable[[Request], tuple[int, str] | None]

log = logging.getLogger("weighbridge.http")
SWEEP_S = 0.25
CLOSE_S = 10.0
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def http_date(epoch_s: float) -> bytes:
    """The Date header line; independent of the locale."""
    t = time.gmtime(epoch_s)
    day, month = _DAYS[t.tm_wday], _MONTHS[t.tm_mon - 1]
    text = f"date: {day}, {t.tm_mday:02d} {month} {t.tm_year} {t.tm_hour:02d}:{t.tm_min:02d}:{t.tm_sec:02d} GMT\r\n"
    return text.encode()


class HttpServer:
    """One listener.

    `admit`, if given, sees a request's head before its body is read and may refuse it with (status, message): a
    refused client that waits for `100 Continue` gets the refusal instead.
    """

    def __init__(self, handler: Handler, limits: ServerLimits | None = None, admit: Admit | None = None) -> None:
        self.handler = handler
        self.limits = limits or ServerLimits()
        self.admit = admit
        self.now = 0.0  # loop time, at most SWEEP_S old
        self.date_line = http_date(time.time())
        self.clock: Callable[[], float] = time.monotonic
        self.buffered_bytes = 0
        self.draining = False
        self.port = 0
        self.host = ""
        self.connections: set[ServerConnection] = set()
        self.turns = Turns()
        self.on_answered: Callable[[Responder], None] | None = None
        self.refusals = 0
        self.loop_pass: LoopPass | None = None
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # a connection or a task is gone

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        ssl_context: ssl.SSLContext | None = None,
        reuse_port: bool = False,
        backlog: int = 2048,
    ) -> None:
        """Listens; `port` 0 takes a free one. Raises OSError if the address is taken."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.clock = loop.time
        self.now = loop.time()
        self.loop_pass = pass_of(loop)
        self._server = await loop.create_server(
            lambda: cast(asyncio.Protocol, ServerConnection(self)),
            host,
            port,
            ssl=ssl_context,
            reuse_port=reuse_port or None,
            backlog=backlog,
        )
        sockets: Any = cast(Any, self._server).sockets  # declared a tuple; with uvloop it is a list
        address = sockets[0].getsockname()
        self.host, self.port = address[0], address[1]
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    async def drain(self, timeout_s: float) -> bool:
        """Accepts nothing more, lets running responses end; True if all did within `timeout_s`."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        limit = self.clock() + timeout_s
        while self.connections and self.clock() < limit:
            await asyncio.sleep(0.02)
            for connection in list(self.connections):
                connection.close_if_idle()
        return not self.connections

    async def stop(self) -> None:
        """Stops listening, cuts what is still open and waits until it is gone."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        try:  # shutting down must end, whatever a transport does
            async with asyncio.timeout(CLOSE_S):
                while self.connections or self._tasks:
                    self._changed.clear()
                    await self._changed.wait()
                if self._server is not None:
                    await self._server.wait_closed()
        except TimeoutError:
            log.error("%d connections and %d tasks did not end", len(self.connections), len(self._tasks))
        self._server = None
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    @property
    def active(self) -> int:
        """Requests being answered now."""
        return sum(1 for c in self.connections if c.active is not None)

    # called by connections and responders

    def opened(self, connection: ServerConnection) -> None:
        """A connection was accepted; beyond the cap it is cut at once."""
        self.connections.add(connection)
        if len(self.connections) > self.limits.max_connections:
            connection.abort()

    def closed(self, connection: ServerConnection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        self._changed.set()

    def flush(self) -> None:
        """Writes what waits for the end of the pass."""
        if self.loop_pass is not None:
            self.loop_pass.flush()

    def answered(self, responder: Responder) -> None:
        """A response has ended."""
        if self.on_answered is not None:
            self.on_answered(responder)

    def refused(self, status: int) -> None:
        """A connection was refused before its request reached the handler."""
        self.refusals += 1

    def own_task(self, task: "asyncio.Task[None]") -> None:
        """Keeps a reference to a handler's task until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._disown_task)

    def _disown_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._changed.set()

    def report_crash(self, request: Request, error: BaseException) -> None:
        """A handler raised: logged with its place, never with the request's content."""
        log.error("handler of %s %s failed", request.method, request.path, exc_info=error)

    def _sweep(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self.now = now
        self.date_line = http_date(time.time())
        for connection in list(self.connections):
            connection.check(now)
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
