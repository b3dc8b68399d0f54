"""The event log on disk: lines are handed over in batches to one thread, so that the data plane never waits for it.

What the thread has not written yet is bounded; beyond the bound entries are dropped and counted (`dropped`, exported
as a metric), and a log that lacks entries does not replay. A log is rotated at a size, each file's header says which
part of the run it is, and the oldest files are deleted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from pathlib import Path
from typing import IO, Protocol

import msgspec

from weighbridge.core.event_log import Entry, Header, encode_entries, encode_header, without_event

log = logging.getLogger("weighbridge.gateway")
MAX_PENDING_BYTES = 64 * 1024 * 1024
MOST_SHARED = 16 * 1024  # bytes for each of those who keep them
BATCH = 32  # entries encoded in one call: the event loop stands still for about 50 us


class Keeper(Protocol):
    """Who keeps an entry as it stands in the log."""

    def stands_in(self, lines: bytes, number: int) -> None:
        """It is line `number`, from 0, of `lines`."""


class LogWriter:
    """Appends lines to `DIR/PREFIX-NNNNNN.jsonl`; each file begins with the header line."""

    def __init__(
        self,
        directory: Path,
        header: Header | None,
        *,
        max_bytes: int,
        max_files: int,
        prefix: str = "events",
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        """Creates the directory and the first file; without `header` that is empty. Raises OSError."""
        self._max_pending_bytes = max_pending_bytes
        self._prefix = prefix
        self._directory = directory
        self._header = header
        self._part = 0
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._entries: list[Entry] = []  # not encoded yet
        self._keepers: list[tuple[Keeper, int]] = []  # and which of them is whose
        self._lines: list[bytes] = []
        self._size = 0
        self._pending = 0  # bytes handed over and not yet written
        self._lock = threading.Lock()
        self.dropped = 0
        self.error: OSError | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._number = max((_number(p) for p in directory.glob(f"{prefix}-*.jsonl")), default=0)
        self._file: IO[bytes]
        self._written = 0
        self._open()
        self._queue: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name=f"{prefix}-log", daemon=True)
        self._worker.start()

    @property
    def path(self) -> Path:
        """The file being written."""
        return self._file_of(self._number)

    def _file_of(self, number: int) -> Path:
        return self._directory / f"{self._prefix}-{number:06d}.jsonl"

    def append(self, line: bytes) -> None:
        """Takes one line; never blocks."""
        self._encode()
        self._lines.append(line)
        self._size += len(line)

    def keep(self, keeper: Keeper) -> None:
        """The entry that is recorded next is of use to `keeper` once it is encoded."""
        self._keepers.append((keeper, len(self._entries)))

    def record(self, entry: Entry) -> None:
        """Takes one entry, to be encoded together with others; never blocks. It must not change any more."""
        self._entries.append(entry)
        if len(self._entries) >= BATCH:
            self._encode()

    def _encode(self) -> None:
        if self._entries:
            lines = encode_entries(self._entries)
            self._entries.clear()
            self._lines.append(lines)
            self._size += len(lines)
            if self._keepers:
                self._hand_over(lines)

    def _hand_over(self, lines: bytes) -> None:
        """Gives all keepers what they share, or where that would keep much else in memory each its own line, and of
        that no more than the actions: prompts of a hundred thousand tokens have a thousand hashes."""
        keepers, self._keepers = self._keepers, []
        if len(lines) <= MOST_SHARED * len(keepers):
            for keeper, number in keepers:
                keeper.stands_in(lines, number)
            return
        each = lines.split(b"\n")
        for keeper, number in keepers:
            keeper.stands_in(without_event(each[number]), 0)

    def flush(self) -> None:
        """Hands over what was appended; call it a few times a second. Never blocks."""
        self._encode()
        if not self._lines:
            return
        lines, size = self._lines, self._size
        self._lines, self._size = [], 0
        with self._lock:
            if self._pending + size > self._max_pending_bytes:
                self.dropped += sum(line.count(b"\n") for line in lines)
                return
            self._pending += size
        self._queue.put(b"".join(lines))

    def sync(self, timeout_s: float = 5.0) -> bool:
        """Waits until all that was appended is in the file; for tests and the end."""
        self.flush()
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def close(self) -> None:
        """Writes the rest and ends the thread."""
        self.flush()
        self._queue.put(None)
        self._worker.join(10.0)
        with contextlib.suppress(OSError):  # counted already
            self._file.close()

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                if self._written >= self._max_bytes:
                    self._rotate()
            except OSError as error:  # the old file still takes lines; the next batch tries again
                self._failed(error)
            try:
                self._file.write(item)
                self._file.flush()
                self._written += len(item)
            except OSError as error:  # a full disk must not stop the gateway
                self._failed(error)
                self.dropped += item.count(b"\n")
            with self._lock:
                self._pending -= len(item)

    def _failed(self, error: OSError) -> None:
        if self.error is None:  # said once
            log.warning("the %s log in %s cannot be written: %s", self._prefix, self._directory, error.strerror)
        self.error = error

    def _open(self) -> None:
        """The next file, with its header. Raises OSError; all is as before then."""
        number, part = self._number + 1, self._part + 1
        header = self._header
        line = b"" if header is None else encode_header(msgspec.structs.replace(header, part=part))
        path = self._file_of(number)
        file = path.open("wb")
        try:
            file.write(line)
            file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)
            raise
        self._number, self._part, self._file, self._written = number, part, file, len(line)

    def _rotate(self) -> None:
        old = self._file
        self._open()
        with contextlib.suppress(OSError):  # what it could not write before, it cannot now
            old.close()
        files = sorted(self._directory.glob(f"{self._prefix}-*.jsonl"), key=_number)
        for path in files[: -self._max_files]:
            path.unlink(missing_ok=True)


def _number(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0
