"""A supervised process: started, told things, restarted with back-off when it dies or stands still, ended.

It reads JSON lines on standard input (the first one is what it is started with) and writes JSON lines on standard
output. The end of its input means that the supervisor is gone, and then it ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from weighbridge.core.errors import ServiceError

log = logging.getLogger("weighbridge.gateway.relays")
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 5.0
STEADY_S = 30.0
READY_TIMEOUT_S = 60.0
KILL_S = 15.0
LOOKS = 5
"""Of so many questions in a row whether it still runs, one must be answered. Questions are counted, not seconds: a
supervisor that was itself stopped for a while does not take its own silence for another's."""


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


class Worker:
    """One process over all its lives. `first` makes its first line; `heard` gets all its words but `ready`, `error` and
    `alive`. One that has answered nothing for `patience_s` seconds is killed, and so started again."""

    def __init__(
        self, name: str, module: str, first: Callable[[], bytes], heard: Callable[[Word], None], patience_s: float
    ) -> None:
        self.name = name
        self.patience_s = patience_s
        self.ready = b""
        """What it said when it was ready."""
        self._module = module
        self._first = first
        self._heard = heard
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ending = False
        self._stopping = False
        self._unanswered = 0

    @property
    def pid(self) -> int:
        """Process id, 0 while none runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    async def start(self) -> None:
        """Starts it and waits until it is ready. Raises ServiceError with its own reason."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep())

    def tell(self, order: Order) -> None:
        """Gives it an order; one that is not running misses it."""
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(msgspec.json.encode(order) + b"\n")

    def expect_end(self) -> None:
        """It will end on order and is not started again."""
        self._ending = True

    async def wait(self) -> None:
        """Waits until it has ended."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """Ends it: by order, and by force if it does not obey."""
        self._ending = self._stopping = True
        process = self._process
        if self._keeper is not None and not self.pid:
            self._keeper.cancel()  # between two lives
        if process is not None and process.returncode is None:
            self.tell(Order(stop=True))
            try:
                await asyncio.wait_for(process.wait(), KILL_S)
            except TimeoutError:
                log.error("%s does not end; it is killed", self.name)
                process.kill()
                await process.wait()
        for task in (self._keeper, self._reader):
            if task is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _launch(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 * 1024 * 1024,
        )
        assert process.stdin is not None
        process.stdin.write(self._first() + b"\n")
        try:
            self.ready = await asyncio.wait_for(self._wait_ready(process), READY_TIMEOUT_S)
        except BaseException:
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise
        self._unanswered = 0
        self._reader = asyncio.create_task(self._read(process))

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            word = msgspec.json.decode(line, type=Word)
            if word.ready:
                return bytes(word.ready)
            if word.error is not None:
                raise ServiceError(word.error)
            self._heard(word)
        raise ServiceError(f"{self.name} ended with code {await process.wait()} before it was ready")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._unanswered = 0
            try:
                word = msgspec.json.decode(line, type=Word)
                if not word.alive:
                    self._heard(word)
            except Exception:  # what one process says must not end the supervision of the others
                log.exception("%s said what cannot be read", self.name)

    async def _outlive(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code, once it has ended, or was ended because it stood still."""
        ended = asyncio.ensure_future(process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=self.patience_s / LOOKS))[0]:
                if self._stopping:
                    break  # it closes its files now, and has its own bound for that
                if self._unanswered >= LOOKS:
                    log.error("%s has not answered for %.1f s; it is killed", self.name, self.patience_s)
                    process.kill()
                    break
                self._unanswered += 1
                self.tell(Order(alive=True))
            return await ended
        finally:
            ended.cancel()

    async def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            assert self._process is not None
            begun = time.monotonic()
            code = await self._outlive(self._process)
            if self._ending:
                return
            log.error("%s ended with code %s; it is started again", self.name, code)
            if time.monotonic() - begun > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            while not self._ending:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2.0 * backoff_s, MAX_BACKOFF_S)
                try:
                    await self._launch()
                    break
                except (ServiceError, TimeoutError, OSError) as error:
                    log.error("%s did not start: %s", self.name, error)


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
