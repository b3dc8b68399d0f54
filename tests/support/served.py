"""A real `weighbridge serve` in a child process, for tests that need the whole product."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 90.0


class Served:
    """A running gateway: `url` and `admin` are base addresses, `instances` what the ready line said of each."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], data_dir: Path) -> None:
        self.process = process
        self.ready = ready
        self.url: str = ready["url"]
        self.admin: str = ready["admin"]
        self.instances: list[dict[str, Any]] = ready["instances"]
        self.data_dir = data_dir

    def get(self, path: str, *, admin: bool = True) -> Any:
        """GET as JSON (or text where it is not JSON)."""
        with urllib.request.urlopen((self.admin if admin else self.url) + path, timeout=10) as reply:
            body = reply.read().decode()
        try:
            return json.loads(body)
        except ValueError:
            return body

    def fleet(self) -> dict[str, dict[str, Any]]:
        """The admin API's instances by name."""
        return {instance["name"]: instance for instance in self.get("/fleet")["instances"]}

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, dict[str, Any]]:
        """Wait until the gateway counts nothing in flight, then return the fleet."""
        deadline = time.monotonic() + timeout_s
        while True:
            fleet = self.fleet()
            if all(i["in_flight"] == 0 for i in fleet.values()):
                return fleet
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle after {timeout_s} s: {fleet}")
            time.sleep(0.05)

    def logs(self) -> list[Path]:
        """Event log files, oldest first."""
        return sorted(self.data_dir.glob("events/events-*.jsonl"))

    def stop(self) -> int:
        """Ctrl-C; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


def engine_gauge(url: str, name: str) -> float:
    """Value of a gauge on an engine's `/metrics`."""
    with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith((name + " ", name + "{")):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{url}/metrics has no {name}")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serve(data_dir: Path, *arguments: str) -> Iterator[Served]:
    """Start `weighbridge serve --json` on free ports, wait until it is ready, and stop it at the end."""
    command = [sys.executable, "-m", "weighbridge.cli", "serve", "--json", "--port", "0", "--admin-port", "0"]
    if "--dashboard" not in arguments:
        command.append("--no-dashboard")
    errors = (data_dir / "stderr.txt").open("w")
    process = subprocess.Popen(
        [*command, "--data-dir", str(data_dir), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    watchdog = time.monotonic() + READY_TIMEOUT_S
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line and time.monotonic() < watchdog, (data_dir / "stderr.txt").read_text()
        yield Served(process, json.loads(line), data_dir)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout and process.stdout.close()
        errors.close()
