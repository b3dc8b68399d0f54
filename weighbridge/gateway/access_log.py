"""One JSON line per request for people and log collectors: who, what, where, how it ended and how long it took.

Lines go to a thread through a bounded buffer and into rotated files, like the event log; the request path never waits.
Neither keys nor prompts nor texts are in it, and every client string is JSON-escaped.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weighbridge.gateway.log_writer import LogWriter
from weighbridge.gateway.usage_fields import Usage

if TYPE_CHECKING:
    from weighbridge.gateway.flight import Flight
    from weighbridge.http import Request, Responder

CLIENT_CLOSED = 499
MAX_TEXT = 256


class Entry(msgspec.Struct, omit_defaults=True):
    """A line. Times: `time` Unix seconds at the end, the others seconds from arrival."""

    time: float
    request_id: str
    peer: str
    method: str
    path: str
    status: int
    outcome: str
    tenant: str = ""
    tier: str = ""
    model: str = ""
    instance: str = ""
    stream: bool = False
    attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    bytes_sent: int = 0
    queued_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None


class AccessLog:
    """Appends to `DIR/PREFIX-NNNNNN.jsonl`."""

    def __init__(self, directory: Path, *, max_bytes: int, max_files: int, prefix: str = "access") -> None:
        """Raises OSError."""
        self.writer = LogWriter(directory, None, max_bytes=max_bytes, max_files=max_files, prefix=prefix)
        self._pending: list[tuple[Entry, Responder]] = []

    def refused(self, request: Request, responder: Responder, request_id: str, tenant: str) -> None:
        """A request that never became a flight."""
        self._add(self._entry(request, request_id, "refused", tenant), responder)

    def stopped(self, request: Request, status: int) -> None:
        """A request that was refused before its body was read."""
        entry = self._entry(request, "", "refused", "")
        entry.status = status
        self.writer.append(msgspec.json.encode(entry) + b"\n")

    def ended(
        self, flight: Flight, outcome: str, usage: Usage, output_tokens: int, ttft_s: float | None, e2e_s: float
    ) -> None:
        """A flight has ended."""
        routed = flight.routed
        entry = self._entry(flight.responder.request, flight.id, outcome, routed.tenant)
        entry.tier, entry.model, entry.stream = routed.tier, routed.model[:MAX_TEXT], routed.stream
        entry.instance = flight.endpoint.name if flight.endpoint else ""
        entry.attempts = flight.record.attempt if flight.record else 0
        entry.prompt_tokens, entry.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        entry.output_tokens = output_tokens
        if flight.dispatched_s is not None:
            entry.queued_s = round(flight.dispatched_s - routed.arrival_s, 6)
        entry.ttft_s = None if ttft_s is None else round(ttft_s, 6)
        entry.e2e_s = round(e2e_s, 6)
        self._add(entry, flight.responder)

    def flush(self) -> None:
        """Hands lines to the thread; call it a few times a second."""
        self._encode()
        self.writer.flush()

    def close(self) -> None:
        """Writes the rest."""
        self._encode()
        self.writer.close()

    @staticmethod
    def _entry(request: Request, request_id: str, outcome: str, tenant: str) -> Entry:
        return Entry(
            time=round(time.time(), 3),
            request_id=request_id,
            peer=request.peer,
            method=request.method,
            path=request.path[:MAX_TEXT],
            status=0,
            outcome=outcome,
            tenant=tenant,
        )

    def _add(self, entry: Entry, responder: Responder) -> None:
        """Encodes once the callbacks of this turn are through: a request ends before its last bytes are written."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._encode)
        self._pending.append((entry, responder))

    def _encode(self) -> None:
        pending, self._pending = self._pending, []
        for entry, responder in pending:
            entry.status = responder.status or CLIENT_CLOSED
            entry.bytes_sent = responder.written_bytes
            self.writer.append(msgspec.json.encode(entry) + b"\n")
