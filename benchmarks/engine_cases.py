"""The embedded engine's own promises, measured in one process without HTTP.

    python benchmarks/engine_cases.py budgets prefix cyclic spf kv python pair preempt speed [--library dispatch]

Each case prints one table. Times are CPU seconds of the engine's only thread, which is always busy here: on idle cores
they are wall seconds, and other processes do not disturb them. `pair` alone takes wall time and needs two free cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Callable

from weighbridge.engine.engine import Engine
from weighbridge.engine.generation import GenerationRequest, Output, Sink
from weighbridge.engine.libllama import Library
from weighbridge.engine.library_store import resolve_library
from weighbridge.engine.model import LlamaModel, ModelOptions
from weighbridge.engine.model_store import DEFAULT_MODEL, resolve_model
from weighbridge.engine.options import EngineOptions
from weighbridge.engine.runner import LlamaRunner, Rows, RunnerOptions
from weighbridge.engine.sampling import SamplingParams

RNG = random.Random(3)


class Run:
    """One generation, timed on the clock of the engine's thread."""

    def __init__(self, clock: int) -> None:
        self.clock = clock
        self.begun = time.clock_gettime(clock)
        self.times: list[float] = []
        self.text = ""
        self.last: Output | None = None
        self.done = threading.Event()

    def __call__(self, output: Output) -> None:
        self.times.append(time.clock_gettime(self.clock))
        self.text += output.text
        if output.finish_reason is not None:
            self.last = output
            self.done.set()

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begun

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def wait(self) -> Run:
        assert self.done.wait(300)
        return self


class Bench:
    """An engine and a way to submit to it."""

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        self.engine = Engine(model, options, deliver)
        self.engine.warm_up()
        self.engine.start()
        ident = self.engine._thread.ident
        assert ident is not None
        self.clock = time.pthread_getcpuclockid(ident)
        self.count = 0

    def now(self) -> float:
        return time.clock_gettime(self.clock)

    def run(self, tokens: list[int], output: int, priority: int = 0) -> Run:
        self.count += 1
        run = Run(self.clock)
        request = GenerationRequest(
            f"b{self.count}",
            tokens,
            output,
            time.monotonic(),
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
            priority=priority,
        )
        self.engine.submit(request, run)
        return run


def deliver(outputs: list[tuple[Sink, Output]]) -> None:
    for sink, output in outputs:
        sink(output)


def prompt(length: int) -> list[int]:
    return [RNG.randrange(1000, 40000) for _ in range(length)]


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def options(slots: int = 8, context: int = 1280, **changes: object) -> EngineOptions:
    runner = RunnerOptions(slots=slots, context_tokens=context, threads=1)
    return dataclasses.replace(EngineOptions(runner=runner, max_step_s=60.0), **changes)


def budgets(model: LlamaModel, runs: int) -> None:
    """Four decodes run and a 1,000-token prompt arrives: gaps of the four meanwhile, and its first token."""
    print("| prefill per step while decoding | undisturbed step ms | ITL p50 ms | ITL p99 ms | p99 / step | TTFT s |")
    print("|---|---|---|---|---|---|")
    for budget in (64, 128, 256, 512):
        rows = []
        for _ in range(runs):
            bench = Bench(model, options(busy_prefill_tokens=budget, prefix_caching=False))
            four = [bench.run(prompt(200), 400) for _ in range(4)]
            while not all(len(run.times) >= 30 for run in four):
                time.sleep(0.01)
            calm = statistics.median([gap for run in four for gap in run.gaps[-20:]])
            before = [len(run.times) for run in four]
            long = bench.run(prompt(1000), 4)
            long.wait()
            end = long.times[0]
            gaps = [
                b - a
                for run, start in zip(four, before, strict=True)
                for a, b in zip(run.times[start - 1 :], run.times[start:], strict=False)
                if a < end
            ]
            rows.append((calm, quantile(gaps, 0.5), quantile(gaps, 0.99), long.ttft))
            bench.engine.stop()
        calm, p50, p99, ttft = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {budget} | {calm * 1e3:.1f} | {p50 * 1e3:.0f} | {p99 * 1e3:.0f} | {p99 / calm:.1f} | {ttft:.2f} |")


