"""Runs a plan in one process or several that share one clock, and puts their results together."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop

from weighbridge.bench.load import Load, LoadOptions, LoadResult
from weighbridge.bench.record import BenchRecord, RecordFile, read_records
from weighbridge.bench.schedule import Planned, shards
from weighbridge.bench.target import Target

START_UP_S = 2.0
Progress = Callable[[int, int, int], None]


class _Part(msgspec.Struct):
    """What a worker sends home; records travel in its file unless that failed."""

    gaps: bytes
    loop_lags: bytes
    running: bytes
    wall_s: float
    cpu_s: float
    clock_jump_s: float
    started_at: float
    file_failure: str
    stopped: bool
    records: list[BenchRecord]


def run_load(
    plan: list[Planned],
    target: Target,
    options: LoadOptions,
    *,
    processes: int = 1,
    records: Path | None = None,
    on_progress: Progress | None = None,
) -> LoadResult:
    """Run the plan and return everything measured. With `records`, each record is flushed there as its request ends.

    A worker that dies leaves its flushed records; its other requests count as unfinished and `failure` says so.
    """
    if processes <= 1 or len(plan) < processes:
        return _alone(plan, target, options, records, on_progress)
    return _together(plan, target, options, processes, records)


def _alone(
    plan: list[Planned], target: Target, options: LoadOptions, records: Path | None, on_progress: Progress | None
) -> LoadResult:
    file = RecordFile(records) if records is not None else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_supervised(Load(plan, target, options, file, on_progress), None))
    if file is not None:
        file.close()
        result.failure = file.failure
    return result


async def _supervised(load: Load, start: float | None) -> LoadResult:
    """Run; the first interrupt ends the run early but keeps what was measured."""
    import signal

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, load.stop)
    try:
        return await load.run(start)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _together(
    plan: list[Planned], target: Target, options: LoadOptions, processes: int, records: Path | None
) -> LoadResult:
    context = multiprocessing.get_context("spawn")
    start = time.monotonic() + START_UP_S + 0.5 * processes
    workers = []
    for number, shard in enumerate(shards(plan, processes)):
        own = options
        if options.max_concurrency is not None:
            own = replace(options, max_concurrency=max(1, options.max_concurrency // processes))
        file = records.with_suffix(f".{number}.jsonl") if records is not None else None
        home, away = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(shard, target, own, start, file, away), daemon=True)
        worker.start()
        away.close()
        workers.append((worker, home, shard, file))
    total = LoadResult([], array("d"), array("d"), array("l"))
    for number, (worker, home, shard, file) in enumerate(workers):
        try:
            part = msgspec.msgpack.decode(home.recv_bytes(), type=_Part)
        except (EOFError, OSError):
            total.failure = f"load process {number} died; its requests without a record count as unfinished"
            total.records += _remains(shard, file)
            continue
        finally:
            worker.join()
            home.close()
        _add(total, part, read_records(file) if file is not None and not part.file_failure else part.records)
    total.records.sort(key=lambda r: r.scheduled_s)
    if records is not None:
        _merge_files(records, [file for _, _, _, file in workers if file is not None], total)
    return total


def _work(
    shard: list[Planned], target: Target, options: LoadOptions, start: float, records: Path | None, home: Connection
) -> None:
    file = RecordFile(records) if records is not None else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_supervised(Load(shard, target, options, file), start))
    failure = ""
    if file is not None:
        file.close()
        failure = file.failure
    part = _Part(
        gaps=result.gaps.tobytes(),
        loop_lags=result.loop_lags.tobytes(),
        running=result.running.tobytes(),
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        clock_jump_s=result.clock_jump_s,
        started_at=result.started_at,
        file_failure=failure,
        stopped=result.stopped,
        records=result.records if file is None or failure else [],
    )
    home.send_bytes(msgspec.msgpack.encode(part))
    home.close()


def _add(total: LoadResult, part: _Part, records: list[BenchRecord]) -> None:
    total.records += records
    total.gaps.frombytes(part.gaps)
    total.loop_lags.frombytes(part.loop_lags)
    running: array[int] = array("l")
    running.frombytes(part.running)
    longest = max(len(running), len(total.running))
    padded = [0] * longest
    for source in (running, total.running):
        for k, value in enumerate(source):
            padded[k] += value
    total.running = array("l", padded)
    total.wall_s = max(total.wall_s, part.wall_s)
    total.cpu_s += part.cpu_s
    total.clock_jump_s = max(total.clock_jump_s, part.clock_jump_s, key=abs)
    total.started_at = part.started_at
    total.failure = total.failure or part.file_failure
    total.stopped = total.stopped or part.stopped


def _remains(shard: list[Planned], file: Path | None) -> list[BenchRecord]:
    """Records of a dead worker: those it flushed, and `unfinished` for the rest."""
    known = {r.id: r for r in read_records(file)} if file is not None and file.exists() else {}
    reason = "the load process died"
    return [
        known.get(p.id)
        or BenchRecord(
            id=p.id, scheduled_s=p.at_s, status="unfinished", tier=p.tier or "standard", error=reason, warmup=p.warmup
        )
        for p in shard
    ]


def _merge_files(path: Path, parts: list[Path], total: LoadResult) -> None:
    """One file instead of one per process; the parts stay where merging fails."""
    try:
        with path.open("wb") as out:
            for part in parts:
                if part.exists():
                    out.write(part.read_bytes())
        for part in parts:
            part.unlink(missing_ok=True)
    except OSError as error:
        total.failure = total.failure or f"cannot write {path}: {error.strerror or error}; see the parts beside it"
