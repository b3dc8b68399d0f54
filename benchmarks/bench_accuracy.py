"""What `weighbridge bench` reports against what is known: exact delays, a five-second stall, and a high rate.

    python benchmarks/bench_accuracy.py [delays] [stall] [rate]

Starts `tests.support.exact_server` beside itself (on a processor of its own where there are two) and prints one row for
each figure: the median of the undisturbed among RUNS runs, and their extremes. The server tells how late it was itself;
a run in which its own 99th percentile is above DISTURBED_S had to share its processors, and says so.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weighbridge.bench.run import RunOptions, measure
from weighbridge.bench.schedule import DrawOptions

ROOT = Path(__file__).resolve().parent.parent
RUNS = 10
DISTURBED_S = 0.001


@contextmanager
def server(**behaviour: float | str) -> Iterator[str]:
    flags = [part for name, value in behaviour.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tests.support.exact_server", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run(url: str, plan: DrawOptions) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return measure(RunOptions(url=url, plan=plan, out=Path(folder))).report


def row(name: str, true: float, measured: list[float]) -> None:
    middle = statistics.median(measured)
    error = middle - true
    within = "yes" if abs(error) <= max(0.001, 0.01 * true) else "NO"
    spread = f"{1e3 * min(measured):.2f} to {1e3 * max(measured):.2f}"
    print(f"| {name} | {1e3 * true:.1f} ms | {1e3 * middle:.2f} ms | {spread} | {1e3 * error:+.2f} ms | {within} |")


def late(url: str) -> float:
    """How late the server itself sent first tokens: the 99th percentile, seconds."""
    with urllib.request.urlopen(f"{url}/late") as reply:
        values = sorted(json.load(reply))
    return float(values[int(0.99 * len(values))])


def verdict(report: dict[str, Any], more: str = "") -> None:
    lag = report["generator"]["send_lag_s"]
    print(
        f"{report['verdict']}: send lag p50 {1e3 * lag['p50']:.2f}, p99 {1e3 * lag['p99']:.2f}, max "
        f"{1e3 * lag['max']:.2f} ms; {report['by_status']}; {report['achieved_rate']:.0f} requests/s, "
        f"{report['output_tokens_per_s']:.0f} tokens/s; "
        f"{100 * report['generator']['cpu_share']:.0f} % of a core; {more}"
    )


def delays() -> None:
    """Every metric of 400 requests at 40/s, 50 tokens each, against the server's delays, RUNS times."""
    reports = []
    for _ in range(RUNS):
        with server(ttft=0.2, tpot=0.02, spin="true") as url:
            report = run(url, DrawOptions(rate=40.0, count=400, input="100", output="50"))
            lateness = late(url)
        verdict(report, f"server late p99 {1e3 * lateness:.2f} ms")
        if lateness <= DISTURBED_S:
            reports.append(report)
    print(f"{len(reports)} of {RUNS} runs undisturbed")
    if not reports:
        return
    print("| metric | true | measured | from - to | error | within 1 % or 1 ms |\n|---|---|---|---|---|---|")
    for q in ("mean", "p50", "p90", "p99"):
        for name, true in (("TTFT", 0.2), ("TPOT", 0.02), ("E2E", 0.2 + 49 * 0.02)):
            row(f"{name} {q}", true, [r[f"{name.lower()}_s"][q] for r in reports])
    for q in ("mean", "p50", "p99"):
        row(f"ITL {q}", 0.02, [r["itl_s"][q] for r in reports])


def stall() -> None:
    """800 requests at 40/s through a stall of 5 s: a quarter of them waits, evenly from 0 to 5 s."""
    with server(ttft=0.02, tpot=0.001, stall_at=9.0, stall_for=5.0) as url:
        report = run(url, DrawOptions(rate=40.0, count=800, arrivals="constant", input="50", output="2"))
    print("| percentile of TTFT | with the stall in full | measured |\n|---|---|---|")
    for q, share in (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        expected = 0.02 + max(0.0, 5.0 * (share - 0.75) / 0.25)
        print(f"| {q} | {expected:.3f} s | {report['ttft_s'][q]:.3f} s |")
    verdict(report)


def rate() -> None:
    """2,000 requests/s of 10 tokens, RUNS times, then rates that are too much for one process."""
    for per_second in (*([2000.0] * RUNS), 4000.0, 8000.0):
        with server(ttft=0.05, tpot=0.01) as url:
            report = run(url, DrawOptions(rate=per_second, duration_s=4.0, input="20", output="10"))
            print(f"{per_second:,.0f}/s", end=" ")
            verdict(report, f"server late p99 {1e3 * late(url):.2f} ms")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("delays", "stall", "rate"):
        print(f"\n## {name}\n")
        {"delays": delays, "stall": stall, "rate": rate}[name]()
