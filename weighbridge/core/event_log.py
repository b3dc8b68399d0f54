"""The event log: one JSON object per line, first a header, then one entry per call of `Router.handle`.

    {"format":"weighbridge.events","version":1,"router":{...},"source":"gateway"}
    {"t":12.5,"e":{"type":"arrived",...},"a":[{"type":"dispatch",...}]}

Replaying `e` at `t` through a fresh router with the header's settings must give exactly `a`. A last line that
was cut by a crash is dropped and counted; any other bad line is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import msgspec

from weighbridge.core.actions import Action
from weighbridge.core.errors import LogError
from weighbridge.core.events import Event

FORMAT = "weighbridge.events"
VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to build the same router again."""

    format: str = FORMAT
    version: int = VERSION
    source: str = ""
    router: dict[str, Any] = {}
    created: str = ""
    part: int = 1
    """Which file of one run this is; a run's log is rotated into parts 1, 2, 3, ..."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One call of the router: time in seconds on the router's clock, event, actions."""

    t: float
    e: Event
    a: tuple[Action, ...]


_encoder = msgspec.json.Encoder()
_entry_decoder = msgspec.json.Decoder(Entry)


def encode_header(header: Header) -> bytes:
    """One line, newline included."""
    return _encoder.encode(header) + b"\n"


def without_event(line: bytes) -> bytes:
    """A line of which only the actions are left: a bare tick in place of the event, which may be long.

    In a string every quote is escaped, and no event has a list of that name: the first such key is the entry's own.
    """
    return b'{"t":0,"e":{"type":"tick"}' + line[line.index(b',"a":[') :]


def read_entry(line: bytes) -> Entry:
    """What one line says, its newline or not."""
    return _entry_decoder.decode(line)


def encode_entry(now_s: float, event: Event, actions: Iterable[Action]) -> bytes:
    """One line, newline included."""
    return _encoder.encode(Entry(now_s, event, tuple(actions))) + b"\n"


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """One line for each, newline included; one call for many is cheaper than many calls."""
    return _encoder.encode_lines(entries)


class LogReader:
    """Iterate a log's entries. `header` is read at once; `truncated` says whether the last line was cut."""

    def __init__(self, stream: IO[bytes], name: str = "event log") -> None:
        self._stream, self.name = stream, name
        self.truncated = False
        first = stream.readline()
        try:
            self.header = msgspec.json.decode(first, type=Header)
        except msgspec.MsgspecError as error:
            raise LogError(f"{name}: line 1 is not a Weighbridge event-log header ({error})") from None
        if self.header.format != FORMAT:
            raise LogError(f"{name}: line 1: format is {self.header.format!r}, expected {FORMAT!r}")
        if self.header.version > VERSION:
            raise LogError(
                f"{name}: written by a newer version (log version {self.header.version}, this program reads up to "
                f"{VERSION}); upgrade weighbridge to read it"
            )

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def __iter__(self) -> Iterator[Entry]:
        for number, line in enumerate(self._stream, start=2):
            if not line.strip():
                continue
            try:
                yield _entry_decoder.decode(line)
            except msgspec.MsgspecError as error:
                if not line.endswith(b"\n"):
                    self.truncated = True
                    return
                raise LogError(f"{self.name}: line {number}: {error}") from None


class RotatedLog:
    """The files of one run's rotated log, read one after the other. `header` is the first file's.

    Raises:
        LogError: a part is missing; without the first ones nobody knows what the router knew.
    """

    def __init__(self, readers: list[LogReader]) -> None:
        for expected, reader in enumerate(readers, start=1):
            if reader.header.part != expected:
                raise LogError(
                    f"{reader.name}: is part {reader.header.part} of its run where part {expected} was expected; "
                    "name all files of one run from its first on, in order"
                )
        self._readers = readers
        self.header = readers[0].header

    @property
    def truncated(self) -> bool:
        """Whether the last line of a file was cut."""
        return any(reader.truncated for reader in self._readers)

    def __iter__(self) -> Iterator[Entry]:
        for reader in self._readers:
            yield from reader
