"""One subscription to an engine's KV events over ZeroMQ, with replay of what was missed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
import zmq.asyncio

from weighbridge.gateway.kv.stream import Sequence
from weighbridge.gateway.kv.wire import KvEvent, read_batch

log = logging.getLogger("weighbridge.gateway.kv")
POLL_MS = 500
REPLAY_MS = 3000
AT_ONCE = 2  # batches between two turns of the event loop: one of 50 blocks takes about 0.2 ms
MAX_MESSAGE_BYTES = 16 << 20
HIGH_WATER = 10_000  # batches that wait unread; beyond it they are lost here and replayed
LAST = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Source:
    """Where one data-parallel rank of an engine publishes, and replays (None: it does not)."""

    endpoint: str
    replay: str | None = None
    topic: str = ""
    rank: str = "0"


class Counts:
    """What a subscription has seen."""

    __slots__ = ("batches", "gaps", "lost", "replayed", "restarts", "unreadable")

    def __init__(self) -> None:
        self.batches = 0
        self.gaps = 0
        self.replayed = 0
        self.lost = 0
        self.restarts = 0
        self.unreadable = 0


class Listener(Protocol):
    """Whom a subscription tells."""

    def kv_events(self, rank: str, events: list[KvEvent]) -> None:
        """Events of a rank, in order."""

    def kv_cleared(self, rank: str) -> None:
        """What was told of a rank is no longer known to be true: it is to be forgotten."""

    def kv_idle(self) -> None:
        """Called about twice a second, and after events."""


class Subscriber:
    """Reads one source until cancelled. The sockets live as long as `run` does."""

    def __init__(self, context: zmq.asyncio.Context, source: Source, listener: Listener, counts: Counts) -> None:
        self.source = source
        self.counts = counts
        self._context = context
        self._listener = listener
        self._sequence = Sequence()
        self._again = False

    def read_again(self) -> None:
        """Forget what was told, and read it anew from the replay's beginning: the engine restarted."""
        self._again = True

    async def run(self) -> None:
        """Subscribes and reads."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.subscribe(self.source.topic)
        try:
            socket.connect(self.source.endpoint)
            await self._replay()  # what was published before we came
            while True:
                await self._read(socket)
                if self._again:
                    self._again = False
                    self._start_over()
                    await self._replay()
                self._listener.kv_idle()
        finally:
            socket.close()

    async def _read(self, socket: Any) -> None:
        """What has arrived, at most `AT_ONCE` batches."""
        if not await socket.poll(POLL_MS):
            return
        for _ in range(AT_ONCE):
            try:
                frames = await socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) < 2 or len(frames[-2]) != 8:
                self.counts.unreadable += 1
                continue
            await self._live(int.from_bytes(frames[-2], "big"), frames[-1])

    async def _live(self, number: int, payload: bytes) -> None:
        sequence = self._sequence
        verdict = sequence.live(number, payload)
        if verdict == "restart":
            self.counts.restarts += 1
            self._listener.kv_cleared(self.source.rank)
            verdict = "gap"
        if verdict == "gap":
            if sequence.next is not None:
                self.counts.gaps += 1
            await self._replay()
            verdict = sequence.live(number, payload)
            if verdict == "gap":
                self.counts.lost += sequence.skip_to(number)
                verdict = sequence.live(number, payload)
        if verdict == "apply":
            self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        self.counts.batches += 1
        events, bad = read_batch(payload)
        self.counts.unreadable += bad
        self._listener.kv_events(self.source.rank, events)

    def _start_over(self) -> None:
        self._sequence.forget()
        self._listener.kv_cleared(self.source.rank)

    async def _replay(self) -> None:
        """Asks for everything from the next number on. Where the engine has dropped some of it, what it still has is
        read anew: a block whose removal was missed must not stay."""
        if self.source.replay is None:
            return
        start = self._sequence.next or 0
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            socket.connect(self.source.replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            first, read = True, 0
            while await socket.poll(REPLAY_MS):
                read += 1
                if read % AT_ONCE == 0:
                    await asyncio.sleep(0)
                frames = await socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    self.counts.unreadable += 1
                    continue
                number = int.from_bytes(frames[-2], "big")
                if number == LAST:
                    return
                if first and start and number > start:
                    self.counts.lost += number - start
                    self._start_over()
                first = False
                if self._sequence.replayed(number, frames[-1]):
                    self.counts.replayed += 1
                    self._apply(frames[-1])
            log.debug("no replay from %s", self.source.replay)
        except zmq.ZMQError as error:
            log.warning("replay from %s failed: %s", self.source.replay, error)
        finally:
            socket.close()
