"""`weighbridge bench` beside NVIDIA's `aiperf` on one server whose delays are known: do the figures agree?

    python benchmarks/bench_beside.py --aiperf VENV/bin/aiperf --tokenizer DIR [--runs 3]

Request n of the server is up to 1.5 times as slow as the first, by a fixed sequence, so that percentiles differ. The
tools run one after another, on a fresh server each, in turn. `DIR` is any local tokenizer (aiperf needs one for its
prompts; its token counts come from the server here, as ours do).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_accuracy import ROOT, run, server

from weighbridge.bench.schedule import DrawOptions

RATE, COUNT, TOKENS, INPUT = 20.0, 400, 50, 100
BEHAVIOUR = {"ttft": 0.2, "tpot": 0.02, "spread": 0.5}
QUANTILES = ("mean", "p50", "p90", "p99")


def ours() -> dict[str, float]:
    """Milliseconds and rates; TTFT and E2E from the moment of sending, as aiperf counts."""
    with server(**BEHAVIOUR) as url:
        report = run(
            url, DrawOptions(rate=RATE, count=COUNT, arrivals="constant", input=str(INPUT), output=str(TOKENS))
        )
    assert report["verdict"] == "VALID", report["verdict_reasons"]
    found = {}
    for name, key in (("TTFT", "ttft_s"), ("E2E", "e2e_s"), ("TPOT", "tpot_s")):
        found |= {f"{name} {q}": 1e3 * report[key][q] for q in QUANTILES}
    found["requests/s"] = report["request_throughput"]
    found["output tokens/s"] = report["output_throughput"]
    return found


def theirs(aiperf: str, tokenizer: str) -> dict[str, float]:
    """The same by aiperf."""
    with server(**BEHAVIOUR) as url, tempfile.TemporaryDirectory() as folder:
        command = [aiperf, "profile", "-m", "exact", "--url", url, "--endpoint-type", "chat", "--streaming"]
        command += ["--tokenizer", tokenizer, "--use-server-token-count", "--artifact-dir", folder]
        command += ["--request-rate", str(RATE), "--request-rate-mode", "constant", "--request-count", str(COUNT)]
        command += ["--isl", str(INPUT), "--osl", str(TOKENS), "--random-seed", "1", "--ui", "none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        report = json.loads((Path(folder) / "profile_export_aiperf.json").read_bytes())
    found = {}
    for name, key in (("TTFT", "time_to_first_token"), ("E2E", "request_latency"), ("TPOT", "inter_token_latency")):
        found |= {f"{name} {q}": report[key]["avg" if q == "mean" else q] for q in QUANTILES}
    found["requests/s"] = report["request_throughput"]["avg"]
    found["output tokens/s"] = report["output_token_throughput"]["avg"]
    return found


def truth() -> dict[str, float]:
    """What the server's delays amount to, in the same units."""
    sys.path.insert(0, str(ROOT))
    from tests.support.exact_server import Behaviour
    from weighbridge.core.metrics import distribution

    b = Behaviour(**BEHAVIOUR)
    # both tools probe before they begin, so the sequence may start anywhere: 400 requests are four whole periods of it
    numbers = range(1, COUNT + 1)
    ttft = [1e3 * b.ttft_of(n) for n in numbers]
    tpot = [1e3 * b.tpot_of(n) for n in numbers]
    e2e = [t + (TOKENS - 1) * p for t, p in zip(ttft, tpot, strict=True)]
    found = {}
    for name, values in (("TTFT", ttft), ("E2E", e2e), ("TPOT", tpot)):
        spread = distribution(values)
        found |= {f"{name} {q}": getattr(spread, q) for q in QUANTILES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    mine, other = [], []
    for _ in range(arguments.runs):
        mine.append(ours())
        other.append(theirs(arguments.aiperf, arguments.tokenizer))
    known = truth()
    print("| figure | true | weighbridge | aiperf | difference | within 2 % |\n|---|---|---|---|---|---|")
    for name in mine[0]:
        a = statistics.median(run[name] for run in mine)
        b = statistics.median(run[name] for run in other)
        apart = 100 * (a / b - 1)
        true = f"{known[name]:.2f}" if name in known else ""
        print(f"| {name} | {true} | {a:.2f} | {b:.2f} | {apart:+.2f} % | {'yes' if abs(apart) <= 2 else 'NO'} |")


if __name__ == "__main__":
    main()
