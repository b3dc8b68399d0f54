"""Measure what calibration is worth: calibrate an embedded instance, then forecast traffic that it was not made from.

    python benchmarks/calibration.py calibrate --out full.json --throttle 1 --budget 170
    python benchmarks/calibration.py check full.json --throttle 1 --load 0.5 --seconds 120
    python benchmarks/calibration.py capacity full.json --throttle 1 --seconds 60
    python benchmarks/calibration.py whole --out full.json half.json --throttle 1 2
    python benchmarks/calibration.py tables full.json half.json

Every command but the last starts an engine of its own (one thread, four slots, 1,024 tokens) and ends it, and prints
or writes JSON; `tables` makes the page's tables of what `whole` wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from weighbridge.calibrate.check import Checker, Traffic
from weighbridge.calibrate.endpoint import read_endpoint
from weighbridge.calibrate.files import read_profile, write_profile
from weighbridge.calibrate.live import calibrate_url
from weighbridge.calibrate.replay import Replayed
from weighbridge.calibrate.report import draw
from weighbridge.http.client import HttpClient


@contextmanager
def engine(throttle: float) -> Iterator[str]:
    """An embedded instance as a process of its own; yields its URL."""
    command = [sys.executable, "-m", "weighbridge.cli", "engine", "--port", "0", "--slots", "4", "--context", "1024"]
    command += ["--threads", "1", "--throttle", str(throttle), "--json"]
    if hasattr(os, "SCHED_RR") and os.sched_getscheduler(0) == os.SCHED_RR:
        command = ["chrt", "-r", "10", *command]  # below this process, so that its time stamps are never late
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield f"http://127.0.0.1:{ready['port']}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def calibrate(args: argparse.Namespace) -> None:
    with engine(args.throttle) as url:
        begun = time.monotonic()
        found = asyncio.run(calibrate_url(url, budget_s=args.budget))
    write_profile(args.out, found.profile)
    draw(found, args.out.with_suffix(".png"))
    print(json.dumps({"seconds": time.monotonic() - begun, "warnings": found.warnings}))
    print(msgspec.json.encode(found.profile).decode())


def check(args: argparse.Namespace) -> None:
    async def run(url: str) -> None:
        client = HttpClient()
        try:
            endpoint = await read_endpoint(client, url)
            checker = Checker(client, endpoint, read_profile(args.profile), seed=args.seed)
            if args.command == "capacity":
                print(msgspec.json.encode(await checker.capacity(args.seconds)).decode())
                return
            report, done = await checker.at(args.load, args.seconds)
            print(msgspec.json.encode(report).decode())
            if args.rows is not None:
                args.rows.write_text(json.dumps(_rows(done)))
        finally:
            await client.close()

    with engine(args.throttle) as url:
        asyncio.run(run(url))


def whole(args: argparse.Namespace) -> None:
    """Per instance: calibrate, then a backlog and two loads on the same engine; everything into one JSON file."""

    async def run(url: str, out: Path) -> dict[str, object]:
        begun = time.monotonic()
        found = await calibrate_url(url, budget_s=args.budget)
        took = time.monotonic() - begun
        write_profile(out.with_suffix(".profile.json"), found.profile)
        draw(found, out.with_suffix(".png"))
        result: dict[str, object] = {"calibrate_s": took, "profile": found.profile, "warnings": found.warnings}
        client = HttpClient()
        try:
            endpoint = await read_endpoint(client, url)
            traffic = Traffic(prompt_median=24, output_mean=12, output_most=48)
            checker = Checker(client, endpoint, found.profile, seed=args.seed, traffic=traffic)
            result["capacity"] = await checker.capacity(args.backlog)
            for load in (0.5, 0.9):
                report, done = await checker.at(load, args.seconds)
                result[f"load_{load}"] = report
                result[f"rows_{load}"] = _rows(done)
        finally:
            await client.close()
        return result

    for throttle, out in zip(args.throttle, args.out, strict=True):
        with engine(throttle) as url:
            out.write_bytes(msgspec.json.encode(asyncio.run(run(url, out))))


def _rows(done: Sequence[Replayed]) -> list[list[float | None]]:
    """Arrival, prompt and output tokens, then observed and forecast TTFT, TPOT and E2E of each request."""
    return [
        [r.request.arrival_s, r.request.prompt_tokens, r.request.output_tokens]
        + [getattr(x, m) for m in ("ttft_s", "tpot_s", "e2e_s") for x in (r.request, r)]
        for r in done
    ]


LOADS = ("0.5", "0.9")
METRICS = ("TTFT", "TPOT", "E2E")
Row = list[float]


def tables(args: argparse.Namespace) -> None:
    """Markdown: errors and bands, capacity, and errors by prompt length and by how many others ran on arrival."""
    found = {path.stem: json.loads(path.read_bytes()) for path in args.files}
    print("| instance | calibration | load | requests | TTFT | TPOT | E2E | inside the 90 % band | bias of the mean |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in found.items():
        for load in LOADS:
            report = one[f"load_{load}"]
            errors = [report["metrics"][m.lower() + "_s"] for m in METRICS]
            inside = " / ".join(f"{100 * report['inside'][m.lower() + '_s']:.0f}" for m in METRICS)
            bias = " / ".join(f"{100 * e['bias_mean']:+.1f}" for e in errors)
            medians = " | ".join(f"{100 * e['median']:.1f} %" for e in errors)
            took = f"{one['calibrate_s']:.0f} s, {one['profile']['extra']['probes']} probes"
            share = f"{100 * float(load):.0f} %"
            print(f"| {name} | {took} | {share} | {report['requests']} | {medians} | {inside} % | {bias} % |")
    print("\n| instance | forecast capacity | measured | off by | requests |\n|---|---|---|---|---|")
    for name, one in found.items():
        c = one["capacity"]
        off = 100 * (c["forecast_per_s"] / c["measured_per_s"] - 1)
        print(
            f"| {name} | {c['forecast_per_s']:.2f} /s | {c['measured_per_s']:.2f} /s | {off:+.1f} % | {c['requests']} |"
        )
    _grouped("prompt tokens", found, lambda rows: [_bucket(r[1], (16, 32, 64, 10_000)) for r in rows])
    _grouped("others on arrival", found, lambda rows: [_bucket(n, (0, 1, 3, 10_000)) for n in _concurrency(rows)])


def _grouped(title: str, found: dict[str, dict[str, list[Row]]], key: Callable[[list[Row]], list[str]]) -> None:
    print(f"\n| instance, load | {title} | requests | " + " | ".join(METRICS) + " |\n|---|---|---|---|---|---|")
    for name, one in found.items():
        for load in LOADS:
            rows = one[f"rows_{load}"]
            keys = key(rows)
            for value in dict.fromkeys(sorted(keys, key=lambda text: int(text.split()[-1]))):
                picked = [row for row, k in zip(rows, keys, strict=True) if k == value]
                cells = []
                for at in (3, 5, 7):
                    errors = [abs(r[at + 1] / r[at] - 1) for r in picked if r[at]]
                    cells.append(f"{100 * statistics.median(errors):.1f} %" if errors else "")
                print(f"| {name}, {100 * float(load):.0f} % | {value} | {len(picked)} | " + " | ".join(cells) + " |")


def _bucket(value: float, edges: Sequence[int]) -> str:
    low = 0
    for edge in edges:
        if value <= edge:
            return f"{low} to {edge}" if edge < 10_000 else f"at least {low}"
        low = edge + 1
    raise AssertionError(value)


def _concurrency(rows: list[Row]) -> list[int]:
    """How many requests were in the engine when each arrived; arrival plus E2E is when one left."""
    return [sum(other[0] < row[0] < other[0] + other[7] for other in rows) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("calibrate")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--budget", type=float, default=170.0)
    for name in ("check", "capacity"):
        two = commands.add_parser(name)
        two.add_argument("profile", type=Path)
        two.add_argument("--seconds", type=float, default=100.0)
        two.add_argument("--load", type=float, default=0.5)
        two.add_argument("--seed", type=int, default=11)
        two.add_argument("--rows", type=Path)
    three = commands.add_parser("whole")
    three.add_argument("--out", type=Path, nargs="+", required=True)
    three.add_argument("--throttle", type=float, nargs="+", default=[1.0])
    three.add_argument("--budget", type=float, default=300.0)
    three.add_argument("--seconds", type=float, default=120.0)
    three.add_argument("--backlog", type=float, default=20.0)
    three.add_argument("--seed", type=int, default=11)
    commands.add_parser("tables").add_argument("files", type=Path, nargs="+")
    for command in (one, *(commands.choices[name] for name in ("check", "capacity"))):
        command.add_argument("--throttle", type=float, default=1.0)
    args = parser.parse_args()
    {"calibrate": calibrate, "whole": whole, "tables": tables}.get(args.command, check)(args)


if __name__ == "__main__":
    main()
