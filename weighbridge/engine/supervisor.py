"""Embedded instances as child processes: started, watched, restarted with back-off when they die or stand still,
drained, never left behind.

An instance keeps its port over restarts, so whoever routes to it needs no news of them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Callable

import msgspec

from weighbridge.children import KeptChild, Patience
from weighbridge.core.errors import ModelError, ServiceError
from weighbridge.engine.instance import InstanceOptions, ReadyInfo

log = logging.getLogger("weighbridge.engine")
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 15.0
STEADY_S = 60.0
READY_TIMEOUT_S = 300.0
SILENT_S = 60.0
"""A process that has answered nothing for so long is killed: what it computes is not what makes its event loop wait."""

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
            await asyncio.gather(*(child.start() for child in self._children))
            return [info for child in self._children for info in child.infos]
        except BaseException:
            await self.stop(0.0)
            raise

    async def stop(self, drain_s: float = 30.0) -> None:
        """End all: SIGTERM, `drain_s` for what runs, then SIGKILL."""
        await asyncio.gather(*(child.stop(drain_s) for child in self._children))

    def pids(self) -> dict[str, int]:
        """The process id of each instance that runs now."""
        return {options.name: child.pid for child in self._children if child.pid for options in child.group}


class _Child(KeptChild):
    """One process with one or more instances."""

    def __init__(self, group: list[InstanceOptions], on_state: OnState, on_progress: OnProgress) -> None:
        patience = Patience(READY_TIMEOUT_S, SILENT_S, FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY_S)
        super().__init__("instance " + " and ".join(options.name for options in group), patience, log)
        self.group = group
        self.infos: list[ReadyInfo] = []
        self._on_state = on_state
        self._on_progress = on_progress

    async def stop(self, drain_s: float) -> None:
        """SIGTERM and time to drain, or SIGKILL."""
        if self.process is not None and self.pid:
            self.process.send_signal(signal.SIGTERM if drain_s > 0 else signal.SIGKILL)
        await self.end(drain_s + 5.0)

    def command(self) -> tuple[str, ...]:
        """The child's module with its options."""
        return ("weighbridge.engine.child", msgspec.json.encode(self.group).decode())

    async def greet(self, process: Process) -> None:
        """Waits for its word that it is ready; raises its reason where it cannot be."""
        assert process.stdout is not None
        self.infos = []
        while line := await process.stdout.readline():
            message = msgspec.json.decode(line, type=_Message)
            name = self.group[len(self.infos)].name
            if message.ready is not None:
                self.infos.append(message.ready)
                if len(self.infos) == len(self.group):
                    break
            elif message.error is not None:
                raise ModelError(f"instance {name}: {message.error}")
            else:
                self._on_progress(name, message.progress or 0.0)
        else:
            raise ServiceError(f"{self.name} ended with code {await process.wait()} before it was ready")
        for info in self.infos:
            self._on_state(info.name, True, info)

    def ask(self, process: Process) -> None:
        """By any line."""
        assert process.stdin is not None
        process.stdin.write(b"alive\n")

    def lost(self) -> None:
        """None of its instances is up."""
        for options in self.group:
            self._on_state(options.name, False, None)


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
