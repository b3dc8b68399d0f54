"""An event log read while it grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.core.errors import LogError
from weighbridge.core.event_log import Entry, Header, encode_entry, encode_header
from weighbridge.core.events import Tick
from weighbridge.dashboard import log_tail
from weighbridge.dashboard.log_tail import LogTail


@pytest.fixture
def tail() -> Iterator[LogTail]:
    made = LogTail()
    yield made
    made.close()


def lines(first: int, count: int) -> bytes:
    return b"".join(encode_entry(float(k), Tick(), ()) for k in range(first, first + count))


def times(tail: LogTail, path: Path) -> list[float]:
    return [item.t for item in tail.read(path) if isinstance(item, Entry)]


def test_only_whole_lines_and_each_once(tmp_path: Path, tail: LogTail) -> None:
    path = tmp_path / "a"
    path.write_bytes(encode_header(Header(source="x"))[:-5])
    assert list(tail.read(path)) == []
    path.write_bytes(encode_header(Header(source="x")))
    assert [type(item) for item in tail.read(path)] == [Header]
    with path.open("ab") as stream:
        stream.write(lines(0, 3) + lines(3, 1)[:7])
        stream.flush()
        assert times(tail, path) == [0.0, 1.0, 2.0]
        assert times(tail, path) == []
        stream.write(lines(3, 1)[7:] + lines(4, 1))
        stream.flush()
        assert times(tail, path) == [3.0, 4.0]


def test_a_rotation_is_followed_without_a_loss(tmp_path: Path, tail: LogTail) -> None:
    old, new = tmp_path / "a", tmp_path / "b"
    old.write_bytes(encode_header(Header()) + lines(0, 2))
    assert times(tail, old) == [0.0, 1.0]
    with old.open("ab") as stream:
        stream.write(lines(2, 1))
    new.write_bytes(encode_header(Header()) + lines(3, 2))
    assert times(tail, new) == [2.0, 3.0, 4.0]


def test_too_far_behind_jumps_to_the_end_and_counts(
    tmp_path: Path, tail: LogTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "MOST_BYTES", 2_000)
    monkeypatch.setattr(log_tail, "MOST_BEHIND", 10_000)
    path = tmp_path / "a"
    path.write_bytes(encode_header(Header()) + lines(0, 2_000))
    found = times(tail, path)
    assert found[-1] == 1999.0
    assert tail.skipped_bytes > 10_000
    patient = LogTail(keep_up=False)
    assert [item.t for item in patient.read_all(path) if isinstance(item, Entry)] == [float(k) for k in range(2_000)]
    patient.close()


def test_another_file_is_refused(tmp_path: Path, tail: LogTail) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'{"format":"other","version":1}\n')
    with pytest.raises(LogError, match="not an event log"):
        list(tail.read(path))
    path.write_bytes(encode_header(Header()) + b"nonsense\n")
    second = LogTail()
    with pytest.raises(LogError, match="not an event-log entry"):
        list(second.read(path))
    second.close()
