"""A folder for a process's sockets that nobody else may enter, and that is gone when the process is, however it ended.

Who ends well removes its own. What a killed one has left is removed by the next that is made: a lock, which the system
lets go with its process, tells the two apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "weighbridge-serve-"
LOCK = "lock"
UNLOCKED_S = 60.0
"""A folder without a lock may be one that is just being made."""


class PrivateFolder:
    """Made at once, for this user alone (0700); `close` removes it. Raises OSError where none can be made."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        while not self._make():
            continue  # another's sweep came between its folder and its lock

    def _make(self) -> bool:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = self.path / LOCK
        try:
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)  # closed on exec: no child keeps it
        except FileNotFoundError:
            return False
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if lock.exists():
            return True
        os.close(self._lock)
        return False

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(directory: Path) -> None:
    for folder in directory.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
                _remove_if_left(folder, status.st_mtime)


def _remove_if_left(folder: Path, changed_s: float) -> None:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        if time.time() - changed_s > UNLOCKED_S:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return  # its process lives
    finally:
        os.close(lock)
