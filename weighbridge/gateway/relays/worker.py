"""A process of the gateway under its supervisor: what the one tells the other, and both ends of that.

It reads JSON lines on standard input (the first one is what it is started with) and writes JSON lines on standard
output. The end of its input means that the supervisor is gone, and then it ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

import msgspec

from weighbridge.children import KeptChild, Patience
from weighbridge.core.errors import ServiceError

log = logging.getLogger("weighbridge.gateway.relays")
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 5.0
STEADY_S = 30.0
READY_TIMEOUT_S = 60.0
KILL_S = 15.0


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a supervisor tells: turn readiness off, drain within seconds, end, take over settings, or that there are
    none to take over because the file is not right. `alive` asks for the word of that name."""

    alive: bool = False
    unready: bool = False
    drain_s: float | None = None
    stop: bool = False
    refused: str | None = None
    settings: msgspec.Raw = msgspec.Raw(b"")


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process tells: that it serves, that it cannot, how a reload went, that one is asked for, that it runs."""

    alive: bool = False
    ready: msgspec.Raw = msgspec.Raw(b"")
    error: str | None = None
    fleet: msgspec.Raw = msgspec.Raw(b"")
    reloaded: list[str] | None = None
    refused: str | None = None
    reload: bool = False


class Worker(KeptChild):
    """One process over all its lives. `first` makes its first line; `said` gets all its words but `ready`, `error` and
    `alive`. One that has answered nothing for `silent_s` seconds is killed, and so started again."""

    def __init__(
        self, name: str, module: str, first: Callable[[], bytes], said: Callable[[Word], None], silent_s: float
    ) -> None:
        super().__init__(name, Patience(READY_TIMEOUT_S, silent_s, FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY_S), log)
        self.ready = b""
        """What it said when it was ready."""
        self._module = module
        self._first = first
        self._said = said

    def tell(self, order: Order) -> None:
        """Gives it an order; one that is not running misses it."""
        process = self.process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def stop(self) -> None:
        """Ends it: by order, and by force if it does not obey."""
        self.tell(Order(stop=True))
        await self.end(KILL_S)

    def command(self) -> tuple[str, ...]:
        """Its module."""
        return (self._module,)

    async def greet(self, process: Process) -> None:
        """Its first line, then what it says until it is ready. Raises ServiceError with its own reason."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._first() + b"\n")
        while line := await process.stdout.readline():
            word = msgspec.json.decode(line, type=Word)
            if word.ready:
                self.ready = bytes(word.ready)
                return
            if word.error is not None:
                raise ServiceError(word.error)
            self._said(word)
        raise ServiceError(f"{self.name} ended with code {await process.wait()} before it was ready")

    def ask(self, process: Process) -> None:
        """By the order that is answered with the word of its name."""
        self.tell(Order(alive=True))

    def heard(self, line: bytes) -> None:
        """A word."""
        word = msgspec.json.decode(line, type=Word)
        if not word.alive:
            self._said(word)


class Heed:
    """The other end, within a worker: reads orders from standard input and says words on standard output."""

    def __init__(self, on_order: Callable[[Order], Any]) -> None:
        self.on_orphaned: Callable[[], object] = lambda: None
        """The supervisor is gone."""
        self._on_order = on_order
        self._parts: list[bytes] = []

    @staticmethod
    def first() -> bytes:
        """The line it was started with; to be read before anything else."""
        line = bytearray()
        while (byte := os.read(0, 1)) not in (b"", b"\n"):  # not a byte of the next line is to be taken
            line += byte
        return bytes(line)

    @staticmethod
    def say(word: Word) -> None:
        """Says one word. A supervisor that is gone hears nothing."""
        with contextlib.suppress(OSError):
            sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
            sys.stdout.buffer.flush()

    def listen(self) -> None:
        """Takes orders from now on."""
        asyncio.get_running_loop().add_reader(0, self._read)

    def _read(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            asyncio.get_running_loop().remove_reader(0)
            self.on_orphaned()
            return
        self._parts.append(data)
        if b"\n" not in data:
            return
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        for line in lines:
            order = msgspec.json.decode(line, type=Order)
            if order.alive:
                self.say(Word(alive=True))
            else:
                self._on_order(order)
