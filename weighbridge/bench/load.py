"""The load generator: sends on an absolute schedule whatever the server does, and times every reply.

One event loop, no task per request. The schedule never waits for a reply (open loop); a cap on concurrency only delays
the sending, while latency still counts from the scheduled time. In a closed loop a request's scheduled time is the
moment its slot became free.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from weighbridge.bench.call import Call, clock
from weighbridge.bench.record import BenchRecord, RecordFile
from weighbridge.bench.schedule import Planned
from weighbridge.bench.target import Target
from weighbridge.http import ClientLimits

EARLY_S = 50e-6
"""A request may leave this much before its time, rather than a whole timer tick after it."""
SPIN_S = 0.002
"""From so long before a request is due the loop turns without sleeping: its timers tick in whole milliseconds."""
WAKE_S = 0.0015
"""How much before its time the loop wakes for a request, so that a late tick costs nothing."""
SPIN_GAP_S = 0.004
"""Requests that come closer on average keep the loop awake by themselves; turning would cost a whole processor."""
BURST = 32
BEAT_S = 0.010
CLOSE_S = 5.0
PREPARE_BYTES = 256 * 1024 * 1024
BYTES_PER_TOKEN = 6


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Limits of one run. `timeout_s` counts from the scheduled time; `drain_s` from the last one.

    `patience_s`: a client that has seen no token by then goes away (counted as cancelled). `closed` keeps
    `max_concurrency` requests running, one after another.
    """

    timeout_s: float = 600.0
    drain_s: float = 60.0
    max_concurrency: int | None = None
    closed: bool = False
    patience_s: float | None = None
    stop_after_s: float | None = None


@dataclass(slots=True)
class LoadResult:
    """What one process measured; times in seconds since the start of the run.

    `gaps` are seconds between frames with tokens, `loop_lags` how late a 10 ms beat of the event loop came, `running`
    the number of requests in flight at each beat. `clock_jump_s` is by how much the wall clock moved against the
    monotonic one; `cpu_s` the processor time of the generator. `stopped`: the user ended the run early.
    """

    records: list[BenchRecord]
    gaps: array[float]
    loop_lags: array[float]
    running: array[int]
    wall_s: float = 0.0
    cpu_s: float = 0.0
    clock_jump_s: float = 0.0
    started_at: float = 0.0
    failure: str = ""
    stopped: bool = False


