"""A relay's end of its connection to the Router's process: made again whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from weighbridge.gateway.relays.wire import Splitter, decode_down, frames
from weighbridge.http.loop_pass import pass_of

log = logging.getLogger("weighbridge.gateway.relays")
AGAIN_S = 0.05
POST_S = 0.004
"""Ends may be this late: under load they then travel with the next arrival, at no cost of their own."""
UNSENT_BYTES = 4 * 1024 * 1024
"""Beyond this the Router's process is thought to have stopped reading, and new requests are refused."""


class Link:
    """An asyncio protocol by its methods, used for one connection after the other.

    `on_open` is told of a connection, `on_message` of every message, `on_lost` of its end, `on_full` whether the
    Router's process has stopped reading. `heard_s` is when it last said anything, on the loop's clock.
    """

    def __init__(
        self,
        path: Path,
        on_open: Callable[[], None],
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        on_full: Callable[[bool], None],
    ) -> None:
        self.heard_s = 0.0
        self._path = path
        self._on_open = on_open
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_full = on_full
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter()
        self._out: list[Any] = []
        self._posted = 0
        self._reporting = False
        self._asking = False
        """An answer is due: the Router's process answers every frame that somebody waits for."""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Connects as soon as there is a Router."""
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def stop(self) -> None:
        """Sends what waits and closes."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def send(self, message: Any) -> None:
        """Takes a message; all of one pass of the event loop go out together, and while an answer to earlier ones is
        due they gather until it comes. Nothing is kept without a connection."""
        if self._transport is None:
            return
        if len(self._out) == self._posted and not self._asking:  # nothing but what nobody waits for
            self._asking = True
            pass_of(asyncio.get_running_loop()).later(self.flush)
        self._out.append(message)

    def report(self, message: Any) -> None:
        """Takes a message that nobody waits for, but that tells when something happened: it goes at once."""
        if self._transport is None:
            return
        if not self._reporting:
            self._reporting = True
            pass_of(asyncio.get_running_loop()).later(self.flush)
        self._out.append(message)
        self._posted += 1

    def post(self, message: Any) -> None:
        """Takes a message that nobody waits for: it goes with the next one, or within `POST_S`."""
        if self._transport is None:
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POST_S, self._on_timer)
        self._out.append(message)
        self._posted += 1

    def _on_timer(self) -> None:
        self._timer = None
        if self._posted:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        self._posted = 0
        self._reporting = False
        if self._out and self._transport is not None:
            out, self._out = self._out, []
            self._transport.write(frames(out))

    def cut(self) -> None:
        """Gives the connection up; another one is made."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A Router is there."""
        self._transport = transport
        self._splitter = Splitter()
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self.heard_s = asyncio.get_running_loop().time()
        self._on_open()

    def data_received(self, data: bytes) -> None:
        """Messages, cut anywhere."""
        self.heard_s = asyncio.get_running_loop().time()
        try:
            for body in self._splitter.feed(data):
                for message in decode_down(body):
                    self._on_message(message)
        except (ValueError, msgspec.MsgspecError):
            log.exception("the Router's process sent what cannot be read")
            self.cut()
        if len(self._out) > self._posted:
            self.flush()  # what has gathered; the next answer is due
        else:
            self._asking = False

    def pause_writing(self) -> None:
        """The Router's process does not keep up."""
        self._on_full(True)

    def resume_writing(self) -> None:
        """It does again."""
        self._on_full(False)

    def eof_received(self) -> None:
        """The connection closes."""

    def connection_lost(self, error: Exception | None) -> None:
        """The Router's process is gone."""
        self._transport = None
        self._out.clear()
        self._posted = 0
        self._asking = self._reporting = False
        if not self._stopped:
            self._on_lost()
            self.start()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.create_unix_connection(lambda: cast(asyncio.Protocol, self), str(self._path))
                return
            except OSError:
                await asyncio.sleep(AGAIN_S)
