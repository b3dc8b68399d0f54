"""The dashboard as a child of `serve`: started beside the gateway, ended with it, and never in its way.

The child holds the other end of a pipe that closes when this process ends, however it ends, and then stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from weighbridge.core.errors import ServiceError

START_S = 30.0
STOP_S = 3.0


class DashboardProcess:
    """`start`, then `stop`. A dashboard that hangs is killed after a few seconds."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, once started."""
        return self._process.pid if self._process else None

    async def start(self, admin_url: str, port: int, token: str = "") -> str:
        """Start it on loopback and return its address. Raises ServiceError with the child's own words."""
        environment = dict(os.environ)
        if token:
            environment["WEIGHBRIDGE_ADMIN_TOKEN"] = token
        command = ["-m", "weighbridge.cli", "dashboard", "--admin", admin_url, "--port", str(port), "--with-parent"]
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = (await process.stdout.readline()).decode("utf-8", "replace").strip()
        except TimeoutError:
            await self.stop()
            raise ServiceError(f"the dashboard did not start within {START_S:.0f} s") from None
        if not line.startswith("Dashboard "):
            await self.stop()
            raise ServiceError(
                f"the dashboard did not start: {line.removeprefix('weighbridge: ') or 'no reason given'}"
            )
        self._drain = asyncio.create_task(_discard(process.stdout))
        return line.split()[-1]

    async def stop(self) -> None:
        """End it and wait until it is gone."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _discard(stream: asyncio.StreamReader) -> None:
    """Read what the child says, so that it can never block on a full pipe."""
    while await stream.read(4096):
        pass
