"""How results leave: folders, files that may fail, a status line, JSON or a table."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from weighbridge.bench.report import encode


def folder_of(out: Path | None) -> Path:
    """The folder asked for, or a new temporary one."""
    return out or Path(tempfile.mkdtemp(prefix="weighbridge-bench-"))


def write(path: Path, data: bytes) -> None:
    """Write a file; a failure is told on standard error, for the figures must still be printed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        print(f"weighbridge: cannot write {path}: {error.strerror or error}", file=sys.stderr)


@contextmanager
def saying(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A status line on standard error, or nothing where that is not a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield status.update


def deliver(
    found: dict[str, Any], path: Path | None, show: Callable[[dict[str, Any], Any], None], *, as_json: bool
) -> None:
    """Archive as JSON where a path is given; print as JSON or by `show`."""
    data = encode(found)
    if path is not None:
        write(path, data)
    if as_json:
        sys.stdout.write(data.decode())
        return
    console = Console(highlight=False)
    show(found, console)
    if path is not None:
        console.print(f"file     {path}", soft_wrap=True, style="dim")
