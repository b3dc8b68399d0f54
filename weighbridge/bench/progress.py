"""A progress line on standard error while a run lasts; nothing where that is not a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weighbridge.bench.workers import Progress as Callback


@contextmanager
def progress(total: int, seconds: float, *, quiet: bool = False) -> Iterator[Callback | None]:
    """Yields the callback for `run_load`, or None when nothing is to be shown."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} ended"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        task = bars.add_task(f"arrivals over {seconds:.0f} s", total=total)

        def show(sent: int, running: int, ended: int) -> None:
            bars.update(task, completed=ended, description=f"{sent} sent, {running} running")

        yield show
