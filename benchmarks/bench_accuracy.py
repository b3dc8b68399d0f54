"""What `weighbridge bench` reports against what is known: exact delays, a five-second stall, and a high rate.

    python benchmarks/bench_accuracy.py [delays] [stall] [rate]

Starts `tests.support.exact_server` beside itself and prints one row for each figure.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weighbridge.bench.run import RunOptions, measure
from weighbridge.bench.schedule import DrawOptions

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def server(**behaviour: float) -> Iterator[str]:
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


def row(name: str, true: float, measured: float) -> None:
    error = measured - true
    within = "yes" if abs(error) <= max(0.001, 0.01 * true) else "NO"
    print(f"| {name} | {1e3 * true:.1f} ms | {1e3 * measured:.2f} ms | {1e3 * error:+.2f} ms | {within} |")


def verdict(report: dict[str, Any]) -> None:
    lag = report["generator"]["send_lag_s"]
    print(
        f"{report['verdict']}: send lag p50 {1e3 * lag['p50']:.2f}, p99 {1e3 * lag['p99']:.2f}, max "
        f"{1e3 * lag['max']:.2f} ms; {report['by_status']}; {report['achieved_rate']:.0f} requests/s, "
        f"{report['output_tokens_per_s']:.0f} tokens/s; {100 * report['generator']['cpu_share']:.0f} % of a core"
    )


def delays() -> None:
    """Every metric of 400 requests at 40/s, 50 tokens each, against the server's delays."""
    with server(ttft=0.2, tpot=0.02) as url:
        report = run(url, DrawOptions(rate=40.0, count=400, input="100", output="50"))
    print("| metric | true | measured | error | within 1 % or 1 ms |\n|---|---|---|---|---|")
    for q in ("mean", "p50", "p90", "p99"):
        row(f"TTFT {q}", 0.2, report["ttft_s"][q])
        row(f"TPOT {q}", 0.02, report["tpot_s"][q])
        row(f"E2E {q}", 0.2 + 49 * 0.02, report["e2e_s"][q])
    row("ITL mean", 0.02, report["itl_s"]["mean"])
    row("ITL p50", 0.02, report["itl_s"]["p50"])
    verdict(report)


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
    """2,000 requests/s of 10 tokens, then twice that."""
    with server(ttft=0.05, tpot=0.01) as url:
        for per_second in (2000.0, 4000.0):
            verdict(run(url, DrawOptions(rate=per_second, duration_s=8.0, input="20", output="10")))


if __name__ == "__main__":
    for name in sys.argv[1:] or ("delays", "stall", "rate"):
        print(f"\n## {name}\n")
        {"delays": delays, "stall": stall, "rate": rate}[name]()
