"""A progress bar on standard error; nothing at all where that is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Bar:
    """Context manager; `shown` says whether anybody sees it."""

    def __init__(self, what: str, total: int) -> None:
        self.shown = sys.stderr.isatty()
        self._what, self._total = what, total
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if self.shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on_arrival(self, number: int, now_s: float) -> None:
        """A simulated request arrived."""
        if self._progress is not None and number % 200 == 0:
            self._progress.update(self._task, completed=number)

    def on_done(self, done: int, total: int) -> None:
        """One of several runs is done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)