def prefix(model: LlamaModel, runs: int) -> None:
    """880 of 904 tokens are there already, and four identical cold requests at once."""
    cold, warm, computed = [], [], []
    for _ in range(runs):
        bench = Bench(model, options(slots=4))
        head = prompt(880)
        cold.append(bench.run(head + prompt(24), 4).wait().ttft)
        warm.append(bench.run(head + prompt(24), 4).wait().ttft)
        before = bench.engine.counters.prefill_tokens
        same = prompt(600)
        for run in [bench.run(same, 4) for _ in range(4)]:
            run.wait()
        computed.append(bench.engine.counters.prefill_tokens - before)
        prefixes = bench.engine.scheduler.prefixes
        assert prefixes is not None
        lookup = prefixes.lookup_s / prefixes.lookups
        bench.engine.stop()
    print(f"cold TTFT {statistics.median(cold):.3f} s, warm {statistics.median(warm):.3f} s: "
          f"{(1 - statistics.median(warm) / statistics.median(cold)) * 100:.1f} % lower")  # fmt: skip
    print(f"four identical cold requests of 600 tokens: {statistics.median(computed)} prompt tokens computed")
    print(f"lookup {lookup * 1e6:.0f} us")


def cyclic(model: LlamaModel, runs: int) -> None:
    """Twelve prompts of 300 tokens in turn, three rounds, with room for all, for half, and without a cache."""
    print("| prefix cache | seconds | tokens reused of 10,800 |\n|---|---|---|")
    for name, changes in (
        ("off", {"prefix_caching": False}),
        ("half of the set", {"prefix_store_bytes": 4 * 300 * 23040}),
        ("whole set", {"prefix_store_bytes": 256 << 20}),
    ):
        seconds, reused = [], 0
        for _ in range(runs):
            bench = Bench(model, options(slots=2, context=512, **changes))
            prompts = [prompt(300) for _ in range(12)]
            begun = bench.now()
            for tokens in prompts * 3:
                bench.run(tokens, 2).wait()
            seconds.append(bench.now() - begun)
            reused = bench.engine.counters.prefix_hits
            bench.engine.stop()
        print(f"| {name} | {statistics.median(seconds):.2f} | {reused} |")


def spf(model: LlamaModel, runs: int) -> None:
    """A 40-token request 50 ms behind a 1,000-token one, while one sequence decodes."""
    print(
        "| scheduling | TTFT of the short s | TTFT of the long s | longest stall of the decode s |\n|---|---|---|---|"
    )
    whole = {"busy_prefill_tokens": 1024, "idle_prefill_tokens": 1024, "discipline": "fcfs"}
    for name, changes in (("whole prefill, FCFS", whole), ("chunks of 128, SPF", {"discipline": "spf"})):
        rows = []
        for _ in range(runs):
            base = options(prefix_caching=False, **changes)
            if "idle_prefill_tokens" in changes:
                base = dataclasses.replace(base, runner=dataclasses.replace(base.runner, batch_rows=1024))
            bench = Bench(model, base)
            decode = bench.run(prompt(100), 300)
            while len(decode.times) < 10:
                time.sleep(0.01)
            at = len(decode.times)
            long = bench.run(prompt(1000), 2)
            while bench.now() < long.begun + 0.05:
                time.sleep(0.001)
            short = bench.run(prompt(40), 2)
            long.wait()
            short.wait()
            rows.append((short.ttft, long.ttft, max(decode.gaps[at - 1 :])))
            bench.engine.stop()
        short_s, long_s, stall = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {short_s:.2f} | {long_s:.2f} | {stall:.2f} |")


def kv(model: LlamaModel, runs: int) -> None:
    """Saving and restoring 512 tokens, into a context with another number of slots."""
    source = LlamaRunner(model, RunnerOptions(slots=2, context_tokens=1024, threads=1))
    target = LlamaRunner(model, RunnerOptions(slots=4, context_tokens=768, threads=1))
    source.prefill([Rows(0, prompt(512), 0, True)])
    times = []
    for _ in range(runs * 5):
        begun = time.thread_time()
        data = source.export(0, 512)
        saved = time.thread_time()
        target.restore(1, data)
        times.append((saved - begun, time.thread_time() - saved))
    save, restore = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"512 tokens, {len(data)} bytes: save {save * 1e3:.1f} ms, restore {restore * 1e3:.1f} ms")
    source.close()
    target.close()


