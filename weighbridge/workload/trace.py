"""One request of a trace, and the own JSONL form of a trace."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a client asked for, and when; the input of a simulation, a bench run or a plan.

    `arrival_s` counts from the start of the trace. `blocks` are chained hashes of the leading full prompt blocks of
    `block_tokens` tokens each: equal first k hashes mean equal first k blocks of tokens. `kind` names the class of work
    (chat, document, ...), which a length estimator may use as a key. `failed` marks a request that the recorded system
    never answered; it has no output length.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    kind: str = ""
    tier: str = ""
    tenant: str = ""
    session: str = ""
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    failed: bool = False


_ENCODER = msgspec.json.Encoder()


def open_text(path: Path) -> IO[str]:
    """Open a text file, gzip-compressed or not (recognised by its first two bytes)."""
    with path.open("rb") as probe:
        compressed = probe.read(2) == b"\x1f\x8b"
    if compressed:
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
    return path.open("r", encoding="utf-8-sig", newline="")


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write requests in the own form, one JSON object a line (gzip where the name ends in .gz); returns the count."""
    count = 0
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as out:
        for request in requests:
            out.write(_ENCODER.encode(request) + b"\n")
            count += 1
    return count


def rescaled(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """The same requests with every arrival time multiplied by `factor` (0.5 doubles the rate)."""
    for request in requests:
        yield msgspec.structs.replace(request, arrival_s=request.arrival_s * factor)


def at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    """The requests from time 0 on, stretched so that their mean rate is `rate` requests per second."""
    if not requests:
        return []
    start, end = requests[0].arrival_s, requests[-1].arrival_s
    span = end - start
    factor = (len(requests) / rate) / span if span > 0 else 1.0
    return [msgspec.structs.replace(r, arrival_s=(r.arrival_s - start) * factor) for r in requests]
