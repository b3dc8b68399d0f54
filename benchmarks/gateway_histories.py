"""Many seeded histories of misbehaving engines and impatient clients, each checked (`tests/support/history.py`).

    python -m benchmarks.gateway_histories --first 10000 --count 10000 [--at-once 25] [--at-most-s 540] [--pairs]

`--pairs`: disaggregated fleets of every protocol and assembled replies instead, COUNT seeds of each; `--processes`: the
gateway as a process that is killed. Prints how often each end was seen, how often there was something urgent to be
judged, and which range was run. A history that fails or hangs is named with its reason, run once more by itself, and
makes the exit status 1, as does an error in the log or an exception that nobody awaits. Put its seed into `ONCE_FAILED`
of `tests/integration/test_gateway_history.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import uvloop

from tests.support.history import history
from tests.support.history_pairs import SHAPES, pair_history
from tests.support.history_process import process_history
from tests.support.priority import JUDGED

HANGS_S = 60.0
History = Callable[[], Coroutine[Any, Any, dict[str, int]]]


class Errors(logging.Handler):
    """Counts errors in the log, among them what asyncio says of exceptions that nobody awaits; prints the first."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.seen += 1
        if self.seen <= 5:
            print(logging.Formatter().format(record), flush=True)


async def run_one(name: str, make: History) -> tuple[dict[str, int] | None, str]:
    """The ends of one history, or why it failed."""
    try:
        async with asyncio.timeout(HANGS_S):
            return await make(), ""
    except TimeoutError:
        return None, f"{name} hangs"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{name}: {type(error).__name__}: {str(error)[:300]} ({place.filename}:{place.lineno})"


class Sweep:
    """Runs histories some at a time until they are all done or the time is up."""

    def __init__(self, jobs: Iterator[tuple[str, History]], until_s: float) -> None:
        self._jobs = jobs
        self._until_s = until_s
        self.ends: collections.Counter[str] = collections.Counter()
        self.judged: collections.Counter[str] = collections.Counter()
        self.failed: list[tuple[str, History]] = []
        self.done = 0
        self.last = ""

    async def worker(self) -> None:
        while time.monotonic() < self._until_s:
            job = next(self._jobs, None)
            if job is None:
                return
            ends, why = await run_one(*job)
            self.done, self.last = self.done + 1, job[0]
            if ends is None:
                self.failed.append(job)
                print(why, flush=True)
            else:
                self.judged.update({name: ends.pop(name) for name in (*JUDGED, "lives") if name in ends})
                self.ends.update(ends)


def plain(first: int, count: int) -> Iterator[tuple[str, History]]:
    for seed in range(first, first + count):
        yield f"seed {seed}", partial(history, seed)


def pairs(first: int, count: int) -> Iterator[tuple[str, History]]:
    for seed in range(first, first + count):
        for shape in SHAPES:
            yield f"{shape} seed {seed}", partial(pair_history, shape, seed)


def processes(first: int, count: int) -> Iterator[tuple[str, History]]:
    for seed in range(first, first + count):
        yield f"process seed {seed}", partial(process_history, seed)


async def main(given: argparse.Namespace, errors: Errors) -> int:
    begun, cpu = time.monotonic(), time.process_time()
    kind = pairs if given.pairs else processes if given.processes else plain
    jobs = kind(given.first, given.count)
    sweep = Sweep(jobs, begun + given.at_most_s)
    await asyncio.gather(*(sweep.worker() for _ in range(given.at_once)))
    again = [why for job in sweep.failed for ends, why in [await run_one(*job)] if ends is None]
    row = {
        "first": given.first,
        "histories": sweep.done,
        "last": sweep.last,
        "requests": sum(sweep.ends.values()),
        "ends": dict(sweep.ends.most_common()),
        "judged": dict(sweep.judged),
        "failed": [name for name, _ in sweep.failed],
        "failed_again_alone": again,
        "errors_in_the_log": errors.seen,
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }
    print(json.dumps(row), flush=True)
    return int(bool(sweep.failed) or errors.seen > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=25)
    parser.add_argument("--at-most-s", type=float, default=540.0)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--processes", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    errors = Errors()
    logging.getLogger().addHandler(errors)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        sys.exit(loop.run(main(given, errors)))
