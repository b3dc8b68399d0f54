"""Connections to one origin: re-used youngest first, closed before the server would, dialled when none is free."""

import asyncio
import contextlib
import os
import ssl
from typing import cast

from weighbridge.http.client_connection import IDLE, ClientConnection, Exchange, Sink
from weighbridge.http.errors import ConnectFailed
from weighbridge.http.limits import ClientLimits
from weighbridge.http.loop_pass import pass_of
from weighbridge.http.reply_head import KnownReply

SWEEP_S = 0.5
CLOSE_S = 10.0


def _words(error: OSError) -> str:
    """Why a connection failed, in the system's words whatever the event loop's are."""
    known = isinstance(error, ConnectionError) and error.errno is not None
    return os.strerror(error.errno) if known else error.strerror or type(error).__name__  # type: ignore[arg-type]


class Pool:
    """Sends requests to one host and port. Create and use it within one running event loop; `close` it at the end."""

    def __init__(
        self,
        host: str,
        port: int,
        limits: ClientLimits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.limits = limits or ClientLimits()
        self.connections: set[ClientConnection] = set()
        self.known_reply: KnownReply | None = None
        self._ssl = ssl_context
        self._server_hostname = (server_hostname or host) if ssl_context is not None else None
        self._idle: list[ClientConnection] = []
        self._dials: dict[asyncio.Task[None], Exchange] = {}
        self._loop = asyncio.get_running_loop()
        self.loop_pass = pass_of(self._loop)
        self.clock = self._loop.time
        self.now = self._loop.time()  # at most SWEEP_S old
        self.read_s = self.limits.read_s + SWEEP_S  # from `now` on, so that no deadline comes early
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._changed = asyncio.Event()  # a connection or a dial is gone

    def send(self, payload: bytes, sink: Sink, once: bool = False) -> Exchange:
        """Sends one whole request (head and body as bytes); the reply goes to `sink`, never before this returns.

        Where a re-used connection dies at once, without a byte of a reply, the request is sent again over a new one,
        unless it may go out only `once`.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        exchange = Exchange(payload, sink)
        exchange.resent = once
        if self._sweeper is None:
            self._sweep()
        idle = self._idle
        while idle:
            connection = idle.pop()
            transport = connection.transport
            if connection.state != IDLE or transport is None or transport.is_closing():
                continue
            if self.clock() - connection.idle_since > connection.idle_limit_s:
                transport.close()
                continue
            connection.begin(exchange)
            return exchange
        self.dial(exchange)
        return exchange

    def dial(self, exchange: Exchange) -> None:
        """Opens a new connection for an exchange."""
        task = self._loop.create_task(self._dial(exchange))
        self._dials[task] = exchange
        task.add_done_callback(self._dial_done)

    async def _dial(self, exchange: Exchange) -> None:
        connection = ClientConnection(self)
        try:
            async with asyncio.timeout(self.limits.connect_s):
                await self._loop.create_connection(
                    lambda: cast(asyncio.Protocol, connection),
                    self.host,
                    self.port,
                    ssl=self._ssl,
                    server_hostname=self._server_hostname,
                )
        except asyncio.CancelledError:  # the loop may never say that such a connection is lost
            self.connections.discard(connection)
            raise
        except TimeoutError:
            self.connections.discard(connection)
            self._refuse(exchange, f"no connection within {self.limits.connect_s:g} s")
        except (OSError, ssl.SSLError) as error:
            self._refuse(exchange, _words(error))
        else:
            if exchange.cancelled or self._closed:
                self.give_back(connection)
            elif connection.transport is None:
                self._refuse(exchange, "the server closed the connection at once")
            else:
                connection.begin(exchange)

    def _refuse(self, exchange: Exchange, reason: str) -> None:
        if not exchange.cancelled:
            exchange.sink.on_fail(ConnectFailed(f"cannot connect: {reason}"))

    def _dial_done(self, task: "asyncio.Task[None]") -> None:
        exchange = self._dials.pop(task)
        self._changed.set()
        if task.cancelled():
            self._refuse(exchange, "the pool was closed")
        else:
            error = task.exception()
            if error is not None:
                self._loop.call_exception_handler({"message": "dial failed", "exception": error, "task": task})

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def idle(self) -> int:
        """Connections ready for re-use."""
        return len(self._idle)

    def give_back(self, connection: ClientConnection) -> None:
        """A connection has finished its exchange."""
        if connection.transport is None:
            return
        if self._closed or len(self._idle) >= self.limits.max_idle:
            connection.transport.close()
            return
        connection.idle_since = self.clock()
        self._idle.append(connection)

    def gone(self, connection: ClientConnection) -> None:
        """A connection has closed."""
        self.connections.discard(connection)
        self._changed.set()
        if connection.exchange is None and connection in self._idle:
            self._idle.remove(connection)

    def _sweep(self) -> None:
        self.now = self.clock()
        for connection in list(self.connections):
            connection.check(self.now)
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    async def close(self) -> None:
        """Fails what is running, closes every connection and waits until they are gone."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in list(self._dials):
            task.cancel()
        for connection in list(self.connections):
            if connection.exchange is not None:
                connection.fail(ConnectFailed("the pool was closed"))
            elif connection.transport is not None:
                connection.transport.abort()
        with contextlib.suppress(TimeoutError):  # shutting down must end, whatever a transport does
            async with asyncio.timeout(CLOSE_S):
                while self.connections or self._dials:
                    self._changed.clear()
                    await self._changed.wait()
