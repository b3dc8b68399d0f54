"""Gateways started for a comparison: the same configuration under one policy after another."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from weighbridge.core.errors import ServiceError

STOP_S = 30.0


@contextmanager
def gateway(config: Path | None, policy: str) -> Iterator[str]:
    """`weighbridge serve` with this policy on a free port; yields its URL. Raises `ServiceError`.

    A fresh gateway has an empty ledger, prefix index and length estimator; remote engines keep what they cache, which
    is why every run has texts of its own.
    """
    command = [sys.executable, "-m", "weighbridge.cli", "serve", "--json", "--policy", policy]
    command += ["--port", "0", "--admin-port", "0"]
    if config is not None:
        command += ["--config", str(config)]
    with tempfile.TemporaryDirectory(prefix="weighbridge-compare-") as folder, tempfile.TemporaryFile() as errors:
        command += ["--data-dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)  # noqa: S603 - our own command
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield _address(line, policy, errors)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _address(line: bytes, policy: str, errors: IO[bytes]) -> str:
    try:
        ready = msgspec.json.decode(line)
        return str(ready["url"])
    except (msgspec.DecodeError, KeyError, TypeError):
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else "it ended without a word"
        raise ServiceError(f"the gateway with policy {policy} did not start: {why}") from None