def python(model: LlamaModel, runs: int) -> None:
    """What is outside the library in a step of eight decodes, by the thread's own CPU clock."""
    begun = time.perf_counter()
    for _ in range(1000):
        time.thread_time()
    cost = (time.perf_counter() - begun) / 1000  # of one reading, half of it before the moment that it tells
    shares, steps = [], []
    for _ in range(runs):
        bench = Bench(model, options(slots=8, context=512))
        bench.clock = time.CLOCK_MONOTONIC
        inside = [0.0, 0]
        plain = bench.engine.runner._run

        def timed(rows: int, wanted: int, factor: float, plain=plain, inside=inside):
            before = time.thread_time()
            result = plain(rows, wanted, factor)
            inside[0] += time.thread_time() - before
            inside[1] += 1
            return result

        eight = [bench.run(prompt(60), 100) for _ in range(8)]
        while not all(len(run.times) >= 5 for run in eight):
            time.sleep(0.01)
        bench.engine.runner._run = timed
        marks: list[tuple[float, float, float]] = []

        def mark(marks: list[tuple[float, float, float]] = marks, inside: list[float] = inside) -> None:
            marks.append((time.thread_time(), inside[0], inside[1]))

        bench.engine.call(mark)
        while min(len(run.times) for run in eight) < 90:
            time.sleep(0.02)
        bench.engine.call(mark)
        for run in eight:
            run.wait()
        total, library, passes = (after - before for before, after in zip(*marks, strict=True))
        outside = total - library - passes * cost
        shares.append(outside / (total - passes * cost))
        steps.append(total / passes)
        bench.engine.stop()
    print(
        f"Python at 8 sequences: {statistics.median(shares) * 100:.2f} % of the thread's CPU time "
        f"(steps of {statistics.median(steps) * 1e3:.0f} ms)"
    )


def pair(model: LlamaModel, runs: int) -> None:
    """One instance against two in one process, one thread each."""
    ratios = []
    for _ in range(runs):
        rates = []
        for count in (1, 2):
            benches = [Bench(model, options(slots=4, context=512)) for _ in range(count)]
            begun = time.perf_counter()
            all_runs = [bench.run(prompt(64), 64) for bench in benches for _ in range(4)]
            for run in all_runs:
                run.wait()
            rates.append(64 * len(all_runs) / (time.perf_counter() - begun))
            for bench in benches:
                bench.engine.stop()
        ratios.append(rates[1] / rates[0])
    print(f"two instances in one process: {statistics.median(ratios):.2f} times one {[round(r, 2) for r in ratios]}")


def preempt(model: LlamaModel, runs: int) -> None:
    """All slots are busy with batch work and an interactive request comes."""
    for mode in ("swap", "recompute"):
        steps, firsts = [], []
        for _ in range(runs):
            bench = Bench(model, options(slots=4, context=512, preemption=mode))
            batch = [bench.run(prompt(100), 120, priority=10) for _ in range(6)]
            while not all(len(run.times) >= 10 for run in batch[:4]):
                time.sleep(0.01)
            box: list[int] = []
            bench.engine.call(lambda bench=bench, box=box: box.append(bench.engine.counters.steps))
            urgent = bench.run(prompt(30), 3, priority=0)
            while not urgent.times:
                time.sleep(0.001)
            bench.engine.call(lambda bench=bench, box=box: box.append(bench.engine.counters.steps))
            urgent.wait()
            for run in batch:
                run.wait()
            steps.append(box[1] - box[0])
            firsts.append(urgent.ttft)
            bench.engine.stop()
        print(f"{mode}: first token after at most {max(steps)} steps, median {statistics.median(firsts):.3f} s")


def speed(model: LlamaModel, runs: int) -> None:
    """What the library itself does: prefill of 512 tokens, decode steps at 200 tokens of context."""
    runner = LlamaRunner(model, RunnerOptions(slots=8, context_tokens=768, threads=1))
    tokens = prompt(512)
    prefill = []
    for _ in range(runs):
        runner.trim(0, 0)
        begun = time.thread_time()
        runner.prefill([Rows(0, tokens, 0, True)])
        prefill.append(512 / (time.thread_time() - begun))
    runner.trim(0, 200)
    for slot in range(1, 8):
        runner.copy(0, slot, 200)
    parts = []
    for count in (1, 4, 8):
        slots = list(range(count))
        times = []
        for step in range(10 * runs):
            begun = time.thread_time()
            runner.decode(slots, [5000] * count, [200 + step] * count)
            times.append(time.thread_time() - begun)
        for slot in slots:
            runner.trim(slot, 200)
        parts.append(f"B{count} {statistics.median(times) * 1e3:.1f} ms")
    name = f"{model.library.path.name}, {model.describe()}"
    print(f"{name}: prefill {statistics.median(prefill):.0f} tokens/s, decode {', '.join(parts)}")
    runner.close()


CASES: dict[str, Callable[[LlamaModel, int], None]] = {
    case.__name__: case for case in (budgets, prefix, cyclic, spf, kv, python, pair, preempt, speed)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[*CASES, []])
    parser.add_argument("--library", help="`dispatch` or a path")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    model = LlamaModel(Library(resolve_library(arguments.library)), ModelOptions(resolve_model(arguments.model)[0]))
    for name in arguments.cases:
        print(f"\n{name}: {(CASES[name].__doc__ or '').strip()}", flush=True)
        CASES[name](model, arguments.runs)


if __name__ == "__main__":
    main()
