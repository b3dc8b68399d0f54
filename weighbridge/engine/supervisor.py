"""Embedded instances as child processes: started, watched, restarted with back-off, drained, never left behind.

An instance keeps its port over restarts, so whoever routes to it needs no news of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from weighbridge.core.errors import ModelError, ServiceError
from weighbridge.engine.instance import InstanceOptions, ReadyInfo

log = logging.getLogger("weighbridge.engine")
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 15.0
STEADY_S = 60.0
READY_TIMEOUT_S = 300.0

OnState = Callable[[str, bool, ReadyInfo | None], None]
OnProgress = Callable[[str, float], None]


class _Message(msgspec.Struct):
    progress: float | None = None
    ready: ReadyInfo | None = None
    error: str | None = None


class Supervisor:
    """Runs one child per instance, or one for all with `one_process`, which then share weights and live and die
    together. `on_state(name, up, info)` tells when an instance becomes ready or is lost."""

    def __init__(
        self,
        instances: list[InstanceOptions],
        on_state: OnState | None = None,
        on_progress: OnProgress | None = None,
        *,
        one_process: bool = False,
    ) -> None:
        ported = [_with_port(options) for options in instances]
        groups = [ported] if one_process else [[options] for options in ported]
        self._children = [_Child(group, on_state or _ignore_state, on_progress or _ignore_progress) for group in groups]

    async def start(self) -> list[ReadyInfo]:
        """Start all and wait until all are ready.

        Raises:
            ModelError: an instance cannot start; its own reason. All others are stopped before.
        """
        try:
            started = await asyncio.gather(*(child.start() for child in self._children))
            return [info for group in started for info in group]
        except BaseException:
            await self.stop(0.0)
            raise

    async def stop(self, drain_s: float = 30.0) -> None:
        """End all: SIGTERM, `drain_s` for what runs, then SIGKILL."""
        await asyncio.gather(*(child.stop(drain_s) for child in self._children))

    def pids(self) -> dict[str, int]:
        """The process id of each instance that runs now."""
        return {options.name: child.pid for child in self._children if child.pid for options in child.group}


class _Child:
    """One process over all its restarts."""

    def __init__(self, group: list[InstanceOptions], on_state: OnState, on_progress: OnProgress) -> None:
        self.group = group
        self.name = " and ".join(options.name for options in group)
        self._on_state = on_state
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """Process id, 0 while none runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else 0

    async def start(self) -> list[ReadyInfo]:
        infos = await self._launch()
        self._watch = asyncio.create_task(self._keep())
        return infos

    async def stop(self, drain_s: float) -> None:
        self._stopping = True
        process = self._process
        if self._watch is not None and not self.pid:
            self._watch.cancel()  # between two starts
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM if drain_s > 0 else signal.SIGKILL)
            try:
                await asyncio.wait_for(process.wait(), drain_s + 5.0)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._watch is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    async def _launch(self) -> list[ReadyInfo]:
        """Start the process and wait for its word that it is ready; raises its reason where it cannot be."""
        encoded = msgspec.json.encode(self.group).decode()
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "weighbridge.engine.child",
            encoded,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            infos = await asyncio.wait_for(self._wait_ready(process), READY_TIMEOUT_S)
        except BaseException:
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise
        for info in infos:
            self._on_state(info.name, True, info)
        return infos

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> list[ReadyInfo]:
        assert process.stdout is not None
        ready: list[ReadyInfo] = []
        while line := await process.stdout.readline():
            message = msgspec.json.decode(line, type=_Message)
            name = self.group[len(ready)].name
            if message.ready is not None:
                ready.append(message.ready)
                if len(ready) == len(self.group):
                    return ready
            elif message.error is not None:
                raise ModelError(f"instance {name}: {message.error}")
            else:
                self._on_progress(name, message.progress or 0.0)
        code = await process.wait()
        raise ServiceError(f"instance {self.name} ended with code {code} before it was ready")

    async def _keep(self) -> None:
        """Restart the process whenever it ends without being asked to."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            assert self._process is not None
            begun = time.monotonic()
            code = await self._process.wait()
            if self._stopping:
                return
            for options in self.group:
                self._on_state(options.name, False, None)
            log.error("instance %s ended with code %s; it is started again", self.name, code)
            if time.monotonic() - begun > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            while not self._stopping:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2.0 * backoff_s, MAX_BACKOFF_S)
                try:
                    await self._launch()
                    break
                except (ModelError, ServiceError, TimeoutError, OSError) as error:
                    log.error("instance %s did not start: %s", self.name, error)


def _with_port(options: InstanceOptions) -> InstanceOptions:
    """Choose a free port now where none was given, so that restarts keep it."""
    if options.port:
        return options
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as probe:
        probe.bind((options.host, 0))
        return msgspec.structs.replace(options, port=probe.getsockname()[1])


def _ignore_state(name: str, up: bool, info: ReadyInfo | None) -> None:
    """Nobody listens."""


def _ignore_progress(name: str, fraction: float) -> None:
    """Nobody listens."""
