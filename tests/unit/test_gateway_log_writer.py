"""The event log on disk: rotation keeps parts numbered, the oldest go, and a run replays as one log."""

from pathlib import Path

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