class Load:
    """One run over one plan (in order of time). `run` may be called once."""

    def __init__(
        self,
        plan: list[Planned],
        target: Target,
        options: LoadOptions,
        records: RecordFile | None = None,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self._plan, self._target, self._options = plan, target, options
        self._file, self._on_progress = records, on_progress
        self._next = 0
        self._prepared: deque[bytes] = deque()
        self._prepared_bytes = 0
        self._prepare_at = 0
        self._backlog: deque[tuple[Planned, bytes]] = deque()
        self._active: set[Call] = set()
        self._finished = asyncio.Event()
        self._closing = False
        self._result = LoadResult([], array("d"), array("d"), array("l"))
        self._cap = options.max_concurrency or len(plan) + 1
        mean_gap = (plan[-1].at_s - plan[0].at_s) / len(plan) if plan else 1.0
        self._spin = mean_gap > SPIN_GAP_S

    async def run(self, start: float | None = None) -> LoadResult:
        """Send everything, wait for the replies within the drain, return what was measured.

        `start` is time 0 on the monotonic clock; without it the run begins as soon as requests are prepared.
        """
        if not self._plan:
            return self._result
        self._loop = asyncio.get_running_loop()
        timeout = self._options.timeout_s
        limits = ClientLimits(connect_s=min(10.0, timeout), head_s=timeout + 5.0, read_s=timeout + 5.0, max_idle=16_384)
        self._pool = self._target.pool(limits)
        self._prepare(len(self._plan))
        self._start = clock() + 0.05 if start is None else start
        cpu, wall = time.process_time(), time.time() - clock()
        self._result.started_at = wall + self._start
        gc.collect()
        gc.freeze()
        gc.disable()
        self._beat_due = self._start
        try:
            self._loop.call_later(max(0.0, self._start - clock() - WAKE_S), self._begin)
            await self._finished.wait()
        finally:
            gc.enable()
            gc.unfreeze()
            # a connection that never tells of its end must not cost the figures
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pool.close(), CLOSE_S)
        self._result.wall_s = clock() - self._start
        self._result.cpu_s = time.process_time() - cpu
        self._result.clock_jump_s = (time.time() - clock()) - wall
        return self._result

    def stop(self) -> None:
        """End now: what runs is recorded as unfinished, what was not sent yet was never offered."""
        self._plan = self._plan[: self._next]
        self._result.stopped = True
        self._abandon("stopped by the user")

    def _begin(self) -> None:
        self._beat_due = clock()
        self._loop.call_later(BEAT_S, self._beat)
        self._tick()

    # sending

    def _tick(self) -> None:
        """Send what is due, then sleep until the next is."""
        plan = self._plan
        sent = 0
        while self._next < len(plan):
            planned = plan[self._next]
            wait = planned.at_s - (clock() - self._start)
            if wait > EARLY_S:
                self._prepare(4)
                if not self._spin:
                    self._loop.call_later(wait, self._tick)
                elif wait < SPIN_S:
                    self._loop.call_soon(self._tick)
                else:
                    self._loop.call_later(wait - WAKE_S, self._tick)
                return
            if sent == BURST:
                self._loop.call_soon(self._tick)
                return
            self._next += 1
            sent += 1
            payload = self._take()
            if len(self._active) < self._cap:
                self._send(planned, payload, planned.at_s)
            else:
                self._backlog.append((planned, payload))
        self._check_end()
        if not self._finished.is_set():
            last = plan[-1].at_s if not self._options.closed else math.inf
            if math.isfinite(last):
                left = last + self._options.drain_s - (clock() - self._start)
                self._loop.call_later(max(0.0, left), self._abandon, "still running at the end of the drain")

    def _take(self) -> bytes:
        if not self._prepared:
            self._prepare(1)
        payload = self._prepared.popleft()
        self._prepared_bytes -= len(payload)
        return payload

    def _prepare(self, count: int) -> None:
        """Build up to `count` requests ahead, within the memory bound (at least one when none is ready)."""
        while count > 0 and self._prepare_at < len(self._plan):
            if self._prepared and self._prepared_bytes > PREPARE_BYTES:
                return
            payload = self._target.payload(self._plan[self._prepare_at])
            self._prepared.append(payload)
            self._prepared_bytes += len(payload)
            self._prepare_at += 1
            count -= 1

    def _send(self, planned: Planned, payload: bytes, allowed_s: float) -> None:
        """Hand over one request that might have left at `allowed_s`."""
        call = Call(planned, self._start, self._result.gaps, self._done, self._target.stream)
        self._active.add(call)
        now = clock()
        exchange = self._pool.send(payload, call)
        call.started(exchange, now, max(0.0, now - self._start - allowed_s))

    def _done(self, call: Call, record: BenchRecord) -> None:
        self._active.discard(call)
        self._result.records.append(record)
        if self._file is not None:
            self._file.write(record)
        if self._closing:
            return
        if self._backlog and len(self._active) < self._cap:
            planned, payload = self._backlog.popleft()
            now = clock() - self._start
            if self._options.closed:
                planned = replace(planned, at_s=now)
            self._send(planned, payload, now)
        self._check_end()

    def _check_end(self) -> None:
        if self._next >= len(self._plan) and not self._active and not self._backlog:
            self._finished.set()

    # watching

    def _beat(self) -> None:
        """Every 10 ms: how late the loop is, how many run; and the deadlines of those."""
        now = clock()
        result = self._result
        result.loop_lags.append(max(0.0, now - self._beat_due - BEAT_S))
        result.running.append(len(self._active) + len(self._backlog))
        self._beat_due = now
        if len(result.loop_lags) % 25 == 0:
            self._expire(now - self._start)
            if self._on_progress is not None:
                self._on_progress(self._next, len(self._active), len(result.records))
        stop = self._options.stop_after_s
        if stop is not None and now - self._start > stop:
            self._abandon("the run was over")
        if not self._finished.is_set():
            self._loop.call_later(BEAT_S, self._beat)

    def _expire(self, now_s: float) -> None:
        timeout, patience = self._options.timeout_s, self._options.patience_s
        capped = self._options.max_concurrency is not None
        for call in list(self._active):
            since = call.sent - self._start if capped else call.planned.at_s
            if now_s - since > timeout:
                call.give_up("timed_out", f"no complete reply within {timeout:g} s")
            elif patience is not None and not call.has_token and now_s - since > patience:
                call.give_up("cancelled", f"no token within {patience:g} s")

    def _abandon(self, reason: str) -> None:
        if self._finished.is_set():
            return
        self._closing = True
        for call in list(self._active):
            call.give_up("unfinished", reason)
        for planned, _ in self._backlog:
            record = BenchRecord(id=planned.id, scheduled_s=planned.at_s, status="unfinished", error=reason)
            record.tier, record.tenant, record.kind = planned.tier or "standard", planned.tenant, planned.kind
            record.warmup = planned.warmup
            record.wanted_prompt_tokens, record.wanted_output_tokens = planned.prompt_tokens, planned.output_tokens
            self._result.records.append(record)
            if self._file is not None:
                self._file.write(record)
        self._backlog.clear()
        self._next = len(self._plan)
        self._finished.set()


def cpu_count() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
