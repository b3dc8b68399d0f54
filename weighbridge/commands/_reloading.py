"""Reloading the configuration file of a running `serve`: on SIGHUP, on `POST /reload`, or when the file changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from weighbridge.core.errors import WeighbridgeError

Stamp = tuple[int, int, int]


class Reloading:
    """Runs `apply` and tells the outcome in one line; a file that cannot be used changes nothing."""

    def __init__(self, apply: Callable[[], Awaitable[list[str]]], tell: Callable[[str], None]) -> None:
        self._apply = apply
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self) -> None:
        """Reload soon; for signal handlers."""
        self._keep(asyncio.get_running_loop().create_task(self.run()))

    def watch(self, path: Path, known: Stamp | None, every_s: float) -> None:
        """Reload whenever the file is not as it was when it was read, its stamp `known`."""
        self._keep(asyncio.get_running_loop().create_task(self._watch(path, known, every_s)))

    async def run(self) -> None:
        """Reload now."""
        try:
            words = await self._apply()
        except WeighbridgeError as error:
            self._tell(f"not reloaded, the old settings stay: {error}")
        else:
            self._tell(f"reloaded: {', '.join(words) or 'nothing has changed'}")

    def stop(self) -> None:
        """No more reloads."""
        for task in self._tasks:
            task.cancel()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, path: Path, known: Stamp | None, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            seen = stamp(path)
            if seen is not None and seen != known:  # absent: being replaced, or a mistake; look again
                known = seen
                await self.run()


def stamp(path: Path) -> Stamp | None:
    """What tells one state of a file from another, or None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - follows the symbolic links that orchestrators swap
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
