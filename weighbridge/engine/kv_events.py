"""KV cache events in vLLM's format over ZeroMQ: which blocks of tokens this instance holds, as they come and go.

A PUB socket sends `[topic, sequence number (8 bytes, big-endian), msgpack batch]`; a ROUTER socket replays from a
number on. A batch is `[timestamp, [event, ...], None]`, an event a map with `type` BlockStored, BlockRemoved or
AllBlocksCleared. A block held by several slots or copies is stored once and removed when the last one goes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import zmq

from weighbridge.core.errors import ServiceError

REPLAY_BATCHES = 10_000
_POLL_MS = 20
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class KvEventSettings:
    """Endpoints to bind; `replay` None offers no replay."""

    endpoint: str
    replay: str | None = None
    topic: str = "kv-events"
    block_tokens: int = 16


class BlockLedger:
    """Turns what holders hold into block events. Hashes are chained, 63 bits, and the namespace begins the chain."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._held: dict[Hashable, list[int]] = {}
        self._count: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._count)

    def change(self, holder: Hashable, tokens: Sequence[int], namespace: str = "") -> list[dict[str, Any]]:
        """The holder holds exactly these tokens now (none: it is gone); returns the events that follow."""
        old = self._held.pop(holder, [])
        new = self._hashes(tokens, namespace)
        if new:
            self._held[holder] = new
        stored = [at for at, value in enumerate(new) if not self._count[value]]
        self._count.update(new)
        self._count.subtract(old)
        gone = [value for value in old if self._count[value] == 0]
        for value in gone:
            del self._count[value]
        events: list[dict[str, Any]] = []
        if stored:  # a chain: once a block is new, all after it are
            events.append(self._stored(new, stored[0], tokens, namespace))
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone[::-1], "medium": "CPU"})
        return events

    def _stored(self, hashes: list[int], first: int, tokens: Sequence[int], namespace: str) -> dict[str, Any]:
        size = self.block_tokens
        extras: list[list[str] | None] = [None] * (len(hashes) - first)
        if namespace and first == 0:
            extras[0] = [namespace]
        return {
            "type": "BlockStored",
            "block_hashes": hashes[first:],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": list(tokens[first * size : len(hashes) * size]),
            "block_size": size,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
            "extra_keys": extras,
        }

    def _hashes(self, tokens: Sequence[int], namespace: str) -> list[int]:
        size = self.block_tokens
        parent = namespace.encode()
        hashes = []
        for at in range(0, len(tokens) // size * size, size):
            block = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + size])
            parent = blake2b(parent + block, digest_size=8).digest()
            hashes.append(int.from_bytes(parent, "big") >> 1)
        return hashes


class KvEventPublisher:
    """Publishes from a thread of its own; `change` is called by the engine's thread and never blocks."""

    def __init__(self, settings: KvEventSettings) -> None:
        """Binds both sockets. Raises ServiceError where an endpoint is taken."""
        self.settings = settings
        self._ledger = BlockLedger(settings.block_tokens)
        self._queue: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(100_000)
        self._router = self._context.socket(zmq.ROUTER) if settings.replay else None
        try:
            self._pub.bind(settings.endpoint)
            if self._router is not None and settings.replay:
                self._router.bind(settings.replay)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ServiceError(f"KV events cannot listen on {settings.endpoint}: {error}") from None
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT) if self._router is not None else None
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def change(self, holder: Hashable, tokens: Sequence[int], namespace: str) -> None:
        """Say what a slot or copy holds now."""
        events = self._ledger.change(holder, tokens, namespace)
        if events:
            self._queue.put(events)

    def close(self) -> None:
        """Send what is left, then close."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            if self._router is not None:
                while self._router.poll(0):
                    self._replay()
            try:
                events = self._queue.get(timeout=_POLL_MS / 1000)
            except queue.Empty:
                continue
            if events is None:
                break
            payload = msgspec.msgpack.encode([time.time(), events, None])
            self._kept.append((self._sequence, payload))
            number = self._sequence.to_bytes(8, "big")
            self._pub.send_multipart([self.settings.topic.encode(), number, payload])
            self._sequence += 1
        self._close_sockets()

    def _replay(self) -> None:
        """Answer one request for all batches from a number on, ended by number -1 with no payload."""
        assert self._router is not None
        frames = self._router.recv_multipart()
        client, start = frames[0], int.from_bytes(frames[-1], "big")
        delimiter = frames[1:-1]
        for number, payload in self._kept:
            if number >= start:
                self._router.send_multipart([client, *delimiter, number.to_bytes(8, "big"), payload])
        self._router.send_multipart([client, *delimiter, _END, b""])

    def _close_sockets(self) -> None:
        self._pub.close(linger=200)
        if self._router is not None:
            self._router.close(linger=200)
        self._context.term()
