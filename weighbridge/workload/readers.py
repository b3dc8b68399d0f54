"""Public trace formats into `TraceRequest`: Azure, Mooncake, Bailian, BurstGPT, Vidur and our own JSONL.

A bad row is an error that names file, line and column; with `skip_bad` it is counted instead. Times are made relative
to the earliest request and the requests are sorted by arrival.
"""

from __future__ import annotations

import csv
import datetime
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from weighbridge.core.errors import TraceError
from weighbridge.workload.streams import Streams
from weighbridge.workload.trace import TraceRequest, open_text

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
GRID_TOLERANCE_S = 0.005


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace as read: its requests in arrival order, how many rows were skipped as bad, and the format it is in.

    `quantum_s` is the grid on which the recorded time stamps lay before they were spread (0 = they were left alone).
    """

    path: str
    format: str
    requests: list[TraceRequest]
    skipped: int = 0
    quantum_s: float = 0.0


class _BadRow(Exception):
    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason


def _tokens(row: dict[str, Any], column: str, *, least: int = 0) -> int:
    value: Any = row.get(column)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _BadRow(column, "is missing" if value in (None, "") else f"'{value}' is not a number") from None
    if number != math.floor(number):
        raise _BadRow(column, f"{value} is not a whole number of tokens")
    if number < least:
        raise _BadRow(column, f"{value} is below {least}")
    return int(number)


def _seconds(row: dict[str, Any], column: str, scale: float = 1.0) -> float:
    value: Any = row.get(column)
    try:
        seconds = float(value) * scale
    except (TypeError, ValueError):
        raise _BadRow(column, "is missing" if value in (None, "") else f"'{value}' is not a time") from None
    if not math.isfinite(seconds):
        raise _BadRow(column, f"'{value}' is not a finite time")
    return seconds


def _hashes(row: dict[str, Any], column: str) -> tuple[int, ...]:
    value = row.get(column, [])
    if not isinstance(value, list) or not all(isinstance(h, int) and not isinstance(h, bool) for h in value):
        raise _BadRow(column, "is not a list of whole numbers")
    return tuple(value)


def _azure(row: dict[str, Any]) -> TraceRequest:
    text = row.get("TIMESTAMP") or ""
    # Seven decimals (100 ns) are one more than `datetime` reads, so the fraction is parsed apart.
    whole, _, fraction = text.partition(".")
    try:
        at = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp()
        at += float("0." + fraction) if fraction else 0.0
    except ValueError:
        raise _BadRow("TIMESTAMP", f"'{text}' is not a date and time") from None
    return TraceRequest(at, _tokens(row, "ContextTokens", least=1), _tokens(row, "GeneratedTokens", least=1))


def _mooncake(row: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        _seconds(row, "timestamp", 1e-3),
        _tokens(row, "input_length", least=1),
        _tokens(row, "output_length", least=1),
        blocks=_hashes(row, "hash_ids"),
        block_tokens=MOONCAKE_BLOCK_TOKENS,
    )


def _bailian(row: dict[str, Any]) -> TraceRequest:
    # chat_id and parent_chat_id are joined into sessions afterwards; here they travel as "id<parent".
    chat, parent = row.get("chat_id"), row.get("parent_chat_id", -1)
    if chat is None:
        raise _BadRow("chat_id", "is missing")
    return TraceRequest(
        _seconds(row, "timestamp"),
        _tokens(row, "input_length", least=1),
        _tokens(row, "output_length", least=1),
        kind=str(row.get("type", "")),
        session=f"{chat}<{parent}",
        blocks=_hashes(row, "hash_ids"),
        block_tokens=BAILIAN_BLOCK_TOKENS,
    )


def _burstgpt(row: dict[str, Any]) -> TraceRequest:
    output = _tokens(row, "Response tokens")
    return TraceRequest(
        _seconds(row, "Timestamp"),
        _tokens(row, "Request tokens", least=1),
        output,
        kind=row.get("Log Type") or "",
        session=row.get("Session ID") or "",
        failed=output == 0,
    )


def _vidur(row: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        _seconds(row, "arrived_at"),
        _tokens(row, "num_prefill_tokens", least=1),
        _tokens(row, "num_decode_tokens", least=1),
    )


def _own(row: dict[str, Any]) -> TraceRequest:
    try:
        request = msgspec.convert(row, TraceRequest)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise _BadRow(path.rstrip("`") or "row", reason) from None
    if not math.isfinite(request.arrival_s):
        raise _BadRow("arrival_s", "is not a finite time")
    if request.prompt_tokens < 1:
        raise _BadRow("prompt_tokens", f"{request.prompt_tokens} is below 1")
    if request.output_tokens < (0 if request.failed else 1):
        raise _BadRow("output_tokens", f"{request.output_tokens} is below 1")
    if request.blocks and request.block_tokens < 1:
        raise _BadRow("block_tokens", "must be given with blocks")
    return request


@dataclass(frozen=True, slots=True)
class _Format:
    """A way to read rows, and the columns by which a file is recognised."""

    columns: frozenset[str]
    convert: Callable[[dict[str, Any]], TraceRequest]
    text: str = "csv"


_FORMATS = {
    "azure": _Format(frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    "burstgpt": _Format(frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burstgpt),
    "vidur": _Format(frozenset({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}), _vidur),
    "bailian": _Format(frozenset({"chat_id", "timestamp", "input_length", "hash_ids"}), _bailian, "jsonl"),
    "mooncake": _Format(frozenset({"timestamp", "input_length", "output_length"}), _mooncake, "jsonl"),
    "weighbridge": _Format(frozenset({"arrival_s", "prompt_tokens", "output_tokens"}), _own, "jsonl"),
}
FORMATS = tuple(_FORMATS)


def read_trace(
    path: str | Path,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    raw_times: bool = False,
    seed: int = 0,
    limit: int | None = None,
) -> TraceFile:
    """Read a trace file, plain or gzip-compressed.

    Without `format` it is recognised by its columns. Time stamps that all lie on a grid of a second or more (Mooncake:
    3 s) are spread evenly at random over their grid interval, in order, by `seed`; `raw_times` leaves them alone.
    `limit` keeps only the first rows of the file. Raises `TraceError`.
    """
    path = Path(path)
    if format is not None and format not in _FORMATS:
        raise TraceError(f"trace format '{format}' is not one of {', '.join(_FORMATS)}")
    requests: list[TraceRequest] = []
    skipped = 0
    name = format
    try:
        with open_text(path) as stream:
            rows = _rows(stream, path, format)
            name, chosen = next(rows)
            for line, row in rows:
                if limit is not None and len(requests) >= limit:
                    break
                try:
                    if isinstance(row, str):
                        raise _BadRow("row", row)
                    requests.append(chosen.convert(row))
                except _BadRow as bad:
                    if not skip_bad:
                        raise TraceError(
                            f"{path}, line {line}, column {bad.column}: {bad.reason}; "
                            "correct the row, or skip such rows with --skip-bad"
                        ) from None
                    skipped += 1
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, EOFError):
        raise TraceError(f"{path} is not a text file, nor gzip of one") from None
    if not requests:
        raise TraceError(f"{path} holds no request" + (f" ({skipped} bad rows were skipped)" if skipped else ""))
    requests, quantum_s = _timed(requests, raw_times, seed)
    if name == "bailian":
        requests = _with_sessions(requests)
    return TraceFile(str(path), name or "", requests, skipped, quantum_s)


def _rows(stream: IO[str], path: Path, format: str | None) -> Iterator[Any]:
    """First (format name, format), then (line number, row or the reason why it is none)."""
    first = stream.readline()
    if first.lstrip().startswith("{"):
        yield from _json_rows(first, stream, path, format)
    else:
        yield from _csv_rows(first, stream, path, format)


def _recognise(columns: set[str], text: str, path: Path, format: str | None) -> tuple[str, _Format]:
    if format is not None:
        chosen = _FORMATS[format]
        missing = sorted(chosen.columns - columns) if chosen.text == text == "csv" else []
        if chosen.text != text:
            raise TraceError(f"{path} is {text.upper()}, but the format '{format}' is {chosen.text.upper()}")
        if missing:
            raise TraceError(f"{path}, line 1, column {missing[0]}: is missing; the format '{format}' needs it")
        return format, chosen
    for name, candidate in _FORMATS.items():
        if candidate.text == text and candidate.columns <= columns:
            return name, candidate
    found = ", ".join(sorted(columns)[:8]) or "nothing"
    raise TraceError(
        f"{path}, line 1: no known trace format has these columns ({found}); known are {', '.join(_FORMATS)}"
    )


def _json_rows(first: str, stream: IO[str], path: Path, format: str | None) -> Iterator[Any]:
    decode = msgspec.json.Decoder().decode
    try:
        columns = set(decode(first))
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}, line 1: not JSON ({error})") from None
    yield _recognise(columns, "jsonl", path, format)
    line, text = 1, first
    while text:
        if text.strip():
            try:
                row = decode(text)
                yield line, row if isinstance(row, dict) else "is not a JSON object"
            except msgspec.DecodeError as error:
                yield line, f"is not JSON ({error})"
        text = stream.readline()
        line += 1


def _csv_rows(first: str, stream: IO[str], path: Path, format: str | None) -> Iterator[Any]:
    header = [name.strip() for name in next(csv.reader([first]), [])]
    yield _recognise(set(header), "csv", path, format)
    reader = csv.reader(stream)
    for fields in reader:
        if not fields:
            continue
        if len(fields) > len(header):
            yield reader.line_num + 1, f"has {len(fields)} fields where the header names {len(header)}"
        else:
            yield reader.line_num + 1, dict(zip(header, (f.strip() for f in fields), strict=False))


def _timed(requests: list[TraceRequest], raw_times: bool, seed: int) -> tuple[list[TraceRequest], float]:
    """Sorted by arrival, from time 0, and taken off a coarse grid unless `raw_times`; with that grid in seconds."""
    order = sorted(requests, key=lambda r: r.arrival_s)
    start = order[0].arrival_s
    times = [r.arrival_s - start for r in order]
    quantum_s = 0.0 if raw_times else _grid(times)
    if quantum_s:
        times = _spread([quantum_s * round(t / quantum_s) for t in times], quantum_s, Streams(seed).get("times"))
    replace = msgspec.structs.replace
    return [replace(r, arrival_s=round(t, 9)) for r, t in zip(order, times, strict=True)], quantum_s


def _grid(times: list[float]) -> float:
    """The coarsest grid of whole seconds on which the times lie, or 0 where there is none or stamps hardly repeat.

    Recorders of such stamps are off by a few milliseconds at times, hence the tolerance.
    """
    seconds = [round(t) for t in times]
    if any(abs(t - s) > GRID_TOLERANCE_S for t, s in zip(times, seconds, strict=True)):
        return 0.0
    grid = math.gcd(*seconds)
    return float(grid) if grid and len(set(seconds)) < len(seconds) else 0.0


def _spread(times: list[float], quantum_s: float, rng: random.Random) -> list[float]:
    """Each group of equal times becomes sorted uniform times within the interval that begins there."""
    out: list[float] = []
    k = 0
    while k < len(times):
        end = k
        while end < len(times) and times[end] == times[k]:
            end += 1
        out += [times[k] + quantum_s * u for u in sorted(rng.random() for _ in range(end - k))]
        k = end
    return out


def _with_sessions(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Bailian: follow the parent links to the first chat of each session, which names it."""
    root: dict[str, str] = {}
    out = []
    for request in requests:
        chat, _, parent = request.session.partition("<")
        root[chat] = root.get(parent, parent if parent != "-1" else chat)
        out.append(msgspec.structs.replace(request, session=root[chat]))
    return out
