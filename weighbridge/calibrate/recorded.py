"""Read recorded engine runs: per-request timings (JSON lines) and the engine's settings beside them.

A line holds `input_toks`, `output_toks` and the moments `arrival_time` (client clock), `queued_ts`, `first_token_ts`
and `last_token_ts` (engine clock). Names of the same meaning from other recorders are accepted.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from weighbridge.calibrate.event_log import read_instance_run
from weighbridge.calibrate.files import read_bytes
from weighbridge.calibrate.replay import RecordedRequest
from weighbridge.core.errors import InputError, LogError
from weighbridge.core.event_log import LogReader
from weighbridge.core.instance import Limits

Boundary = Literal["engine", "client"]

_NAMES = {
    "id": ("request_id", "id"),
    "prompt": ("input_toks", "prompt_tokens", "input_tokens"),
    "output": ("output_toks", "output_tokens"),
    "queued": ("queued_ts", "queued_s"),
    "client": ("arrival_time", "arrival_s", "scheduled_s"),
    "first": ("first_token_ts", "first_token_s"),
    "last": ("last_token_ts", "last_token_s"),
}


def read_run(
    recorded: Path, meta: Path | None, instance: str | None = None
) -> tuple[list[RecordedRequest], Limits, dict[str, str]]:
    """Requests, the engine's limits and what is told of it: of request timings with their meta file, or an event log.

    Raises:
        InputError: a file cannot be read or used; the message says which and what to do.
    """
    data = read_bytes(recorded)
    if b'"weighbridge.events"' in data[:200]:
        run = read_instance_run(LogReader(io.BytesIO(data), str(recorded)), str(recorded), instance)
        return run.requests, run.spec.limits, {"engine": run.spec.kind, "model": ", ".join(run.spec.models)}
    if meta is None:
        raise InputError(f"{recorded}: request timings need --meta, the engine's settings (token budget, KV ...)")
    limits, told = read_limits(read_bytes(meta), str(meta))
    return read_requests(data.decode(errors="replace").splitlines(), str(recorded)), limits, told


def read_requests(lines: Iterable[str], name: str, boundary: Boundary = "engine") -> list[RecordedRequest]:
    """Requests in order of arrival, time 0 at the first.

    `boundary` is where a request starts to count: when the engine queued it, or when the client sent it. The client's
    clock is moved onto the engine's by the smallest difference between the two.

    Raises:
        LogError: a line is not JSON, lacks a field, or holds an impossible number; the message names the line.
    """
    rows = [_row(line, f"{name}: line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise LogError(f"{name}: holds no request")
    starts = [row["queued"] for row in rows]
    if boundary == "client":
        if any(row["client"] is None for row in rows):
            raise LogError(f"{name}: the client boundary needs arrival_time in every line; use the engine boundary")
        offset = min(row["queued"] - row["client"] for row in rows)
        starts = [row["client"] + offset for row in rows]
    zero = min(starts)
    requests = [
        RecordedRequest(
            id=str(row["id"]),
            arrival_s=start - zero,
            first_token_s=row["first"] - zero,
            last_token_s=row["last"] - zero,
            prompt_tokens=row["prompt"],
            output_tokens=row["output"],
        )
        for row, start in zip(rows, starts, strict=True)
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise LogError(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise LogError(f"{where}: expected an object with a request's timings, got {type(raw).__name__}")
    row: dict[str, Any] = {key: next((raw[n] for n in names if n in raw), None) for key, names in _NAMES.items()}
    row["id"] = row["id"] if row["id"] is not None else where
    row["queued"] = row["queued"] if row["queued"] is not None else row["client"]
    for key in ("prompt", "output", "queued", "first", "last"):
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LogError(f"{where}: needs a number in {' or '.join(_NAMES[key])}, got {value!r}")
    for key in ("prompt", "output"):
        if row[key] < 1 or row[key] != int(row[key]):
            raise LogError(f"{where}: {_NAMES[key][0]} is {row[key]}, expected a whole number of at least 1")
        row[key] = int(row[key])
    if not row["queued"] <= row["first"] <= row["last"]:
        raise LogError(f"{where}: first token before arrival, or last token before first")
    return row


def read_limits(data: bytes, name: str) -> tuple[Limits, dict[str, str]]:
    """The engine's limits, and what is told of engine, model and hardware, from a recorder's meta file.

    KV blocks are None where the file does not say.

    Raises:
        LogError: not JSON, or without the engine's token budget and maximum of sequences.
    """
    try:
        meta = json.loads(data)
    except ValueError as error:
        raise LogError(f"{name}: not JSON ({error})") from None
    arguments = meta.get("engine_kwargs") if isinstance(meta, dict) else None
    if not isinstance(arguments, dict):
        raise LogError(f"{name}: lacks engine_kwargs, the engine's settings")
    cache = meta.get("kv_cache") or {}
    resolved = (meta.get("resolved_config") or {}).get("cache_config") or {}
    budget, sequences = arguments.get("max_num_batched_tokens"), arguments.get("max_num_seqs")
    if not isinstance(budget, int) or not isinstance(sequences, int):
        raise LogError(f"{name}: engine_kwargs lacks max_num_batched_tokens or max_num_seqs; add the engine's values")
    limits = Limits(
        token_budget=budget,
        max_sequences=sequences,
        block_size=cache.get("block_size") or resolved.get("block_size") or 16,
        kv_blocks=cache.get("num_gpu_blocks") or resolved.get("num_gpu_blocks"),
        max_context=arguments.get("max_model_len"),
    )
    hardware = meta.get("hardware") or {}
    told = {
        "engine": "vllm" if meta.get("vllm_version") else "",
        "engine_version": str(meta.get("vllm_version", "")),
        "model": str(meta.get("model") or arguments.get("model") or ""),
        "quantisation": str(arguments.get("dtype") or ""),
        "device": str(hardware.get("device_name") or ""),
        "measured_at": str(meta.get("started_at", "")),
    }
    return limits, told
