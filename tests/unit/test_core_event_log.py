"""Event logs: round trip, crash-cut last line, errors that name the line."""

import io

import pytest

from weighbridge.core.actions import Dispatch
from weighbridge.core.errors import LogError
from weighbridge.core.event_log import Entry, Header, LogReader, RotatedLog, encode_entry, encode_header
from weighbridge.core.events import RequestArrived, Tick
from weighbridge.core.request import Request

ARRIVED = RequestArrived(
    request=Request(id="r", arrival_s=1.5, prompt_tokens=3, max_tokens=4, prefix_hashes=(1 << 63,))
)


def log(*entries: bytes) -> io.BytesIO:
    return io.BytesIO(encode_header(Header(source="test", router={"policy": "work"})) + b"".join(entries))


def test_round_trip_is_exact() -> None:
    actions = (Dispatch(request_id="r", instance="i"),)
    reader = LogReader(log(encode_entry(0.1 + 0.2, ARRIVED, actions), encode_entry(9.0, Tick(), ())))
    assert reader.header.router == {"policy": "work"}
    assert list(reader) == [Entry(0.1 + 0.2, ARRIVED, actions), Entry(9.0, Tick(), ())]
    assert not reader.truncated


def test_a_last_line_cut_by_a_crash_is_dropped_and_told() -> None:
    whole = encode_entry(1.0, ARRIVED, ())
    for cut in range(1, len(whole) - 1):
        reader = LogReader(log(whole, whole[:cut]))
        assert len(list(reader)) == 1
        assert reader.truncated


def test_a_bad_line_in_the_middle_is_named() -> None:
    with pytest.raises(LogError, match=r"run\.jsonl: line 3"):
        list(LogReader(log(encode_entry(1.0, Tick(), ()), b'{"t":1}\n', encode_entry(2.0, Tick(), ())), "run.jsonl"))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (b"", "line 1 is not"),
        (b"hello\n", "line 1 is not"),
        (b'{"format":"other","version":1}\n', "expected 'weighbridge.events'"),
        (b'{"format":"weighbridge.events","version":99}\n', "upgrade weighbridge"),
    ],
)
def test_headers_are_checked(first: bytes, message: str) -> None:
    with pytest.raises(LogError, match=message):
        LogReader(io.BytesIO(first))


def part(number: int) -> LogReader:
    stream = io.BytesIO(encode_header(Header(part=number)) + encode_entry(float(number), Tick(), ()))
    return LogReader(stream, f"events-{number}.jsonl")


def test_a_rotated_log_is_read_as_one() -> None:
    assert [entry.t for entry in RotatedLog([part(1), part(2), part(3)])] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (2, 1)])
def test_a_rotated_log_with_a_part_missing_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(LogError, match=r"events-\d\.jsonl: is part \d of its run where part \d was expected"):
        RotatedLog([part(number) for number in numbers])
