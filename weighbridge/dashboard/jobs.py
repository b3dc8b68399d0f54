"""Runs what-if questions, one at a time, each in a child process that can be cancelled and ends with this one."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from weighbridge.core.errors import ServiceError
from weighbridge.dashboard.whatif import Answer, Question

KEPT = 5
WALL_S = 900.0
MOST_LINE = 32 << 20
State = Literal["running", "done", "failed", "cancelled"]


class Job:
    """One question and how far it is."""

    def __init__(self, number: int, question: Question) -> None:
        self.number = number
        self.question = question
        self.state: State = "running"
        self.share = 0.0
        self.text = "starting"
        self.error = ""
        self.answer: Answer | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.started_s = time.monotonic()
        self.ended_s: float | None = None

    @property
    def seconds(self) -> float:
        """How long it has been, or was, running."""
        return (self.ended_s or time.monotonic()) - self.started_s


class Jobs:
    """The last few jobs, newest first, and the logs they may read: nothing outside `logs` is ever opened."""

    def __init__(self, logs: Sequence[Path] = ()) -> None:
        self.fixed = list(logs)
        self.jobs: deque[Job] = deque(maxlen=KEPT)
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def logs(self, live: str = "") -> list[Path]:
        """Event logs that may be asked about: those given at the start, and the live one with its older parts."""
        found = list(self.fixed)
        if live:
            path = Path(live)
            with contextlib.suppress(OSError):
                found += sorted(path.parent.glob("events-*.jsonl"), reverse=True)[:20]
            if path not in found and path.is_file():
                found.insert(len(self.fixed), path)
        return [path for path in dict.fromkeys(found) if path.is_file()]

    @property
    def running(self) -> Job | None:
        """The job that is running now."""
        return next((job for job in self.jobs if job.state == "running"), None)

    def get(self, number: str) -> Job | None:
        """By number; the newest without one."""
        if not number:
            return self.jobs[0] if self.jobs else None
        return next((job for job in self.jobs if str(job.number) == number), None)

    def start(self, question: Question) -> Job:
        """Start a job. Raises ServiceError while another one runs."""
        if self.running is not None:
            raise ServiceError("another question is being worked on; wait for it or cancel it")
        self._count += 1
        job = Job(self._count, question)
        self.jobs.appendleft(job)
        task = asyncio.get_running_loop().create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def cancel(self) -> None:
        """Stop the running job, if any."""
        job = self.running
        if job is not None:
            job.state, job.ended_s = "cancelled", time.monotonic()
            _kill(job)

    async def close(self) -> None:
        """Stop what runs and wait until it is gone."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, job: Job) -> None:
        try:
            async with asyncio.timeout(WALL_S):
                await self._work(job)
        except TimeoutError:
            self._fail(job, f"it took longer than {WALL_S:.0f} s; choose a shorter window or fewer policies")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._fail(job, f"the child process broke off: {error}")
        finally:
            _kill(job)
            if job.process is not None:
                await job.process.wait()
            if job.state == "running":
                self._fail(
                    job, "the child process ended without an answer; its limits are 4 GiB and 600 processor-seconds"
                )

    def _fail(self, job: Job, why: str) -> None:
        if job.state == "running":
            job.state, job.error, job.ended_s = "failed", why, time.monotonic()

    async def _work(self, job: Job) -> None:
        process = job.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "weighbridge.dashboard.whatif_job",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            limit=MOST_LINE,
        )  # fmt: skip
        if job.state != "running":
            return  # cancelled before it began
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(job.question))
        process.stdin.close()
        async for line in process.stdout:
            kind, _, rest = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
            if job.state != "running":
                return
            if kind == "P":
                share, _, job.text = rest.partition(" ")
                job.share = float(share)
            elif kind == "E":
                self._fail(job, rest)
            elif kind == "A":
                job.answer = msgspec.json.decode(rest, type=Answer)
                job.state, job.share, job.ended_s = "done", 1.0, time.monotonic()


def _kill(job: Job) -> None:
    if job.process is not None and job.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            job.process.kill()
