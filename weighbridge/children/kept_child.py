"""One child process over all its lives.

It is a Python module that speaks lines on standard output and ends when its standard input does. From time to time it
is asked whether it still runs, and answers with any line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass

from weighbridge.core.errors import ModelError, ServiceError

MOST_LINE_BYTES = 64 * 1024 * 1024
LOOKS = 5
"""Of so many questions in a row whether it still runs, one must be answered. Questions are counted, not seconds: a
parent that was itself stopped for a while does not take its own silence for another's."""


@dataclass(slots=True)
class Patience:
    """Seconds: until it must be ready, how long it may answer nothing, the pauses before it is started again (doubling
    from `first_s` to `most_s`), and how long a life ends a run of bad luck."""

    ready_s: float
    silent_s: float
    first_s: float
    most_s: float
    steady_s: float


class KeptChild:
    """`start` it, then `stop` it; in between it is kept running. What a kind of child has of its own are the methods
    `command`, `greet`, `ask`, `heard` and `lost`."""

    def __init__(self, name: str, patience: Patience, log: logging.Logger) -> None:
        self.name = name
        self.patience = patience
        self.process: Process | None = None
        self._log = log
        self._reader: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ending = False
        self._stopping = False
        self._unanswered = 0

    # what differs

    def command(self) -> tuple[str, ...]:
        """Module and arguments."""
        raise NotImplementedError

    async def greet(self, process: Process) -> None:
        """Gives a new process what it needs and returns once it is ready. Raises WeighbridgeError with its reason."""
        raise NotImplementedError

    def ask(self, process: Process) -> None:
        """Asks whether it still runs."""
        raise NotImplementedError

    def heard(self, line: bytes) -> None:
        """A line that came after it was ready."""

    def lost(self) -> None:
        """It has ended unasked; it will be started again."""

    # what does not

    @property
    def pid(self) -> int:
        """Process id, 0 while none runs."""
        process = self.process
        return process.pid if process is not None and process.returncode is None else 0

    async def start(self) -> None:
        """Starts it and waits until it is ready. Raises what `greet` raises, TimeoutError and OSError."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep())

    def expect_end(self) -> None:
        """It will end by itself and is not started again."""
        self._ending = True

    async def wait(self) -> None:
        """Waits until it has ended."""
        if self.process is not None:
            await self.process.wait()

    async def end(self, bound_s: float) -> None:
        """It was told to end: waits for that, and kills it after `bound_s`."""
        self._ending = self._stopping = True
        process = self.process
        if self._keeper is not None and not self.pid:
            self._keeper.cancel()  # between two lives
        if process is not None and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), bound_s)
            except TimeoutError:
                self._log.error("%s does not end; it is killed", self.name)
                process.kill()
                await process.wait()
        for task in (self._keeper, self._reader):
            if task is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _launch(self) -> None:
        command = (sys.executable, "-m", *self.command())
        process = self.process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=MOST_LINE_BYTES
        )
        try:
            await asyncio.wait_for(self.greet(process), self.patience.ready_s)
        except BaseException:
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise
        self._unanswered = 0
        self._reader = asyncio.create_task(self._read(process))

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._unanswered = 0
            try:
                self.heard(line)
            except Exception:  # what one child says must not end the supervision of the others
                self._log.exception("%s said what cannot be read", self.name)

    async def _outlive(self, process: Process) -> int:
        """Its exit code, once it has ended, or was ended because it stood still."""
        ended = asyncio.ensure_future(process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=self.patience.silent_s / LOOKS))[0]:
                if self._stopping:
                    break  # it closes its files now, and has its own bound for that
                if self._unanswered >= LOOKS:
                    self._log.error("%s has not answered for %.1f s; it is killed", self.name, self.patience.silent_s)
                    process.kill()
                    break
                self._unanswered += 1
                self.ask(process)
            return await ended
        finally:
            ended.cancel()

    async def _keep(self) -> None:
        pause_s = self.patience.first_s
        while True:
            assert self.process is not None
            begun = time.monotonic()
            code = await self._outlive(self.process)
            if self._ending:
                return
            self.lost()
            self._log.error("%s ended with code %s; it is started again", self.name, code)
            if time.monotonic() - begun > self.patience.steady_s:
                pause_s = self.patience.first_s
            while not self._ending:
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, self.patience.most_s)
                try:
                    await self._launch()
                    break
                except (ModelError, ServiceError, TimeoutError, OSError) as error:
                    self._log.error("%s did not start: %s", self.name, error)
