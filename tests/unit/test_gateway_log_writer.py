"""The event log on disk: parts are numbered, the oldest go, a run replays as one log; slow, full and broken disks."""

import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.support.gateway import answer, front
from tests.support.loop import run
from tests.support.upstream import FakeUpstream
from weighbridge.core.event_log import Header, LogReader, RotatedLog, encode_entry
from weighbridge.core.events import Tick
from weighbridge.gateway.log_writer import LogWriter


def write(directory: Path, entries: int, *, max_files: int) -> list[Path]:
    writer = LogWriter(directory, Header(source="test"), max_bytes=200, max_files=max_files)
    for n in range(entries):
        writer.append(encode_entry(float(n), Tick(), ()))
        assert writer.sync()
    writer.close()
    return sorted(directory.glob("events-*.jsonl"))


def test_parts_are_numbered_and_read_as_one(tmp_path: Path) -> None:
    files = write(tmp_path, 20, max_files=100)
    assert len(files) > 2
    readers = [LogReader(path.open("rb"), path.name) for path in files]
    assert [reader.header.part for reader in readers] == list(range(1, len(files) + 1))
    assert [entry.t for entry in RotatedLog(readers)] == [float(n) for n in range(20)]
    for reader in readers:
        reader.close()


def test_the_oldest_files_go_and_a_new_run_begins_with_part_one(tmp_path: Path) -> None:
    assert len(write(tmp_path, 30, max_files=3)) == 3
    newest = write(tmp_path, 1, max_files=3)[-1]
    with newest.open("rb") as stream:
        assert LogReader(stream, newest.name).header.part == 1


def test_more_than_may_wait_is_dropped_and_counted_and_nobody_waits(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, Header(source="test"), max_bytes=10**9, max_files=3, max_pending_bytes=1000)
    stuck, file = threading.Event(), writer._file

    class Slow:
        """A disk that does nothing for a while."""

        def write(self, data: bytes) -> int:
            assert stuck.wait(10.0)
            return file.write(data)

        def flush(self) -> None:
            file.flush()

        def close(self) -> None:
            file.close()

    writer._file = Slow()  # type: ignore[assignment]
    line = encode_entry(0.0, Tick(), ())
    begun = time.monotonic()
    for _ in range(100):
        writer.append(line)
        writer.flush()
    assert time.monotonic() - begun < 1.0
    taken = 1000 // len(line)
    assert writer.dropped == 100 - taken
    stuck.set()
    assert writer.sync()
    writer.append(line)  # there is room again
    assert writer.sync()
    writer.close()
    assert writer.path.read_bytes().count(b"\n") == 1 + taken + 1
    assert (writer.dropped, writer.error) == (100 - taken, None)


def test_a_full_disk_is_counted_and_the_log_goes_on(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, Header(source="test"), max_bytes=10**9, max_files=3)
    good, line = writer._file, encode_entry(0.0, Tick(), ())
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb") as full:
        writer._file = full
        for _ in range(3):
            writer.append(line)
        assert writer.sync()
        assert writer.dropped == 3
        assert isinstance(writer.error, OSError)
        writer._file = good
        full.close()
    writer.append(line)
    assert writer.sync()
    assert writer.dropped == 3
    writer.close()
    assert writer.path.read_bytes().count(b"\n") == 2


def test_a_file_that_cannot_be_opened_costs_no_line(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    writer = LogWriter(folder, Header(source="test"), max_bytes=200, max_files=3)
    line = encode_entry(0.0, Tick(), ())
    kept = writer._file
    shutil.rmtree(folder)
    for _ in range(20):
        writer.append(line)
        assert writer.sync()
    assert isinstance(writer.error, OSError)
    assert writer.dropped == 0
    assert writer._file is kept
    folder.mkdir()
    writer.append(line)
    assert writer.sync()
    writer.close()
    with writer.path.open("rb") as stream:
        assert LogReader(stream, "log").header.part == 2, "no part is missing"


def test_what_was_dropped_is_a_metric(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, front(one, data_dir=str(tmp_path)) as f:
            assert f.gateway.writer is not None
            f.gateway.writer.dropped = 7
            assert "weighbridge_event_log_dropped 7.0" in (await f.get("/metrics", admin=True)).body.decode()

    run(main())
