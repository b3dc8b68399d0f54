"""The answering side of one request: exactly one response, streamed or whole, framed here and nowhere else."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from weighbridge.http.chunked import framed
from weighbridge.http.envelope import error_body
from weighbridge.http.request import Request

if TYPE_CHECKING:
    from weighbridge.http.connection import ServerConnection

HeaderList = Iterable[tuple[str, str]]

STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
SSE_HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))


def status_line(status: int) -> bytes:
    """The status line; a status without a registered phrase gets a neutral one."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status


def header_lines(headers: HeaderList) -> bytes:
    """Header lines; a value outside latin-1 is percent-encoded, one with a line break is refused."""
    lines = []
    for name, value in headers:
        if "\r" in value or "\n" in value or "\0" in value or "\r" in name or "\n" in name:
            raise ValueError(f"header {name!r} holds a line break")
        lines.append(f"{name}: {value if value.isascii() else _percent(value)}\r\n")
    return "".join(lines).encode("latin-1")


def _percent(value: str) -> str:
    return "".join(c if c.isascii() else "".join(f"%{b:02X}" for b in c.encode("utf-8", "replace")) for c in value)


class Responder:
    """Sends one response. Every call after the end or after a disconnect does nothing.

    `on_disconnect` is called once if the client goes before the end; `on_pause` and `on_resume` follow the
    client's reading speed.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_resume",
        "_task",
        "disconnected",
        "finished",
        "on_disconnect",
        "on_pause",
        "on_resume",
        "paused",
        "request",
        "started",
        "status",
        "written_bytes",
    )

    def __init__(self, connection: "ServerConnection", request: Request) -> None:
        self._connection = connection
        self.request = request
        self.started = False
        self.finished = False
        self.disconnected = False
        self.paused = False
        self.status = 0
        self.written_bytes = 0
        self.on_disconnect: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._chunked = False
        self._resume: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    # whole responses

    def send(
        self, status: int, body: bytes = b"", *, content_type: str = "application/json", headers: HeaderList = ()
    ) -> None:
        """One whole response with Content-Length."""
        if self.started or self.disconnected:
            return
        lines = b"content-type: %b\r\n" % content_type.encode() if body or status != 204 else b""
        self.send_raw(status, lines + header_lines(headers), body)

    def send_json(self, status: int, value: Any, *, headers: HeaderList = ()) -> None:
        """One whole response holding `value` as JSON."""
        self.send(status, msgspec.json.encode(value), headers=headers)

    def send_error(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: HeaderList = (),
    ) -> None:
        """One whole response holding the OpenAI error envelope."""
        self.send(status, error_body(status, message, kind=kind, param=param, code=code), headers=headers)

    def send_raw(self, status: int, lines: bytes, body: bytes) -> None:
        """One whole response with ready header lines (each ended by CRLF, no framing headers among them)."""
        if self.started or self.disconnected:
            return
        self.started = True
        self.status = status
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        date, body = self._connection.server.date_line, b"" if self.request.method == "HEAD" else body
        self._connection.put(b"".join((status_line(status), date, lines, length, self._closing(), b"\r\n", body)))
        self._finish()

    # streamed responses

    def start(
        self,
        status: int,
        *,
        content_type: str = "application/octet-stream",
        headers: HeaderList = (),
        length: int | None = None,
    ) -> None:
        """Begins a response of unknown (chunked, or until close for HTTP/1.0) or given length."""
        lines = b"content-type: %b\r\n" % content_type.encode() + header_lines(headers)
        self.start_raw(status, lines, length)

    def start_sse(self, headers: HeaderList = ()) -> None:
        """Begins a server-sent event stream that no proxy may buffer."""
        self.start(200, content_type="text/event-stream; charset=utf-8", headers=(*SSE_HEADERS, *headers))

    def start_raw(self, status: int, lines: bytes, length: int | None = None, data: bytes = b"") -> None:
        """Begins a response with ready header lines, and its first `data` in the same packet."""
        if self.started or self.disconnected:
            return
        self.started = True
        self.status = status
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.request.version == "1.1":
            framing = b"transfer-encoding: chunked\r\n"
            self._chunked = True
            if data:
                self.written_bytes += len(data)
                data = framed(data)
        else:
            framing = b""
            self.request.keep_alive = False
        head = (status_line(status), self._connection.server.date_line, lines, framing, self._closing(), b"\r\n", data)
        self._connection.put(b"".join(head), at_once=True)

    def write(self, data: bytes) -> None:
        """Body bytes; they leave at once, as one chunk."""
        if not data or self.disconnected or self.finished:
            return
        self.written_bytes += len(data)
        self._connection.put(framed(data) if self._chunked else data, at_once=True)

    def end(self, data: bytes = b"") -> None:
        """The end of the body, after a last piece of it."""
        if self.disconnected or self.finished or not self.started:
            return
        if self._chunked:
            self.written_bytes += len(data)
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        if data:
            self._connection.put(data, at_once=True)
        self._finish()

    def abort(self) -> None:
        """Cuts the connection, so that the client sees an incomplete response."""
        if not self.disconnected and not self.finished:
            self.request.keep_alive = False
            self.finished = True
            self._connection.abort()

    async def drain(self) -> None:
        """Returns at once, or when a slow client has read enough, or when it has gone."""
        if self.paused and not self.disconnected:
            if self._resume is None:
                self._resume = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._resume)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as this response's task: cancelled on disconnect, answered 500 if it raises."""
        task = asyncio.get_running_loop().create_task(work)
        self._task = task
        self._connection.server.own_task(task)
        task.add_done_callback(self._task_done)

    # called by the connection

    def lost(self) -> None:
        """The client went away before the end."""
        if self.disconnected or self.finished:
            return
        self.disconnected = True
        self._wake()
        callback = self.on_disconnect
        self.on_disconnect = self.on_pause = self.on_resume = None  # their owner most often refers to this
        if callback is not None:
            callback()
        if self._task is not None:
            self._task.cancel()

    def pause(self) -> None:
        """The client reads more slowly than we write."""
        self.paused = True
        if self.on_pause is not None:
            self.on_pause()

    def resume(self) -> None:
        """The client has caught up."""
        self.paused = False
        self._wake()
        if self.on_resume is not None:
            self.on_resume()

    # inside

    def _closing(self) -> bytes:
        if self._connection.server.draining:
            self.request.keep_alive = False
        if self.request.keep_alive:
            return b"connection: keep-alive\r\n" if self.request.version == "1.0" else b""
        return b"connection: close\r\n"

    def _finish(self) -> None:
        self.finished = True
        self.on_disconnect = self.on_pause = self.on_resume = None
        self._connection.answered(self)

    def _wake(self) -> None:
        if self._resume is not None and not self._resume.done():
            self._resume.set_result(None)
        self._resume = None

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            error: BaseException | None = None
        else:
            error = task.exception()
        if error is not None:
            self._connection.server.report_crash(self.request, error)
        if self.finished or self.disconnected:
            return
        if self.started:
            self.abort()
        else:
            self.send_error(500, "The server failed to answer this request.")
