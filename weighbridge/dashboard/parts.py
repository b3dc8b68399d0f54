"""Puts a dashboard together from what its command was told: source, logs, reports, and the demo's temporary folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weighbridge.core.errors import ConfigError
from weighbridge.dashboard.app import Dashboard
from weighbridge.dashboard.demo import DemoSource
from weighbridge.dashboard.guard import Guard
from weighbridge.dashboard.hub import Hub, Source
from weighbridge.dashboard.jobs import Jobs
from weighbridge.dashboard.live import AdminSource, LogSource
from weighbridge.dashboard.reports import Library


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything but the event loop's own objects, which must be made inside it."""

    source: Source
    logs: tuple[Path, ...] = ()
    reports: tuple[Path, ...] = ()

    def dashboard(self, guard: Guard) -> Dashboard:
        """The dashboard."""
        return Dashboard(Hub(self.source), guard, Jobs(self.logs), Library(self.reports))


def source_of(admin: str | None, token: str, logs: Sequence[Path], demo_seed: int | None) -> Source:
    """The source that the options name. Raises ConfigError."""
    if demo_seed is not None:
        return DemoSource(demo_seed)
    if admin is not None:
        if not admin.startswith(("http://", "https://")):
            raise ConfigError(f"'{admin}' is no address; write http://HOST:PORT", source="--admin")
        return AdminSource(admin, token)
    return LogSource(logs[0])


@contextlib.contextmanager
def build(
    *, admin: str | None, token: str, logs: Sequence[Path], reports: Sequence[Path], demo_seed: int | None
) -> Iterator[Parts]:
    """Parts for one run; what the demo made is removed afterwards."""
    source = source_of(admin, token, logs, demo_seed)
    if demo_seed is None:
        yield Parts(source, tuple(logs), tuple(reports))
        return
    with tempfile.TemporaryDirectory(prefix="weighbridge-demo-") as folder:
        path = Path(folder) / "yesterday.jsonl"
        writer = subprocess.Popen(  # noqa: S603 - our own module, no outside text
            [sys.executable, "-m", "weighbridge.dashboard.demo_log", str(path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield Parts(source, (*logs, path), (*reports, Path(folder)))
        finally:
            writer.kill()
            writer.wait()
