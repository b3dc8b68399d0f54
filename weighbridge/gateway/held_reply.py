"""Stands before the client's responder: one attempt's reply is kept here until someone decides what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

from weighbridge.http import Responder

MAX_HELD_BYTES = 4 << 20


class HeldReply(Responder):
    """A responder for a `Flight` whose bytes are kept, or handed on with other header lines where `passing`.

    `on_over` is called once, at the end of the reply, however it ended. `status` 0 means that it never began; `cut`
    that it stopped in the middle; `overflow` that it grew beyond MAX_HELD_BYTES, and was dropped.
    """

    __slots__ = ("_client", "_edit", "_on_over", "cut", "lines", "overflow", "pieces", "size", "streamed")

    def __init__(
        self,
        client: Responder,
        on_over: Callable[[HeldReply], None],
        edit: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`edit` given: nothing is kept; header lines pass through it on their way to the client."""
        super().__init__(client._connection, client.request)
        self._client, self._on_over, self._edit = client, on_over, edit
        self.lines = b""
        self.pieces: list[bytes] = []
        self.size = 0
        self.streamed = self.cut = self.overflow = False

    @property
    def passing(self) -> bool:
        """Whether the client receives the reply as it comes."""
        return self._edit is not None

    @property
    def body(self) -> bytes:
        """What was kept."""
        return b"".join(self.pieces)

    def send_raw(self, status: int, lines: bytes, body: bytes) -> None:
        if self.started or self.finished:
            return
        self.started, self.status = True, status
        if self._edit is not None:
            self._client.send_raw(status, self._edit(lines), body)
        else:
            self.lines = lines
            self._keep(body)
        self._over()

    def start_raw(self, status: int, lines: bytes, length: int | None = None, data: bytes = b"") -> None:
        if self.started or self.finished:
            return
        self.started, self.status = True, status
        if self._edit is not None:
            self._client.start_raw(status, self._edit(lines), length, data)
            return
        self.lines, self.streamed = lines, b"text/event-stream" in lines
        self._keep(data)

    def write(self, data: bytes) -> None:
        if self._edit is not None:
            self._client.write(data)
        else:
            self._keep(data)

    def end(self, data: bytes = b"") -> None:
        if self._edit is not None:
            self._client.end(data)
        else:
            self._keep(data)
        self._over()

    def abort(self) -> None:
        self.cut = True
        if self._edit is not None:
            self._client.abort()
        self._over()

    def leave(self) -> None:
        """The flight's client is gone, as far as the flight can tell: it cancels its engine and frees its charges."""
        if not self.finished:
            self.finished = self.disconnected = True
            callback, self.on_disconnect = self.on_disconnect, None
            if callback is not None:
                callback()

    def deliver(self, lines: bytes) -> None:
        """Give the kept reply to the client, with `lines` as its header lines."""
        if self.streamed:
            self._client.start_raw(self.status, lines, None, self.body)
            self._client.end()
        else:
            self._client.send_raw(self.status, lines, self.body)

    def _keep(self, data: bytes) -> None:
        if self.overflow or not data:
            return
        self.size += len(data)
        if self.size <= MAX_HELD_BYTES:
            self.pieces.append(data)
            return
        self.overflow = True
        self.pieces.clear()
        self._on_over(self)

    def _over(self) -> None:
        if self.finished:
            return
        self.finished = True
        self.written_bytes = self._client.written_bytes if self.passing else 0
        self.on_disconnect = self.on_pause = self.on_resume = None
        if not self.overflow:
            self._on_over(self)
