"""An event log read while it is being written: new whole lines at each call, bounded work, rotation followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from weighbridge.core.errors import LogError
from weighbridge.core.event_log import FORMAT, VERSION, Entry, Header

MOST_BYTES = 4 << 20
"""Read in one call; a writer that is faster for long is caught up with by leaving entries out."""
MOST_BEHIND = 16 << 20

_entry = msgspec.json.Decoder(Entry)
_header = msgspec.json.Decoder(Header)


class LogTail:
    """Follows the file that `read` names; `skipped_bytes` counts what was left out to keep up.

    Without `keep_up` nothing is left out: for a finished log, read until nothing more comes.
    """

    def __init__(self, keep_up: bool = True) -> None:
        self.skipped_bytes = 0
        self._keep_up = keep_up
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._first = True

    def read(self, path: Path) -> Iterator[Header | Entry]:
        """New headers and entries, oldest first; after a rotation the old file's last ones come first.

        Raises OSError when the file cannot be opened, LogError when it is no event log.
        """
        if path != self._path:
            if self._file is not None:
                yield from self._lines()
                self._file.close()
            self._file, self._path, self._rest, self._first = path.open("rb"), path, b"", True
        yield from self._lines()

    def read_all(self, path: Path) -> Iterator[Header | Entry]:
        """Everything that the file holds now, in bounded pieces."""
        more = True
        while more:
            more = False
            for item in self.read(path):
                more = True
                yield item

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self) -> Iterator[Header | Entry]:
        assert self._file is not None
        if self._first:
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(0)
                return
            self._first = False
            yield self._begin(line)
        if self._keep_up:
            self._catch_up()
        *lines, self._rest = (self._rest + self._file.read(MOST_BYTES)).split(b"\n")
        for line in lines:
            if not line:
                continue
            try:
                yield _entry.decode(line)
            except msgspec.MsgspecError as error:
                raise LogError(f"{self._path}: a line is not an event-log entry ({error})") from None

    def _begin(self, line: bytes) -> Header:
        try:
            header = _header.decode(line)
        except msgspec.MsgspecError as error:
            raise LogError(f"{self._path}: line 1 is not an event-log header ({error})") from None
        if header.format != FORMAT or header.version > VERSION:
            raise LogError(f"{self._path}: not an event log that this version reads")
        return header

    def _catch_up(self) -> None:
        """Jump when too much lies ahead; the cut line at the landing place is dropped."""
        assert self._file is not None
        at, end = self._file.tell(), self._file.seek(0, 2)
        self._file.seek(at)
        if end - at <= MOST_BEHIND:
            return
        self._file.seek(end - MOST_BYTES)
        self._file.readline()
        self.skipped_bytes += self._file.tell() - at + len(self._rest)
        self._rest = b""
