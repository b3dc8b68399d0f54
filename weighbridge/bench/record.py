"""What the load generator saw of one request, and the file that every such record is flushed to as it ends."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import msgspec

from weighbridge.core.errors import InputError
from weighbridge.core.metrics import RequestRecord


class BenchRecord(RequestRecord, kw_only=True, omit_defaults=True):
    """A `RequestRecord` with what only a client sees; times in seconds since the start of the run.

    `tokens_from` says where `output_tokens` comes from: `usage` (the server's own count) or `frames` (one per frame
    that carried a token, a guess). `frames` counts frames with generated tokens, `longest_gap_s` is the longest pause
    between two of them. `first_content_s` is the first visible content, `first_token_s` the first token of any kind.
    `lag_s` is how late the generator itself sent the request; `router` holds what the router told in its headers.
    """

    first_byte_s: float | None = None
    first_content_s: float | None = None
    ended_s: float | None = None
    lag_s: float = 0.0
    frames: int = 0
    longest_gap_s: float = 0.0
    tokens_from: str = "usage"
    http_status: int = 0
    finish_reason: str = ""
    wanted_prompt_tokens: int = 0
    wanted_output_tokens: int = 0
    kind: str = ""
    warmup: bool = False
    router: dict[str, float | str] = msgspec.field(default_factory=dict)


_encoder = msgspec.json.Encoder()


class RecordFile:
    """Appends records as JSON lines, each flushed at once. A write that fails is remembered, never raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure = ""
        self.lost = 0
        self._stream: IO[bytes] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("ab", buffering=0)
        except OSError as error:
            self.failure = f"cannot write {path}: {error.strerror or error}"

    def write(self, record: BenchRecord) -> None:
        """One line; after a failure the line is counted as lost and the next is tried again."""
        if self._stream is None:
            self.lost += 1
            return
        try:
            self._stream.write(_encoder.encode(record) + b"\n")
        except OSError as error:
            self.failure = f"cannot write {self.path}: {error.strerror or error}"
            self.lost += 1

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def read_records(path: Path) -> list[BenchRecord]:
    """Records of a file; a last line cut by a crash is dropped. Raises `InputError`."""
    records = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    decoder = msgspec.json.Decoder(BenchRecord)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}, line {number}: {error}") from None
    return records
